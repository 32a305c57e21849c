"""A client that goes away takes its request, its lease and its slot along."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.harness import (
    ENDLESS,
    PROMPT,
    VARIANTS,
    Engine,
    RunningStack,
    wait_until,
)

# One connection more or less of each pool; a leak would show one for each of 500 requests.
DESCRIPTORS_MAY_GROW_BY = 24
DISCONNECTS = 500
AT_ONCE = 16
SEED = 20


def idle(engine: Engine) -> bool:
    return engine.metric("vllm:num_requests_running") == 0 and (
        engine.metric("vllm:num_requests_waiting") == 0
    )


@contextlib.contextmanager
def sent(stack: RunningStack, model: str, *, stream: bool) -> Iterator[None]:
    """An endless request that is under way: streamed in the block, or given up before it."""
    body = {"model": model, "prompt": PROMPT, "stream": stream, **ENDLESS}
    with httpx.Client(base_url=stack.url, timeout=30, trust_env=False) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as reply:
                # Kept, since httpx closes the connection with the last reference to it.
                parts = reply.iter_bytes()
                assert next(parts)
                yield
            return
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=httpx.Timeout(30, read=1))
    yield


@pytest.mark.parametrize("model", VARIANTS)
def test_the_engine_drops_a_stream_whose_client_is_gone(stack: RunningStack, model: str) -> None:
    engine = stack.engine(model)
    with sent(stack, model, stream=True):
        assert stack.leases() == 1
        assert not idle(engine)

    wait_until(lambda: stack.leases() == 0, 5, "the lease is released")
    wait_until(lambda: idle(engine), 5, "the engine drops the request")


@pytest.mark.parametrize("model", VARIANTS)
def test_the_engine_drops_a_request_that_was_not_answered_yet(
    stack: RunningStack, model: str
) -> None:
    engine = stack.engine(model)
    before = engine.metric("vllm:generation_tokens_total")
    with sent(stack, model, stream=False):
        pass

    wait_until(lambda: stack.leases() == 0, 5, "the lease is released")
    wait_until(lambda: idle(engine), 5, "the engine drops the request")
    made = engine.metric("vllm:generation_tokens_total") - before
    assert 0 < made < ENDLESS["max_tokens"]


def test_a_client_that_leaves_the_queue_takes_no_slot(stack: RunningStack) -> None:
    engine = stack.engine("tiny-dense@plain")
    before = engine.metric("vllm:prompt_tokens_total")
    counted = {"model": "tiny-dense", "outcome": "disconnect"}
    left = stack.metric("moe_serving_requests_total", **counted)
    with sent(stack, "tiny-dense", stream=True), sent(stack, "tiny-dense", stream=True):
        with sent(stack, "tiny-dense", stream=False):
            assert stack.leases() == 2
        wait_until(
            lambda: stack.metric("moe_serving_requests_total", **counted) == left + 1,
            1,
            "the gateway notices who left the queue",
        )
    wait_until(lambda: stack.leases() == 0, 5, "the leases are released")

    prompts = engine.metric("vllm:prompt_tokens_total") - before
    assert prompts == 2 * len(stack.tokens("tiny-dense", prompt=PROMPT))
    assert stack.answers("tiny-dense")


async def leave_at_some_moment(client: httpx.AsyncClient, dice: random.Random, model: str) -> None:
    """Ask for an endless stream and go: while it is sent, before, or after the first bytes."""
    body = {"model": model, "prompt": PROMPT, "stream": dice.random() < 0.7, **ENDLESS}
    patience = dice.choice((0.0, 0.005, 0.02, 0.1, None))
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with (
            asyncio.timeout(patience if patience is not None else 10 if body["stream"] else 0.2),
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            await anext(reply.aiter_bytes())


async def leave_often(stack: RunningStack, model: str, times: int) -> None:
    dice, turns = random.Random(SEED), asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_keepalive_connections=0)

    async with httpx.AsyncClient(
        base_url=stack.url, timeout=30, trust_env=False, limits=limits
    ) as client:

        async def one() -> None:
            async with turns:
                await leave_at_some_moment(client, dice, model)

        await asyncio.gather(*(one() for _ in range(times)))


@pytest.mark.parametrize("model", ["tiny-moe@mtp", "tiny-dense@plain"])
async def test_500_clients_that_go_away_leave_nothing_behind(
    stack: RunningStack, model: str
) -> None:
    engine, gateway = stack.engine(model), stack.gateway_process()
    # The pools fill first, as they would under any load.
    await leave_often(stack, model, 2 * AT_ONCE)
    wait_until(lambda: stack.leases() == 0 and idle(engine), 10, "nothing runs")
    before = engine.descriptors(), gateway.num_fds()

    await leave_often(stack, model, DISCONNECTS)

    wait_until(lambda: stack.leases() == 0, 5, "every lease is released")
    wait_until(lambda: idle(engine), 5, "the engine has dropped every request")
    after = engine.descriptors(), gateway.num_fds()
    assert after[0] - before[0] <= DESCRIPTORS_MAY_GROW_BY
    assert after[1] - before[1] <= DESCRIPTORS_MAY_GROW_BY
    # A slot that stayed taken would leave no room for as many as the engine takes.
    at_once = 32 if "moe" in model else 2
    async with httpx.AsyncClient(base_url=stack.url, timeout=60, trust_env=False) as client:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4}
        replies = await asyncio.gather(
            *(client.post("/v1/completions", json=body) for _ in range(at_once))
        )
    assert [reply.status_code for reply in replies] == [200] * at_once
