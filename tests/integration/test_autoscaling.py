"""An engine that sleeps, wakes for a request, and grows and shrinks with the load.

On a stack of its own, since the shared one must keep its replicas; it takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.harness import PROMPT, UNCOMPILED, RunningStack, own_stack, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NAME = "tiny-moe@plain"
# Serve hears of requests every 10 s and averages; then it waits for its delay, and a start loads.
SCALED_WITHIN_S = 240.0
AUTOSCALED: dict[str, Any] = {
    "schema": 1,
    "name": "autoscaled",
    "gateway": {"request_timeout_s": 240.0, "queue_timeout_s": 5.0},
    "models": [
        {
            "model": "tiny-moe",
            "gpu": "cpu",
            "num_cpus": 0.3,
            "max_model_len": 4096,
            "max_num_seqs": 8,
            **UNCOMPILED,
            "autoscaling": {
                "min_replicas": 0,
                "max_replicas": 2,
                "target_ongoing_requests": 2,
                "look_back_period_s": 11.0,
                "upscale_delay_s": 1.0,
                "downscale_delay_s": 5.0,
            },
            "variants": {"plain": {}},
        }
    ],
}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with own_stack(tmp_path_factory.mktemp("autoscaled"), AUTOSCALED) as running:
        yield running


def asleep(running: RunningStack) -> bool:
    return running.readiness() == {NAME: "idle"} and running.replica_count(NAME) == 0


def ask(running: RunningStack, **fields: Any) -> httpx.Response:
    body = {"model": "tiny-moe", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, **fields}
    return running.http.post("/v1/completions", json=body, timeout=300)


def test_up_does_not_wait_for_what_needs_no_replica_and_it_counts_as_ready(
    scaled: RunningStack,
) -> None:
    assert asleep(scaled)
    assert scaled.http.get("/readyz").status_code == 200
    assert f"{NAME} (default): idle, 0 of 0 replicas" in scaled.command("status").stdout
    # Asking for the status has woken nothing.
    assert asleep(scaled)


def test_a_request_is_held_while_the_engine_starts_and_then_answered(scaled: RunningStack) -> None:
    with ThreadPoolExecutor() as threads:
        held = threads.submit(ask, scaled)
        wait_until(lambda: scaled.readiness() == {NAME: "starting"}, 60, "the engine starts")
        shown = scaled.command("status").stdout
        assert not held.done()
        reply = held.result(timeout=300)
    assert "0 of 1 replicas, starting for" in shown
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 16)
    assert scaled.replica_count(NAME) == 1


def test_load_starts_a_second_replica_and_its_end_ends_both(scaled: RunningStack) -> None:
    ended = False

    def stream() -> list[int]:
        statuses = []
        while not ended:
            statuses.append(ask(scaled, max_tokens=200, ignore_eos=True).status_code)
        return statuses

    with ThreadPoolExecutor() as threads:
        streams: list[Future[list[int]]] = [threads.submit(stream) for _ in range(6)]
        try:
            wait_until(
                lambda: scaled.replica_count(NAME) == 2, SCALED_WITHIN_S, "a second replica starts"
            )
        finally:
            ended = True
        statuses = [status for each in streams for status in each.result(timeout=300)]
    assert set(statuses) == {200}
    wait_until(lambda: asleep(scaled), SCALED_WITHIN_S, "no replica is left")


def test_a_request_that_waited_its_time_is_told_when_to_come_back(scaled: RunningStack) -> None:
    short = AUTOSCALED["gateway"] | {"wake_timeout_s": 1.0}
    changed = scaled.up(scaled.write("short", AUTOSCALED | {"gateway": short}))
    assert changed.returncode == 0, changed.stdout
    wait_until(lambda: asleep(scaled), SCALED_WITHIN_S, "no replica is left")
    reply = ask(scaled)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_waking")
    # The last start was seen here, so that this is no guess.
    assert int(reply.headers["retry-after"]) > 2
    # It goes on starting for who comes back.
    wait_until(lambda: ask(scaled).status_code == 200, SCALED_WITHIN_S, "the engine is awake")
