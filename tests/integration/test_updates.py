"""`up` with a changed file changes the running stack, `--rollback` takes it back."""

from __future__ import annotations

import contextlib
import copy
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from serving.demo import checkpoint_path
from tests.integration.harness import (
    COMMAND,
    PROMPT,
    SHORTER,
    STACK,
    Load,
    RunningStack,
    ended,
    halted,
    sse_data,
    wait_until,
    with_zeroed_head,
)

# Serve may give a replica that goes all of gateway.request_timeout_s to end in order.
GONE_WITHIN_S = 150


def replicas(stack: RunningStack) -> set[int]:
    return {p.pid for p in stack.processes_of("ServeReplica")}


@contextlib.contextmanager
def constant_load(stack: RunningStack, model: str) -> Iterator[list[Load]]:
    with Load(stack.url, model, stream=True) as one, Load(stack.url, model, stream=False) as two:
        yield [one, two]


def test_the_gateways_time_limit_changes_on_the_running_stack_and_back(
    stack: RunningStack,
) -> None:
    before, core = replicas(stack), stack.engine("tiny-dense@plain").core
    hasty = stack.changed("hasty", gateway={"request_timeout_s": 2.0})
    result = stack.up(hasty)
    assert result.returncode == 0, result.stdout

    body = {"model": "tiny-dense", "max_tokens": 64}
    completion = {**body, "prompt": PROMPT}
    with halted(core):
        whole = stack.post("/v1/completions", completion)
        streamed = stack.post("/v1/completions", {**completion, "stream": True})
    with halted(core):
        messages = [{"role": "user", "content": PROMPT}]
        message = stack.post("/v1/messages", {**body, "messages": messages})
    text = "no complete reply within 2 s (gateway.request_timeout_s in the stack file)"
    error = {"message": text, "type": "server_error", "param": None, "code": "timeout"}
    assert (whole.status_code, whole.json()) == (504, {"error": error})
    assert sse_data(streamed.text)[-1] == {"error": error}
    assert "[DONE]" not in streamed.text
    assert message.status_code == 504
    assert message.json() == {"type": "error", "error": {"type": "timeout_error", "message": text}}

    back = stack.up(None, "--rollback")
    assert back.returncode == 0, back.stdout
    with halted(core):
        threading.Timer(3, core.resume).start()
        assert stack.post("/v1/completions", completion).status_code == 200
    assert replicas(stack) == before


def test_an_engine_is_replaced_under_load_and_no_request_fails(stack: RunningStack) -> None:
    old, others = stack.engine("tiny-dense@plain").replica, stack.engine("tiny-moe@mtp").replica
    shorter = stack.changed("shorter", dense=SHORTER)
    with constant_load(stack, "tiny-dense") as loads:
        result = stack.up(shorter)
        after = {load: len(load.outcomes) for load in loads}
        wait_until(lambda: all(len(x.outcomes) > after[x] for x in loads), 30, "load goes on")

    assert result.returncode == 0, result.stdout
    for load in loads:
        assert len(load.outcomes) > 20
        assert set(load.outcomes) == {"200"}
    assert stack.http.get("/v1/models/small").json()["max_model_len"] == 2048
    wait_until(lambda: ended(old), 60, "the old engine ends")
    assert stack.engine("tiny-dense@plain").replica.pid != old.pid
    assert others.is_running()
    assert stack.engine("tiny-moe@mtp").replica.pid == others.pid


def test_a_change_that_cannot_start_leaves_the_stack_as_it_was(stack: RunningStack) -> None:
    before = replicas(stack)
    cards = stack.http.get("/v1/models").json()
    broken = stack.changed(
        "broken", dense={"engine_args": {"quantization": "fp8"}, "max_model_len": 2048}
    )
    with constant_load(stack, "tiny-dense") as loads:
        result = stack.up(broken)

    assert result.returncode == 2, result.stdout
    assert "tiny-dense@plain did not start" in " ".join(result.stdout.split())
    assert all(set(load.outcomes) == {"200"} for load in loads)
    wait_until(lambda: replicas(stack) <= before, GONE_WITHIN_S, "the failed engine is gone")
    assert replicas(stack) == before, [" ".join(p.cmdline()) for p in stack.processes()]
    assert stack.http.get("/v1/models").json() == cards


def test_an_interrupted_change_leaves_the_stack_as_it_was(stack: RunningStack) -> None:
    before = replicas(stack)
    longer = stack.changed("longer", dense={"max_model_len": 3072})
    command = subprocess.Popen(
        [COMMAND, "up", str(longer), "--detach"],
        env=stack.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert command.stdout is not None
        for line in command.stdout:
            if line.startswith("tiny-dense@plain: loading"):
                break
        command.send_signal(signal.SIGINT)
        shown = command.communicate(timeout=120)[0]
    finally:
        command.kill()

    assert command.returncode == 130, shown
    assert "interrupted; the stack runs as before" in shown
    wait_until(lambda: replicas(stack) == before, GONE_WITHIN_S, "the unfinished engine is gone")
    assert stack.complete("tiny-dense")["usage"]["completion_tokens"] == 16


def test_a_change_without_room_is_refused_and_changes_nothing(stack: RunningStack) -> None:
    before = replicas(stack)
    result = stack.up(stack.changed("wide", dense={"num_cpus": 2.0}))
    assert result.returncode == 2, result.stdout
    shown = " ".join(result.stdout.split())
    assert "not enough room: the new engines start beside the old ones and" in shown
    assert "needs 2 CPUs" in shown
    assert replicas(stack) == before


def test_a_variant_whose_head_is_worthless_is_caught_by_its_probe(
    stack: RunningStack, tmp_path: Path
) -> None:
    before = replicas(stack)
    zeroed = with_zeroed_head(checkpoint_path("tiny-dense"), tmp_path / "zeroed")
    content = copy.deepcopy(dict(STACK))
    dense = content["models"][1]
    del dense["model"]
    dense |= {
        "id": "tiny-dense",
        "inline": {"path": str(zeroed), "max_context": 4096, "mtp_head": True},
        "variants": {"mtp": {"speculative": {"method": "mtp", "num_speculative_tokens": 1}}},
    }
    result = stack.up(stack.write("worthless", content))
    shown = " ".join(result.stdout.split())
    assert result.returncode == 2, shown
    assert "tiny-dense@mtp is not fit to serve: acceptance probe: accepted 0.0" in shown
    assert "The stack that ran before goes on serving." in shown
    wait_until(lambda: replicas(stack) == before, GONE_WITHIN_S, "the worthless engine is gone")
