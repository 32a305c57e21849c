"""A lease is one call of Serve's router: what it yields, why it fails, that it always ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from serving.engines.lease import Endpoint
from serving.gateway.errors import ApiError
from serving.gateway.leases import EnginePool, EngineState

ENDPOINT = Endpoint(url="http://127.0.0.1:1", replica="replica-1", lease_id="lease-1")
RUNNING = EngineState(1, "RUNNING")


@dataclass
class FakeStream:
    """What a handle's call returns; yields `answer`, raises it, or waits for ever."""

    answer: Endpoint | Exception | None
    cancelled: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def __anext__(self) -> Endpoint:
        self.asked.set()
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return cast(Endpoint, self.answer)

    def cancel(self) -> None:
        self.cancelled += 1


@dataclass
class FakeHandle:
    stream: FakeStream

    def remote(self) -> FakeStream:
        return self.stream


class BlindPool(EnginePool):
    """Keeps the states it was given: there is no Serve to look at."""

    async def look(self) -> None:
        pass


def pool_of(
    answer: Endpoint | Exception | None, state: EngineState = RUNNING
) -> tuple[EnginePool, FakeStream]:
    """A pool with one application, `engine`, that answers so."""
    pool, stream = BlindPool(), FakeStream(answer)
    pool._handles = {"engine": cast(DeploymentHandle, FakeHandle(stream))}
    pool._states = {"engine": state}
    return pool, stream


async def refusal(pool: EnginePool, name: str = "engine", timeout_s: float = 60) -> ApiError:
    with pytest.raises(ApiError) as refused:
        async with pool.lease(name, "tiny-moe", timeout_s):
            pass
    return refused.value


async def test_a_lease_yields_the_endpoint_and_ends_with_the_block() -> None:
    pool, stream = pool_of(ENDPOINT)
    async with pool.lease("engine", "tiny-moe", 60) as endpoint:
        assert (endpoint, stream.cancelled) == (ENDPOINT, 0)
    assert stream.cancelled == 1


async def test_a_lease_ends_when_the_block_fails() -> None:
    pool, stream = pool_of(ENDPOINT)
    with pytest.raises(RuntimeError):
        async with pool.lease("engine", "tiny-moe", 60):
            raise RuntimeError
    assert stream.cancelled == 1


async def test_a_wait_that_is_given_up_ends_the_lease() -> None:
    pool, stream = pool_of(None)

    async def wait() -> None:
        async with pool.lease("engine", "tiny-moe", 60):
            pass

    waiting = asyncio.create_task(wait())
    await stream.asked.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stream.cancelled == 1


async def test_no_free_slot_in_time_is_429() -> None:
    pool, stream = pool_of(None)
    error = await refusal(pool, timeout_s=0)
    assert (error.status, error.headers) == (429, [(b"retry-after", b"2")])
    assert error.message == "tiny-moe has no free slot now; retry after the time in Retry-After"
    assert stream.cancelled == 1


async def test_a_full_queue_is_429() -> None:
    pool, stream = pool_of(BackPressureError(num_queued_requests=64, max_queued_requests=64))
    assert ((await refusal(pool)).status, stream.cancelled) == (429, 1)


@pytest.mark.parametrize("problem", [RayActorError(), StopAsyncIteration()])
async def test_a_replica_that_dies_while_it_is_asked_is_503(problem: Exception) -> None:
    pool, stream = pool_of(problem)
    assert ((await refusal(pool)).status, stream.cancelled) == (503, 1)


async def test_an_engine_that_is_still_loading_is_503_and_is_not_asked() -> None:
    pool, stream = pool_of(ENDPOINT, EngineState(0, "DEPLOYING"))
    error = await refusal(pool)
    assert (error.status, error.message) == (503, "tiny-moe is not ready: its engine is deploying")
    assert error.headers == [(b"retry-after", b"10")]
    assert not stream.asked.is_set()


async def test_an_engine_that_goes_while_a_request_waits_is_503() -> None:
    pool, stream = pool_of(None)
    waiting = asyncio.create_task(refusal(pool))
    await stream.asked.wait()
    pool._states = {"engine": EngineState(0, "UNHEALTHY")}
    assert (await waiting).message == "tiny-moe is not ready: its engine is unhealthy"


async def test_an_engine_that_an_update_took_away_is_503() -> None:
    pool, _ = pool_of(ENDPOINT)
    pool.keep_only(())
    assert (await refusal(pool)).status == 503
