"""`moe-serving` beside a stack that runs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.harness import STACK, VARIANTS, RunningStack


def test_status_says_what_runs_for_programs(stack: RunningStack) -> None:
    result = stack.command("status", "--json")
    assert result.returncode == 0, result.stdout
    status = json.loads(result.stdout)

    assert (status["stack"], status["url"], status["ready"]) == ("integration", stack.url, True)
    engines = {f"{e['model']}@{e['variant']}": e for e in status["engines"]}
    assert tuple(engines) == VARIANTS
    assert {e["state"] for e in engines.values()} == {"ready"}
    assert {(e["running_replicas"], e["wanted_replicas"]) for e in engines.values()} == {(1, 1)}
    assert [name for name, e in engines.items() if e["default"]] == [VARIANTS[0], VARIANTS[2]]
    assert set(status["applications"].values()) == {"RUNNING"}


def test_status_says_what_runs_for_people(stack: RunningStack) -> None:
    result = stack.command("status")

    assert result.returncode == 0, result.stdout
    assert f"integration at {stack.url}/v1" in result.stdout
    assert "tiny-moe@mtp (default): ready, 1 of 1 replicas, mtp, n=2" in result.stdout
    assert "tiny-dense@plain (default): ready, 1 of 1 replicas, no drafting" in result.stdout


def test_the_same_stack_again_changes_nothing(stack: RunningStack) -> None:
    before = {process.pid for process in stack.processes()}
    result = stack.up(stack.file)

    assert result.returncode == 0, result.stdout
    assert "nothing to change" in result.stdout
    assert {process.pid for process in stack.processes()} == before
    assert stack.answers("tiny-moe")


def test_a_port_that_is_taken_is_named_with_its_owner(stack: RunningStack, tmp_path: Path) -> None:
    result = stack.command("up", stack.file, "--port", str(stack.port), home=tmp_path / "other")
    text = " ".join(result.stdout.split())

    assert result.returncode == 2
    assert f"gateway.port: {stack.port} is taken by haproxy" in text
    assert "choose another port with --port" in text
    assert "Traceback" not in text
    assert stack.command("status", home=tmp_path / "other").returncode == 2
    assert stack.answers("tiny-moe")


def test_a_changed_port_is_refused_while_the_stack_runs(stack: RunningStack) -> None:
    result = stack.up(stack.file, "--port", str(stack.port + 1))
    text = " ".join(result.stdout.split())

    assert result.returncode == 2
    assert "gateway.port: found" in text
    assert "`moe-serving down`" in text
    assert stack.answers("tiny-moe")


def test_a_wrong_stack_file_is_refused_and_nothing_happens(stack: RunningStack) -> None:
    wrong = stack.write("wrong", {**STACK, "gatewey": {}})
    result = stack.up(wrong)

    assert result.returncode == 2
    assert "gatewey: did you mean gateway?" in " ".join(result.stdout.split())
    assert stack.answers("tiny-moe")


def test_chat_streams_an_answer_with_its_speed_and_acceptance(stack: RunningStack) -> None:
    options = ("--prompt", "def add(a, b):", "--completion", "--max-tokens", "48")
    result = stack.command("chat", "tiny-moe", "--temperature", "0", *options)

    assert result.returncode == 0, result.stdout
    assert "tokens/s after the first" in result.stdout
    assert "mean acceptance length" in result.stdout
    assert result.stdout.rstrip().endswith("variant mtp")


def test_chat_names_what_is_served_where_the_model_is_unknown(stack: RunningStack) -> None:
    result = stack.command("chat", "gpt-4", "--prompt", "hello")

    assert result.returncode == 2
    assert "the model 'gpt-4' is not served here" in " ".join(result.stdout.split())
