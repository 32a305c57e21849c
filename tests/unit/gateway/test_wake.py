"""Variants that sleep: what readiness says of them, and who answers instead or wakes them."""

from __future__ import annotations

from serving.gateway.leases import EngineState
from tests.unit.gateway.harness import Stack

RUNNING = EngineState(1, "RUNNING")
ASLEEP = EngineState(0, "RUNNING")
WAKING = EngineState(0, "RUNNING", starting=True)


async def test_a_gateway_whose_engines_sleep_is_ready(stack: Stack) -> None:
    stack.pool.states = {"engine-mtp": ASLEEP, "engine-plain": WAKING}
    reply = await stack.client.get("/readyz")
    assert (reply.status_code, reply.json()) == (
        200,
        {"ready": True, "variants": {"tiny-moe@mtp": "idle", "tiny-moe@plain": "starting"}},
    )
    cards = (await stack.client.get("/v1/models")).json()["data"]
    assert {card["ready"] for card in cards} == {True}


async def test_a_variant_that_runs_answers_for_one_that_sleeps(stack: Stack) -> None:
    stack.pool.states = {"engine-mtp": ASLEEP, "engine-plain": RUNNING}
    reply = await stack.ask()
    assert reply.status_code == 200
    assert reply.headers["x-moe-serving-variant"] == "plain"
    assert reply.headers["x-moe-serving-route"] == "fallback"
    assert stack.pool.leased == ["engine-plain"]


async def test_where_no_variant_runs_the_chosen_one_is_woken(stack: Stack) -> None:
    stack.pool.states = {"engine-mtp": ASLEEP, "engine-plain": ASLEEP}
    assert (await stack.ask()).headers["x-moe-serving-variant"] == "mtp"
    assert stack.pool.leased == ["engine-mtp"]


async def test_a_variant_that_a_request_names_is_woken_whoever_runs(stack: Stack) -> None:
    stack.pool.states = {"engine-mtp": ASLEEP, "engine-plain": RUNNING}
    assert (await stack.ask(model="tiny-moe@mtp")).headers["x-moe-serving-variant"] == "mtp"
    assert stack.pool.leased == ["engine-mtp"]
