"""`up` with a changed file changes the running stack, `--rollback` takes it back."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx

from tests.integration.harness import (
    PROMPT,
    STACK,
    RunningStack,
    ended,
    halted,
    sse_data,
    wait_until,
)


def changed(stack: RunningStack, name: str, gateway: dict[str, Any], dense: dict[str, Any]) -> Any:
    """The stack's file with other values for the gateway and tiny-dense."""
    content = copy.deepcopy(dict(STACK))
    content["gateway"] |= gateway
    content["models"][1] |= dense
    return stack.write(name, content)


def replicas(stack: RunningStack) -> set[int]:
    return {p.pid for p in stack.processes() if "ServeReplica" in " ".join(p.cmdline())}


class Load:
    """Statuses of requests sent one after the other, by a thread."""

    def __init__(self, url: str, model: str, stream: bool) -> None:
        self.outcomes: list[str] = []
        self._stop = threading.Event()
        self._body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "stream": stream}
        self._url = url
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            while not self._stop.is_set():
                self.outcomes.append(self._one(client))
                time.sleep(0.05)

    def _one(self, client: httpx.Client) -> str:
        try:
            reply = client.post("/v1/completions", json=self._body)
        except httpx.HTTPError as error:
            return type(error).__name__
        cut = self._body["stream"] and not reply.text.rstrip().endswith("data: [DONE]")
        return "cut" if cut else str(reply.status_code)


@contextlib.contextmanager
def constant_load(stack: RunningStack, model: str) -> Iterator[list[Load]]:
    with Load(stack.url, model, stream=True) as one, Load(stack.url, model, stream=False) as two:
        yield [one, two]


def test_the_gateways_time_limit_changes_on_the_running_stack_and_back(
    stack: RunningStack,
) -> None:
    before, core = replicas(stack), stack.engine("tiny-dense@plain").core
    hasty = changed(stack, "hasty", {"request_timeout_s": 2.0}, {})
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
    shorter = changed(stack, "shorter", {}, {"max_model_len": 2048, "aliases": ["dense", "small"]})
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
    broken = changed(
        stack, "broken", {}, {"engine_args": {"quantization": "fp8"}, "max_model_len": 2048}
    )
    with constant_load(stack, "tiny-dense") as loads:
        result = stack.up(broken)

    assert result.returncode == 2, result.stdout
    assert "tiny-dense@plain did not start" in " ".join(result.stdout.split())
    assert all(set(load.outcomes) == {"200"} for load in loads)
    wait_until(lambda: replicas(stack) == before, 60, "the failed engine is gone")
    assert stack.http.get("/v1/models").json() == cards
