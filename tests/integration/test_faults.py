"""Engines, gateway, proxy and controller die or hang; clients are told, and Serve replaces them.

Each test does it to the real stack and counts what clients saw. It breaks something that the one
before did not, so that none waits for a replacement it does not need. The cheapest are part of
`make test`, all of `make test-faults`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from openai import OpenAI

from tests.integration.harness import (
    ENDLESS,
    PROMPT,
    VARIANTS,
    Clients,
    RunningStack,
    ended,
    halted,
    sse_data,
    wait_until,
)

REPLACED_WITHIN_S = 240.0
# What is promised; it is 24 s as a rule.
HANG_NOTICED_WITHIN_S = 30.0


@contextlib.contextmanager
def endless_stream(stack: RunningStack, model: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that goes on until something ends it; the first was read."""
    body = {"model": model, "prompt": PROMPT, "stream": True, **ENDLESS, "max_tokens": 2000}
    with stack.http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert next(lines).startswith("data:")
        yield lines


def assert_ended_by_an_error(rest: list[str], model: str) -> None:
    events = sse_data("\n".join(rest))
    assert events[-1]["error"]["code"] == "engine_died"
    message = f"the engine of {model} stopped before the reply was complete"
    assert events[-1]["error"]["message"] == message
    assert not any("error" in event for event in events[:-1])
    assert "data: [DONE]" not in rest


def ask(stack: RunningStack, model: str) -> httpx.Response:
    return stack.post("/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 2})


def assert_told_to_come_back(reply: httpx.Response) -> None:
    assert reply.status_code == 503, reply.text
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json()["error"]["type"] == "server_error"
    assert reply.json()["error"]["code"] in ("engine_unavailable", "engine_died")


def test_a_stream_whose_engine_dies_ends_with_an_error_and_the_engine_is_replaced(
    stack: RunningStack, openai_client: OpenAI
) -> None:
    engine = stack.engine("tiny-dense@plain")
    core = engine.core
    with endless_stream(stack, "tiny-dense") as lines:
        core.kill()
        assert_ended_by_an_error(list(lines), "tiny-dense")

    told: list[httpx.Response] = []
    deadline = time.monotonic() + REPLACED_WITHIN_S
    while (reply := ask(stack, "tiny-dense")).status_code != 200:
        assert_told_to_come_back(reply)
        if not told:
            with pytest.raises(openai.InternalServerError) as raised:
                openai_client.completions.create(model="tiny-dense", prompt=PROMPT)
            assert raised.value.status_code == 503
        told.append(reply)
        assert time.monotonic() < deadline, "the engine is not replaced"
        assert ask(stack, "tiny-moe@plain").status_code == 200
        time.sleep(0.5)
    assert told, "a request was answered by a dead engine"
    assert stack.engine("tiny-dense@plain").core.pid != core.pid
    assert ended(engine.replica)


@pytest.mark.slow
def test_an_engine_that_hangs_with_work_is_unhealthy_within_30_seconds(
    stack: RunningStack,
) -> None:
    core = stack.engine("tiny-moe@mtp").core
    with endless_stream(stack, "tiny-moe@mtp") as lines, halted(core):
        wait_until(
            lambda: stack.readiness().get("tiny-moe@mtp", "running") != "running",
            HANG_NOTICED_WITHIN_S,
            "the hung engine is reported",
        )
        assert stack.http.get("/readyz").status_code == 503
        assert_ended_by_an_error(list(lines), "tiny-moe")
        wait_until(lambda: ended(core), 15, "the hung engine core is ended")
    assert_told_to_come_back(ask(stack, "tiny-moe@mtp"))
    assert ask(stack, "tiny-moe@plain").status_code == 200


@pytest.mark.slow
def test_a_stream_whose_whole_replica_dies_ends_with_an_error(stack: RunningStack) -> None:
    engine = stack.engine("tiny-moe@plain")
    core = engine.core
    with endless_stream(stack, "tiny-moe@plain") as lines:
        engine.replica.kill()
        assert_ended_by_an_error(list(lines), "tiny-moe")

    assert_told_to_come_back(ask(stack, "tiny-moe@plain"))
    wait_until(lambda: ended(core), 15, "the dead replica's engine core ends too")


@pytest.mark.slow
def test_a_killed_worker_takes_its_engine_along_and_the_stream_is_told(stack: RunningStack) -> None:
    # On a CPU a worker has a process of its own where its threads are bound to cores.
    bound = {"env": {"VLLM_CPU_OMP_THREADS_BIND": "0"}}
    result = stack.up(stack.changed("worker", dense=bound))
    assert result.returncode == 0, result.stdout
    core = stack.engine("tiny-dense@plain").core
    (worker,) = [p for p in core.children() if "VLLM::Worker" in " ".join(p.cmdline())]
    with endless_stream(stack, "tiny-dense") as lines:
        worker.kill()
        assert_ended_by_an_error(list(lines), "tiny-dense")
    wait_until(lambda: ended(core), 15, "the engine core without a worker ends")
    result = stack.up(stack.file)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_every_engine_that_was_lost_is_replaced(stack: RunningStack) -> None:
    wait_until(
        lambda: stack.readiness() == dict.fromkeys(VARIANTS, "running"),
        REPLACED_WITHIN_S,
        "every variant is ready again",
    )

    assert stack.http.get("/readyz").status_code == 200
    for model in VARIANTS:
        assert ask(stack, model).status_code == 200
    assert stack.leases() == 0


def test_a_request_whose_gateway_dies_is_answered_by_the_proxy_in_the_same_shape(
    stack: RunningStack,
) -> None:
    body = {"model": "tiny-dense", "prompt": PROMPT, **ENDLESS, "max_tokens": 2000}
    # Connections of their own: on one that was used before, HAProxy may just hang up.
    with httpx.Client(base_url=stack.url, timeout=90, trust_env=False) as client:
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.post, "/v1/completions", json=body)
            wait_until(lambda: stack.leases() == 1, 10, "the request has reached the engine")
            stack.gateway_process().kill()
        reply = waiting.result()

    assert reply.status_code in (502, 503)
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "proxy")
    wait_until(lambda: stack.answers("tiny-moe"), 90, "the gateway is replaced")
    # The slot of the lost request is free again: both of this engine's can be taken.
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(stack.answers, ["tiny-dense"] * 2))


