"""A variant with two replicas: who gets a request, and what becomes of it when one dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serving.studies.chaos.report import findings, goals, reached
from serving.studies.chaos.run import Plan, run_chaos
from tests.integration.harness import (
    PROMPT,
    SHORTER,
    Clients,
    RunningStack,
    wait_until,
)

NAME = "tiny-dense@plain"


@pytest.fixture(scope="module", autouse=True)
def two_replicas(stack: RunningStack) -> Iterator[None]:
    """tiny-dense with a second replica, which joins the running first one and goes again."""
    assert stack.up(stack.changed("one", dense=SHORTER)).returncode == 0
    first = stack.engine(NAME).core
    balance(stack, "power-of-two")
    assert stack.replica_count(NAME) == 2
    assert first.is_running()
    yield
    assert stack.up(stack.changed("one", dense=SHORTER)).returncode == 0
    wait_until(lambda: stack.replica_count(NAME) == 1, 90, "the second replica goes")


@pytest.fixture(autouse=True)
def both_answer(two_replicas: None, stack: RunningStack) -> None:
    """Whatever the test before did, there are two again."""
    wait_until(lambda: len(stack.engines(NAME)) == 2, 240, "the second replica answers")


def balance(stack: RunningStack, policy: str) -> None:
    dense = {**SHORTER, "replicas": 2, "routing": {"balancing": policy}}
    result = stack.up(stack.changed(policy, dense=dense))
    assert result.returncode == 0, result.stdout


def answering(stack: RunningStack, session: str = "", **fields: Any) -> str:
    """The replica that answers."""
    body = {"model": "tiny-dense", "prompt": PROMPT, "max_tokens": 4, **fields}
    headers = {"x-session-id": session} if session else {}
    reply = stack.post("/v1/completions", body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.headers["x-moe-serving-replica"]


def test_both_replicas_answer(stack: RunningStack) -> None:
    with ThreadPoolExecutor(4) as threads:
        replicas = set(threads.map(lambda _: answering(stack, max_tokens=64), range(16)))
    assert len(replicas) == 2


def test_a_session_keeps_its_replica_where_balancing_is_by_session(stack: RunningStack) -> None:
    core = stack.replica_processes("engine-tiny-dense")[0]
    balance(stack, "session-hash")
    assert core.is_running()
    kept = {i: {answering(stack, f"session-{i}") for _ in range(3)} for i in range(12)}
    assert all(len(replicas) == 1 for replicas in kept.values()), kept
    assert len(set.union(*kept.values())) == 2


def test_a_prompt_goes_where_its_beginning_was_seen(stack: RunningStack) -> None:
    balance(stack, "prefix-aware")
    prompts = [f"# Part {i} of the manual. " + "All rights are reserved. " * 40 for i in range(4)]
    seen = {prompt: answering(stack, prompt=prompt) for prompt in prompts}
    for prompt, replica in seen.items():
        assert {answering(stack, prompt=f"{prompt} {i}") for i in range(3)} == {replica}


def test_a_dying_engine_costs_no_request_but_streams_that_had_begun(stack: RunningStack) -> None:
    balance(stack, "power-of-two")
    # As many clients as one replica has slots.
    with Clients(stack.url, "tiny-dense") as clients:
        clients.go_on()
        stack.engines(NAME)[0].core.kill()
        clients.go_on(30)
    streams, wholes = clients.outcomes(streamed=True), clients.outcomes(streamed=False)
    assert wholes.keys() == {"200"}, wholes
    assert streams.keys() <= {"200", "cut"} and streams["cut"] <= 1, streams


def test_a_short_chaos_loses_only_what_ran_on_what_was_killed(stack: RunningStack) -> None:
    # By this seed, an engine is slow for a while, and then a whole replica is killed.
    plan = Plan(seed=29, seconds=120, faults=2, clients=2)
    outcome = run_chaos(stack.url, stack.home, ["tiny-dense"], plan, print)
    assert [each.fault.kind for each in outcome.suffered] == [
        "engine core slow",
        "engine replica killed",
    ]
    assert len(outcome.requests) > 50
    assert Counter(each.request.cause for each in findings(outcome)) == {}
    assert reached(outcome), goals(outcome)
