"""What is sent to a second engine, to which one, and what never is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from serving.engines.keys import Send
from serving.gateway.leases import EngineState
from serving.gateway.settings import GatewaySettings
from serving.router.settings import External, Routing
from serving.router.table import ModelRoute, RoutingTable, VariantRoute
from tests.unit.gateway.harness import (
    TABLE,
    Behaviour,
    FakeEngine,
    Stack,
    events,
    served,
    start,
    whole,
    write,
)

TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
DEAD = b'data: {"error": {"message": "EngineCore encountered an issue."}}\n\n'
# Nothing listens there.
NOWHERE = "http://127.0.0.1:1"
TWO_REPLICAS = dict.fromkeys(("engine-mtp", "engine-plain"), EngineState(2, "RUNNING"))
OTHER = ModelRoute(
    id="tiny-dense",
    default_variant="plain",
    variants=(VariantRoute(variant="plain", app_name="engine-dense", max_model_len=4096),),
)


@pytest.fixture
async def second() -> AsyncIterator[tuple[FakeEngine, str]]:
    """Another engine and its URL."""
    engine = FakeEngine(whole(b'{"id": "second"}'))
    async with served(engine) as url:
        yield engine, url


def dying(*parts: bytes) -> Behaviour:
    """A stream that breaks after these parts."""
    return events(*parts, then=RuntimeError())


def silent_after(*parts: bytes) -> Behaviour:
    """A stream that stands still after these parts."""

    async def behave(send: Send) -> None:
        await start(send, "text/event-stream")
        for part in parts:
            await write(send, part)
        await asyncio.Event().wait()

    return behave


def retries(metrics: str) -> float:
    lines = [x for x in metrics.splitlines() if x.startswith("moe_serving_retries_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize("behave", [dying(), events(DEAD, b"data: [DONE]\n\n")])
async def test_a_stream_that_ends_before_its_first_part_is_answered_by_another_replica(
    stack: Stack, second: tuple[FakeEngine, str], behave: Behaviour
) -> None:
    stack.pool.states = TWO_REPLICAS
    stack.pool.replicas = [stack.pool.url, second[1]]
    stack.engine.behave = behave
    second[0].behave = events(TOKEN, DONE)
    response = await stack.ask(stream=True)
    assert (response.status_code, response.content) == (200, TOKEN + DONE)
    assert stack.pool.leased == ["engine-mtp", "engine-mtp"]
    assert response.headers.get_list("x-moe-serving-replica") == ["replica-2"]
    assert response.headers["x-moe-serving-retries"] == "1"
    assert "x-moe-serving-fallback" not in response.headers
    assert retries(await stack.metrics()) == 1
    assert stack.pool.held == 0


async def slow_death(send: Send) -> None:
    """A stream that breaks when its client has had comments."""
    await start(send, "text/event-stream")
    await asyncio.sleep(0.1)
    raise RuntimeError


async def test_a_stream_that_had_comments_only_is_answered_by_another_replica(
    stack: Stack, second: tuple[FakeEngine, str]
) -> None:
    stack.use(keep_alive_s=0.02)
    stack.pool.states = TWO_REPLICAS
    stack.pool.replicas = [stack.pool.url, second[1]]
    stack.engine.behave = slow_death
    second[0].behave = events(TOKEN, DONE)
    response = await stack.ask(stream=True)
    assert response.content.startswith(b": keep-alive\n\n")
    assert response.content.replace(b": keep-alive\n\n", b"") == TOKEN + DONE
    assert response.headers["x-moe-serving-replica"] == "replica-1"
    assert retries(await stack.metrics()) == 1


@pytest.mark.parametrize(
    "behave",
    [
        dying(),
        whole(b'{"id": "whole"}'),
        whole(b'{"error": {}}', status=400),
        whole(b"", status=500),
    ],
)
async def test_after_comments_whatever_is_no_stream_ends_it_with_an_error_event(
    stack: Stack, second: tuple[FakeEngine, str], behave: Behaviour
) -> None:
    stack.use(keep_alive_s=0.02)
    stack.pool.states = dict.fromkeys(TWO_REPLICAS, EngineState(2, "RUNNING"))
    stack.pool.replicas = [stack.pool.url, second[1], second[1]]
    stack.engine.behave = slow_death
    second[0].behave = behave
    response = await stack.ask(model="tiny-moe@mtp", stream=True)
    assert response.status_code == 200
    events_only = response.content.replace(b": keep-alive\n\n", b"")
    assert json.loads(events_only.removeprefix(b"data: "))["error"]["type"] == "server_error"


async def test_a_refused_connection_is_cured_by_another_replica(stack: Stack) -> None:
    stack.pool.states = TWO_REPLICAS
    stack.pool.replicas = [NOWHERE]
    response = await stack.ask()
    assert (response.status_code, response.content) == (200, b'{"id": "reply"}')


async def test_where_there_is_no_other_replica_another_variant_answers(stack: Stack) -> None:
    stack.pool.elsewhere = {"engine-mtp": NOWHERE}
    response = await stack.ask()
    assert response.status_code == 200
    assert stack.pool.leased == ["engine-mtp", "engine-plain"]
    assert response.headers["x-moe-serving-variant"] == "plain"
    assert response.headers["x-moe-serving-fallback"] == "tiny-moe@plain"


@pytest.mark.parametrize(
    ("model", "header"), [("tiny-moe@mtp", {}), ("tiny-moe", {"x-moe-serving-variant": "mtp"})]
)
async def test_a_named_variant_is_never_replaced_by_another(
    stack: Stack, model: str, header: dict[str, str]
) -> None:
    stack.pool.elsewhere = {"engine-mtp": NOWHERE}
    body = {"model": model, "prompt": "a"}
    response = await stack.client.post("/v1/completions", json=body, headers=header)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_died")
    assert stack.pool.leased == ["engine-mtp"]


async def test_nothing_is_sent_again_once_the_client_has_a_part_of_it(stack: Stack) -> None:
    stack.pool.states = TWO_REPLICAS
    stack.engine.behave = dying(TOKEN)
    response = await stack.ask(stream=True)
    assert response.content.startswith(TOKEN)
    assert b"engine_died" in response.content
    assert stack.pool.leased == ["engine-mtp"]


@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_what_the_engine_refuses_is_not_sent_again(stack: Stack, status: int) -> None:
    stack.pool.states = TWO_REPLICAS
    stack.engine.behave = whole(b'{"error": {"message": "no"}}', status=status)
    response = await stack.ask()
    assert response.status_code == status
    assert len(stack.engine.paths) == 1


async def test_retries_are_at_most_a_tenth_of_the_requests_beyond_three(stack: Stack) -> None:
    stack.pool.states = TWO_REPLICAS
    stack.pool.elsewhere = dict.fromkeys(TWO_REPLICAS, NOWHERE)
    for _ in range(41):
        assert (await stack.ask()).status_code == 503
    assert retries(await stack.metrics()) == 3 + 40 / 10


async def test_an_engine_that_is_not_there_costs_no_retry_of_the_budget(stack: Stack) -> None:
    stack.route(Routing(fallback=("tiny-dense",)), OTHER)
    stack.pool.states = {"engine-dense": EngineState(1, "RUNNING")}
    stack.pool.failing = {"engine-mtp"}
    for _ in range(10):
        response = await stack.ask()
        assert response.headers["x-moe-serving-fallback"] == "tiny-dense@plain"
    assert stack.engine.request["model"] == "tiny-dense"


async def test_a_server_outside_is_asked_last_with_its_own_name_and_key(
    stack: Stack, second: tuple[FakeEngine, str], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("outside-secret\n")
    outside = External(url=f"{second[1]}/v1", model="big", key_file=tmp_path / "key")
    stack.route(Routing(fallback=("tiny-dense", outside)), OTHER)
    stack.pool.failing = {"engine-mtp"}
    body = {"model": "chat", "prompt": "é"}
    headers = {"authorization": "Bearer client-secret"}
    response = await stack.client.post("/v1/completions", json=body, headers=headers)
    assert (response.status_code, response.content) == (200, b'{"id": "second"}')
    assert response.headers["x-moe-serving-fallback"] == "big@127.0.0.1"
    assert second[0].paths == ["/v1/completions"]
    assert second[0].request == {"model": "big", "prompt": "é"}
    assert second[0].headers[0]["authorization"] == "Bearer outside-secret"
    assert "x-moe-serving-engine-key" not in second[0].headers[0]


@pytest.mark.parametrize("key_file", [None, Path("/nowhere/key")])
async def test_where_nobody_answers_the_client_is_told_of_the_first_engine(
    stack: Stack, key_file: Path | None
) -> None:
    outside = External(url=f"{NOWHERE}/v1", model="big", key_file=key_file)
    stack.route(Routing(fallback=(outside,)))
    stack.pool.failing = {"engine-mtp"}
    response = await stack.ask()
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "engine_unavailable")
    assert int(response.headers["retry-after"]) >= 1


async def test_a_stream_whose_first_part_does_not_come_is_504_and_is_not_sent_again(
    stack: Stack,
) -> None:
    stack.use(first_byte_timeout_s=0.05)
    stack.pool.states = TWO_REPLICAS
    stack.engine.behave = silent_after()
    response = await stack.ask(stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "engine_silent")
    assert len(stack.pool.leased) == 1
    await asyncio.wait_for(stack.engine.gone.wait(), 30)


async def test_a_stream_that_stands_still_ends_with_an_error_event(stack: Stack) -> None:
    stack.use(between_bytes_timeout_s=0.05)
    stack.engine.behave = silent_after(TOKEN)
    response = await stack.ask(stream=True)
    assert response.content.startswith(TOKEN)
    error = json.loads(response.content.split(b"data: ")[-1])["error"]
    assert (error["code"], "0.05 s" in error["message"]) == ("engine_silent", True)
    assert 'outcome="stalled"' in await stack.metrics()


async def test_a_whole_reply_may_take_as_long_as_the_request(stack: Stack) -> None:
    stack.use(first_byte_timeout_s=0.01, between_bytes_timeout_s=0.01)

    async def slow(send: Send) -> None:
        await asyncio.sleep(0.1)
        await whole(b'{"id": "slow"}')(send)

    stack.engine.behave = slow
    assert (await stack.ask()).json() == {"id": "slow"}


def with_one_slot(max_queued: int) -> RoutingTable:
    """The usual table with one slot for each variant."""
    model = TABLE.models[0]
    variants = tuple(
        route.model_copy(update={"slots": 1, "max_queued": max_queued}) for route in model.variants
    )
    return RoutingTable(models=(model.model_copy(update={"variants": variants}),))


async def test_a_request_that_may_not_even_wait_is_429_with_a_time_to_retry(stack: Stack) -> None:
    stack.app.use(GatewaySettings(table=with_one_slot(max_queued=0)))
    stack.pool.free.clear()
    first = asyncio.create_task(stack.ask(model="tiny-moe@mtp"))
    await asyncio.wait_for(stack.pool.asked.wait(), 30)
    second = await stack.ask(model="tiny-moe@mtp")
    assert (second.status_code, second.json()["error"]["code"]) == (429, "no_capacity")
    assert int(second.headers["retry-after"]) >= 1
    assert stack.pool.leased == ["engine-mtp"]
    stack.pool.free.set()
    assert (await first).status_code == 200
    assert 'moe_serving_running{application="",model=""} 0.0' in await stack.metrics()


async def test_of_those_that_wait_interactive_requests_go_before_batch(stack: Stack) -> None:
    stack.app.use(GatewaySettings(table=with_one_slot(max_queued=9)))
    stack.pool.free.clear()
    tasks = [asyncio.create_task(stack.ask(model="tiny-moe@mtp"))]
    await asyncio.wait_for(stack.pool.asked.wait(), 30)
    for tier in ("flex", "flex", "default"):
        tasks.append(asyncio.create_task(stack.ask(model="tiny-moe@mtp", service_tier=tier)))
        await until_queued(stack, len(tasks) - 1)
    stack.pool.free.set()
    await asyncio.gather(*tasks)
    tiers = [json.loads(body).get("service_tier") for body in stack.engine.bodies]
    assert tiers == [None, "default", "flex", "flex"]


async def until_queued(stack: Stack, count: int) -> None:
    line = f'moe_serving_queued{{application="",model=""}} {float(count)}'
    async with asyncio.timeout(30):
        while line not in await stack.metrics():
            await asyncio.sleep(0.01)


async def test_a_request_that_may_end_its_engine_is_sent_to_two_at_most(stack: Stack) -> None:
    stack.pool.states = dict.fromkeys(TWO_REPLICAS, EngineState(8, "RUNNING"))
    stack.engine.behave = events(DEAD, DONE)
    assert (await stack.ask(stream=True)).status_code == 503
    assert stack.pool.leased == ["engine-mtp", "engine-mtp"]


async def test_an_error_has_no_headers_of_what_was_tried_in_vain(stack: Stack) -> None:
    stack.route(Routing(fallback=(External(url=f"{NOWHERE}/v1", model="big"),)))
    stack.pool.failing = {"engine-mtp"}
    response = await stack.ask()
    assert response.status_code == 503
    assert not [name for name in response.headers if name.startswith("x-moe-serving")]


@asynccontextmanager
async def falling_back_to(
    stack: Stack, outside: tuple[FakeEngine, str], **settings: float
) -> AsyncIterator[FakeEngine]:
    """The stack with no engine of its own, and this server outside for its model."""
    fallback = External(url=f"{outside[1]}/v1", model="big")
    stack.route(Routing(fallback=(fallback,)), **settings)
    stack.pool.failing = {"engine-mtp"}
    yield outside[0]


async def test_a_slow_stream_from_outside_is_whole(
    stack: Stack, second: tuple[FakeEngine, str]
) -> None:
    async def slow(send: Send) -> None:
        await start(send, "text/event-stream")
        await asyncio.sleep(0.2)
        await write(send, TOKEN)
        await asyncio.sleep(0.2)
        await write(send, DONE, more=False)

    async with falling_back_to(stack, second, keep_alive_s=0.05) as outside:
        outside.behave = slow
        response = await stack.ask(stream=True)
    assert response.status_code == 200
    assert response.content.replace(b": keep-alive\n\n", b"") == TOKEN + DONE
    assert response.content.startswith(b": keep-alive")


@pytest.mark.parametrize("status", [401, 403, 404, 429])
async def test_a_refusal_from_outside_is_not_the_clients(
    stack: Stack, second: tuple[FakeEngine, str], status: int
) -> None:
    async with falling_back_to(stack, second) as outside:
        outside.behave = whole(b'{"error": {"message": "your key sk-*** "}}', status=status)
        response = await stack.ask()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "sk-" not in response.text


async def test_silence_from_outside_has_the_limits_of_an_engine(
    stack: Stack, second: tuple[FakeEngine, str]
) -> None:
    async with falling_back_to(stack, second, first_byte_timeout_s=0.05) as outside:
        outside.behave = silent_after()
        response = await stack.ask(stream=True)
    assert response.status_code == 503
    await asyncio.wait_for(outside.gone.wait(), 30)


async def test_a_header_that_is_no_ascii_goes_outside_as_it_came(
    stack: Stack, second: tuple[FakeEngine, str]
) -> None:
    async with falling_back_to(stack, second) as outside:
        body, header = json.dumps({"model": "chat"}), {b"anthropic-beta": b"\xe9"}
        response = await stack.client.post("/v1/completions", content=body, headers=header)
    assert response.status_code == 200
    assert outside.headers[0]["anthropic-beta"] == "\u00e9"


@pytest.mark.parametrize("key", ["", "sk-1\n# rotated", "sk-\u00e9"])
async def test_a_key_that_is_none_is_neither_sent_nor_logged(
    stack: Stack,
    second: tuple[FakeEngine, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    key: str,
) -> None:
    (tmp_path / "key").write_text(key, encoding="utf-8")
    outside = External(url=f"{second[1]}/v1", model="big", key_file=tmp_path / "key")
    stack.route(Routing(fallback=(outside,)))
    stack.pool.failing = {"engine-mtp"}
    assert (await stack.ask()).status_code == 503
    assert second[0].paths == []
    assert "sk-" not in caplog.text