@pytest.mark.slow
def test_an_engine_that_is_slow_for_a_while_fails_no_request(stack: RunningStack) -> None:
    engine = stack.engine("tiny-moe@mtp")
    with Clients(stack.url, "tiny-moe@mtp", "tiny-dense") as clients:
        clients.go_on()
        for _ in range(3):
            with halted(engine.core):
                time.sleep(4)
            clients.go_on(1)
    assert set(clients.outcomes()) == {"200"}
    assert engine.replica.is_running()


@pytest.mark.slow
def test_a_killed_proxy_is_replaced_and_cuts_only_what_it_had(stack: RunningStack) -> None:
    with Clients(stack.url, "tiny-moe", "tiny-dense") as clients:
        clients.go_on()
        # One whose configuration was replaced goes on until its last stream has ended.
        proxies = stack.processes_of("haproxy")
        for proxy in proxies:
            proxy.kill()
        wait_until(
            lambda: bool(set(stack.processes_of("haproxy")) - set(proxies)),
            60,
            "another proxy starts",
        )
        wait_until(lambda: stack.answers("tiny-moe"), 60, "the address answers")
        clients.go_on()
    seen = clients.outcomes()
    # One request of each client was inside it; the others waited for the next one.
    cut = seen["ReadError"] + seen["RemoteProtocolError"]
    assert cut <= len(clients.loads), seen
    assert set(seen) <= {"200", "ReadError", "RemoteProtocolError"}, seen
    assert stack.replica_leases() == dict.fromkeys(VARIANTS, 0.0)


@pytest.mark.slow
def test_requests_go_on_while_serves_controller_is_restarted(stack: RunningStack) -> None:
    (controller,) = stack.processes_of("ServeController")
    gateway = stack.gateway_process()
    with Clients(stack.url, "tiny-moe", "tiny-dense") as clients:
        clients.go_on()
        controller.kill()
        wait_until(
            lambda: (
                [p.pid for p in stack.processes_of("ServeController")] not in ([], [controller.pid])
            ),
            60,
            "another controller starts",
        )
        clients.go_on(20)
    seen = clients.outcomes()
    assert set(seen) == {"200"}, seen
    assert gateway.is_running()
    wait_until(
        lambda: stack.readiness() == dict.fromkeys(VARIANTS, "running"),
        60,
        "every variant is ready",
    )
