"""The command as a user meets it: output, JSON and exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from serving.checks.command import check
from serving.checks.rules import RULES
from tests.unit.checks.builders import TRUNK, checkpoint

app = typer.Typer()
app.command()(check)
DRAFTING = ("--", "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    return result.exit_code, " ".join(result.output.split())


def test_what_is_all_right_exits_with_0() -> None:
    assert run("demo", "--vllm-version", "0.32.0") == (0, "demo: vLLM 0.32.0 (given) nothing found")


def test_errors_exit_with_2(tmp_path: Path) -> None:
    code, output = run(checkpoint(tmp_path, tensors=TRUNK))
    assert code == 2
    assert "error" in output
    assert "MTP010" in output
    assert output.endswith("1 error")


def test_warnings_exit_with_1_only_where_they_count(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, files={"tokenizer.json": "{}"})
    assert [run(target)[0], run("--strict", target)[0]] == [0, 1]


def test_notes_never_count(tmp_path: Path) -> None:
    arguments = ("--strict", "--gpu", "rtx3090", "--", "--kv-cache-dtype", "auto")
    code, output = run(checkpoint(tmp_path), *arguments)
    assert (code, output.endswith("nothing found")) == (0, True)
    drafting = (*DRAFTING, "--kv-cache-dtype=fp8", "--no-enable-prefix-caching")
    code, output = run(
        str(tmp_path), "--strict", "--gpu", "h100", *drafting, "--no-async-scheduling"
    )
    assert (code, output[-6:]) == (0, "1 note")


def test_an_error_with_strict_is_still_an_error(tmp_path: Path) -> None:
    assert run("--strict", checkpoint(tmp_path, tensors=TRUNK))[0] == 2


def test_json_holds_the_whole_finding(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, tensors=TRUNK)
    result = CliRunner().invoke(app, [target, "--json", "--vllm-version", "0.27.1"])
    report = json.loads(result.output)
    assert result.exit_code == 2
    assert {key: report[key] for key in ("target", "engine", "version", "version_is", "worst")} == {
        "target": target,
        "engine": "vllm",
        "version": "0.27.1",
        "version_is": "given",
        "worst": "error",
    }
    found = report["findings"][0]
    assert (found["code"], found["severity"], found["versions"]) == (
        "MTP010",
        "error",
        "vLLM >=0.17",
    )
    assert found["links"] == ["https://github.com/vllm-project/vllm/issues/35548"]
    assert set(found) == {
        "subject", "found", "code", "severity", "title", "effect", "cure", "versions", "state",
        "thread", "links",
    }  # fmt: skip


def test_rules_are_listed_for_people_and_for_programs() -> None:
    code, output = run("--list-rules")
    assert code == 0
    assert all(rule.code in output for rule in RULES)
    listed = json.loads(CliRunner().invoke(app, ["--list-rules", "--json"]).output)
    assert [each["code"] for each in listed] == [rule.code for rule in RULES]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "error: give a stack, a checkpoint's folder, a GGUF file or a repository id"),
        (
            ("demo", "--vllm-version", "new"),
            "error: vLLM version: found 'new'; write it as 0.32.0",
        ),
        (
            ("x.gguf", "--llamacpp-build", "latest"),
            "error: llama.cpp version: found 'latest'; write it as b11434",
        ),
        (
            ("none.yaml",),
            "error: none.yaml: no such stack file; give a path or one of",
        ),
    ],
)
def test_what_cannot_be_checked_is_one_message_and_2(arguments: tuple[str, ...], text: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert output.startswith(text)


def test_a_path_with_brackets_is_printed_as_it_is(tmp_path: Path) -> None:
    assert "[red]model: vLLM" in run(checkpoint(tmp_path / "[red]model", tensors=TRUNK))[1]
