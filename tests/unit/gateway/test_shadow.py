"""Requests repeated to a second variant, of which the client notices nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from serving.engines.keys import Send
from serving.gateway import shadow
from serving.router.settings import Routing, Shadow
from tests.unit.gateway.harness import (
    COMPLETIONS,
    Behaviour,
    FakeEngine,
    Stack,
    events,
    served,
    start,
    until,
    whole,
    write,
)

ANSWER = b'{"id": "second", "usage": {"prompt_tokens": 3, "completion_tokens": 7}}'
SHADOWED = Routing(shadow=Shadow(variant="plain", share=1.0))


@pytest.fixture
async def second(stack: Stack) -> AsyncIterator[FakeEngine]:
    """The engine of the second variant; every request is repeated to it."""
    engine = FakeEngine(whole(ANSWER))
    async with served(engine) as url:
        stack.pool.elsewhere["engine-plain"] = url
        stack.route(SHADOWED)
        yield engine
        stack.app.close()
        await until(lambda: stack.pool.held == 0)


def held_until(hold: asyncio.Event) -> Behaviour:
    """An engine that begins its answer and goes on only then."""

    async def behave(send: Send) -> None:
        await start(send, "application/json", length=len(ANSWER))
        await hold.wait()
        await write(send, ANSWER, more=False)

    return behave


def counted(outcome: str, times: int = 1) -> str:
    labels = f'model="tiny-moe",outcome="{outcome}",variant="plain"'
    return f"moe_serving_shadow_requests_total{{{labels}}} {times}.0"


async def test_a_request_is_repeated_and_its_answer_counted_and_dropped(
    stack: Stack, second: FakeEngine
) -> None:
    response = await stack.ask(model="chat", max_tokens=7)
    assert response.content == b'{"id": "reply"}'
    assert response.headers["x-moe-serving-variant"] == "mtp"
    await until(lambda: bool(second.bodies) and stack.pool.held == 0)
    assert second.bodies == stack.engine.bodies
    assert second.headers[0]["x-request-id"] == response.headers["x-request-id"]
    assert sorted(stack.pool.leased) == ["engine-mtp", "engine-plain"]
    metrics = await stack.metrics()
    assert counted("200") in metrics
    labels = '{model="tiny-moe",variant="plain"}'
    assert f"moe_serving_shadow_output_tokens_total{labels} 7.0" in metrics
    assert f"moe_serving_shadow_seconds_count{labels} 1.0" in metrics


async def test_a_repeated_stream_is_read_to_its_end(stack: Stack, second: FakeEngine) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n'
    second.behave = events(b'data: {"a":1}\n\n', usage, b"data: [DONE]\n\n")
    await stack.ask(stream=True)
    await until(lambda: bool(second.bodies) and stack.pool.held == 0)
    assert 'shadow_output_tokens_total{model="tiny-moe",variant="plain"} 5.0' in (
        await stack.metrics()
    )


@pytest.mark.parametrize(
    ("model", "path"), [("tiny-moe@mtp", COMPLETIONS), ("tiny-moe", "/tokenize")]
)
async def test_a_named_variant_and_what_generates_nothing_is_not_repeated(
    stack: Stack, second: FakeEngine, model: str, path: str
) -> None:
    await stack.ask(path, model=model)
    assert stack.pool.leased == ["engine-mtp"]


@pytest.mark.parametrize("status", [400, 500])
async def test_a_repeat_that_fails_is_counted_and_the_client_does_not_learn_of_it(
    stack: Stack, second: FakeEngine, status: int
) -> None:
    second.behave = whole(b"{}", status=status)
    assert (await stack.ask()).status_code == 200
    await until(lambda: bool(second.bodies) and stack.pool.held == 0)
    metrics = await stack.metrics()
    assert counted(str(status)) in metrics
    assert "shadow_seconds_count{" not in metrics


async def test_an_engine_that_breaks_off_or_is_gone_is_a_cut_repeat(
    stack: Stack, second: FakeEngine
) -> None:
    second.behave = events(b"data: 1\n\n", then=ConnectionError())
    assert (await stack.ask()).status_code == 200
    await until(lambda: bool(second.bodies) and stack.pool.held == 0)
    # Port 1 of the loopback address has no listener.
    stack.pool.elsewhere["engine-plain"] = "http://127.0.0.1:1"
    assert (await stack.ask()).status_code == 200
    await until(lambda: stack.pool.leased.count("engine-plain") == 2 and stack.pool.held == 0)
    assert counted("cut", 2) in await stack.metrics()


async def test_a_client_is_answered_while_the_repeat_still_runs(
    stack: Stack, second: FakeEngine
) -> None:
    hold = asyncio.Event()
    second.behave = held_until(hold)
    assert (await stack.ask()).status_code == 200
    assert not second.gone.is_set()
    hold.set()
    await until(lambda: bool(second.bodies) and stack.pool.held == 0)
    assert counted("200") in await stack.metrics()


async def test_a_client_that_leaves_does_not_end_the_repeat(
    stack: Stack, second: FakeEngine
) -> None:
    hold = asyncio.Event()
    second.behave = held_until(hold)
    stack.engine.behave = held_until(asyncio.Event())
    asking = asyncio.create_task(stack.ask())
    await until(lambda: second.busy.is_set() and stack.engine.busy.is_set())
    asking.cancel()
    await until(stack.engine.gone.is_set)
    hold.set()
    await until(lambda: stack.pool.held == 0)
    assert counted("200") in await stack.metrics()


async def test_beyond_the_bound_repeats_are_skipped_and_counted(
    stack: Stack, second: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MOST_AT_ONCE", 1)
    hold = asyncio.Event()
    second.behave = held_until(hold)
    for _ in range(3):
        assert (await stack.ask()).status_code == 200
    assert stack.pool.leased.count("engine-plain") == 1
    assert counted("skipped", 2) in await stack.metrics()
    hold.set()
    await until(lambda: bool(second.bodies) and stack.pool.held == 0)
    await stack.ask()
    await until(lambda: len(second.bodies) == 2 and stack.pool.held == 0)


async def test_repeats_end_with_the_gateway_and_give_their_leases_back(
    stack: Stack, second: FakeEngine
) -> None:
    second.behave = held_until(asyncio.Event())
    await stack.ask()
    await until(second.busy.is_set)
    stack.app.close()
    await until(lambda: stack.pool.held == 0)
    assert counted("ended") in await stack.metrics()


async def test_a_repeat_that_takes_too_long_is_given_up(stack: Stack, second: FakeEngine) -> None:
    second.behave = held_until(asyncio.Event())
    stack.route(SHADOWED, request_timeout_s=0.3)
    await stack.ask()
    await until(lambda: "engine-plain" in stack.pool.leased and stack.pool.held == 0)
    assert counted("504") in await stack.metrics()


async def test_the_router_counts_repeats_as_load_of_the_variant(
    stack: Stack, second: FakeEngine
) -> None:
    hold = asyncio.Event()
    second.behave = held_until(hold)
    await stack.ask()
    model = stack.app._settings.table.models[0]
    assert stack.app._loads(model)["plain"].running == 1
    hold.set()
    await until(lambda: stack.app._loads(model)["plain"].running == 0)
