"""A lease is one call of Serve's router: what it yields, why it fails, that it always ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from serving.engines.lease import Endpoint
from serving.gateway import idle_leases, leases
from serving.gateway.errors import ApiError
from serving.gateway.leases import EnginePool, EngineState
from serving.router.balancing import Balancing, Hint

ENDPOINT = Endpoint(url="http://127.0.0.1:1", replica="replica-1", lease_id="lease-1")
RUNNING = EngineState(1, "RUNNING")
ASLEEP = EngineState(0, "RUNNING")
NO_HINT = Hint()
GONE = "replica-gone"
NO_TIME_S = 0.0
WAKING = EngineState(0, "RUNNING", starting=True)


@dataclass
class FakeStream:
    """What a handle's call returns; yields `answer`, raises it, or waits for `come`."""

    answer: Endpoint | Exception | None
    cancelled: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    come: asyncio.Future[Endpoint] = field(default_factory=asyncio.Future)

    async def __anext__(self) -> Endpoint:
        self.asked.set()
        if self.answer is None:
            return await self.come
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self) -> None:
        self.cancelled += 1


@dataclass
class FakeHandle:
    """Notes what it is called with, and by which options."""

    stream: FakeStream
    called: list[tuple[Hint, ...]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)

    def options(self, *, session_id: str) -> FakeHandle:
        self.sessions.append(session_id)
        return self

    def remote(self, *arguments: Hint) -> FakeStream:
        self.called.append(arguments)
        return self.stream


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Handles none of whose replicas answers; a fake one has no request router to ask."""
    handles: set[int] = set()
    monkeypatch.setattr(leases, "answers_nobody", lambda handle: id(handle) in handles)
    monkeypatch.setattr(leases, "takes_requests", lambda handle, replica: replica != GONE)
    monkeypatch.setattr(idle_leases, "IDLE_S", NO_TIME_S)
    return handles


class BlindPool(EnginePool):
    """Keeps the states it was given: there is no Serve to look at."""

    async def look(self) -> None:
        pass


def pool_of(
    answer: Endpoint | Exception | None, state: EngineState = RUNNING
) -> tuple[EnginePool, FakeStream]:
    """A pool with one application, `engine`, that answers so."""
    pool, stream = BlindPool(), FakeStream(answer)
    pool._use("engine", cast(DeploymentHandle, FakeHandle(stream)))
    pool._balancing = {"engine": "power-of-two"}
    pool._states = {"engine": state}
    return pool, stream


async def refusal(
    pool: EnginePool,
    name: str = "engine",
    timeout_s: float = 60,
    wake_s: float = 0,
    hint: Hint = NO_HINT,
) -> ApiError:
    with pytest.raises(ApiError) as refused:
        async with pool.lease(name, "tiny-moe", timeout_s, hint, wake_s):
            pass
    return refused.value


async def test_a_lease_yields_the_endpoint_and_ends_some_time_after_the_block() -> None:
    pool, stream = pool_of(ENDPOINT)
    async with pool.lease("engine", "tiny-moe", 60, Hint()) as endpoint:
        assert (endpoint, stream.cancelled) == (ENDPOINT, 0)
    assert stream.cancelled == 0
    await asyncio.sleep(0.01)
    assert stream.cancelled == 1


async def test_the_next_request_has_the_lease_of_the_last() -> None:
    handle = ManyReplicas(["a", "b"])
    pool = pool_with(handle, 2)
    for _ in range(3):
        async with pool.lease("engine", "m", 60, Hint()) as endpoint:
            assert endpoint.replica == "a"
    assert len(handle.streams) == 1
    await asyncio.sleep(0.01)
    assert handle.streams[0].cancelled == 1


async def test_requests_at_the_same_time_have_leases_of_their_own() -> None:
    handle = ManyReplicas(["a", "b"])
    pool = pool_with(handle, 2)
    async with pool.lease("engine", "m", 60, Hint()), pool.lease("engine", "m", 60, Hint()):
        assert len(handle.streams) == 2
    # One runs on b, so the lease on a is the better one for another.
    async with (
        pool.lease("engine", "m", 60, Hint()) as first,
        pool.lease("engine", "m", 60, Hint()) as second,
    ):
        assert {first.replica, second.replica} == {"a", "b"}
    assert len(handle.streams) == 2


async def test_no_lease_is_kept_while_another_request_waits_for_a_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle_leases, "ANSWERS_WITHIN_S", 0.0)
    pool, stream = pool_of(ENDPOINT)
    handle = cast(FakeHandle, pool._handles["engine"])
    async with pool.lease("engine", "m", 60, Hint()):
        handle.stream = full = FakeStream(None)
        waiting = asyncio.create_task(refusal(pool, timeout_s=0))
        await full.asked.wait()
    assert stream.cancelled == 1
    assert (await waiting).status == 429


async def test_no_lease_is_used_again_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_leases, "OLDEST_S", (-1.0, -1.0))
    pool, stream = pool_of(ENDPOINT)
    async with pool.lease("engine", "m", 60, Hint()):
        pass
    assert stream.cancelled == 1


async def test_no_lease_is_used_again_on_a_replica_that_takes_no_requests() -> None:
    handle = ManyReplicas([GONE, "b"])
    pool = pool_with(handle, 2)
    for replica in (GONE, "b"):
        async with pool.lease("engine", "m", 60, Hint()) as endpoint:
            assert endpoint.replica == replica
    assert handle.streams[0].cancelled == 1


async def test_a_request_that_may_not_go_anywhere_uses_no_kept_lease() -> None:
    handle = ManyReplicas(["a", "b"])
    pool = pool_with(handle, 2)
    async with pool.lease("engine", "m", 60, Hint()):
        pass
    async with pool.lease("engine", "m", 60, Hint(replica="b")) as endpoint:
        assert (endpoint.replica, handle.streams[0].cancelled) == ("b", 1)


async def test_what_an_update_takes_away_gives_its_kept_leases_back() -> None:
    pool, stream = pool_of(ENDPOINT)
    async with pool.lease("engine", "m", 60, Hint()):
        pass
    pool.keep_only(())
    assert stream.cancelled == 1


async def test_a_lease_ends_when_the_block_fails() -> None:
    pool, stream = pool_of(ENDPOINT)
    with pytest.raises(RuntimeError):
        async with pool.lease("engine", "tiny-moe", 60, Hint()):
            raise RuntimeError
    assert stream.cancelled == 1


async def test_a_wait_that_is_given_up_ends_the_lease() -> None:
    pool, stream = pool_of(None)

    async def wait() -> None:
        async with pool.lease("engine", "tiny-moe", 60, Hint()):
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


async def test_an_engine_whose_replicas_all_are_open_is_503_and_is_not_asked(
    silent: set[int],
) -> None:
    pool, stream = pool_of(ENDPOINT)
    silent.add(id(pool._handles["engine"]))
    error = await refusal(pool)
    assert (error.status, error.code, error.elsewhere) == (503, "engine_unavailable", True)
    assert not stream.asked.is_set()


async def test_an_engine_that_an_update_took_away_is_503() -> None:
    pool, _ = pool_of(ENDPOINT)
    pool.keep_only(())
    assert (await refusal(pool)).status == 503


async def test_a_replica_that_is_not_fit_to_serve_gets_no_request() -> None:
    pool, stream = pool_of(replace(ENDPOINT, unfit="its drafting has collapsed"))
    with pytest.raises(ApiError) as raised:
        async with pool.lease("engine", "m", 1, Hint()):
            raise AssertionError("the lease was given")
    assert (raised.value.status, raised.value.code) == (503, "engine_unfit")
    assert "m is not fit to serve: its drafting has collapsed" in str(raised.value)
    assert stream.cancelled == 1


async def test_an_engine_known_to_be_unfit_is_not_asked() -> None:
    pool, stream = pool_of(ENDPOINT, EngineState(1, "RUNNING", "acceptance probe: accepted 0.000"))
    with pytest.raises(ApiError, match="acceptance probe"):
        async with pool.lease("engine", "m", 1, Hint()):
            raise AssertionError("the lease was given")
    assert not stream.asked.is_set()


async def test_a_request_waits_in_serve_s_queue_for_an_engine_that_is_asleep() -> None:
    pool, stream = pool_of(None, ASLEEP)

    async def take() -> Endpoint:
        # No wait for a slot is allowed: time asleep is none of it.
        async with pool.lease("engine", "tiny-moe", 0, Hint(), 60) as endpoint:
            return endpoint

    waiting = asyncio.create_task(take())
    await stream.asked.wait()
    pool._states = {"engine": WAKING}
    await asyncio.sleep(2.5 * leases.RECHECK_EVERY_S)
    assert not waiting.done()
    stream.come.set_result(ENDPOINT)
    assert await waiting == ENDPOINT


async def test_an_engine_that_does_not_wake_in_time_is_503_with_retry_after() -> None:
    pool, stream = pool_of(None, WAKING)
    error = await refusal(pool, wake_s=0.01)
    assert (error.status, error.code, error.headers) == (
        503,
        "engine_waking",
        [(b"retry-after", b"10")],
    )
    assert "within 0.01 s (gateway.wake_timeout_s in the stack file)" in error.message
    assert stream.cancelled == 1


async def test_once_awake_the_wait_is_one_for_a_slot() -> None:
    pool, stream = pool_of(None, WAKING)
    waiting = asyncio.create_task(refusal(pool, timeout_s=0, wake_s=60))
    await stream.asked.wait()
    pool._states = {"engine": RUNNING}
    assert ((await waiting).status, stream.cancelled) == (429, 1)


async def test_an_engine_that_fails_to_wake_is_503_at_once() -> None:
    pool, stream = pool_of(None, WAKING)
    waiting = asyncio.create_task(refusal(pool, wake_s=60))
    await stream.asked.wait()
    pool._states = {"engine": EngineState(0, "UNHEALTHY")}
    assert (await waiting).message == "tiny-moe is not ready: its engine is unhealthy"


async def test_who_does_not_wait_for_it_does_not_wake_it() -> None:
    pool, stream = pool_of(None, ASLEEP)
    assert (await refusal(pool)).code == "engine_waking"
    assert not stream.asked.is_set()


async def test_a_response_of_an_engine_that_sleeps_is_gone() -> None:
    pool, stream = pool_of(None, ASLEEP)
    error = await refusal(pool, wake_s=60, hint=Hint(replica="replica-1"))
    assert (error.status, error.code) == (404, "previous_response_not_found")
    assert not stream.asked.is_set()


async def test_an_engine_that_was_lost_or_is_new_is_not_asleep() -> None:
    for status in ("UNHEALTHY", "DEPLOYING", "DEPLOY_FAILED", "NOT_STARTED"):
        pool, stream = pool_of(None, EngineState(0, status, starting=True))
        assert (await refusal(pool, wake_s=60)).code == "engine_unavailable"
        assert not stream.asked.is_set()


async def test_only_an_engine_that_runs_is_asked_whether_it_is_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question would wake one that sleeps."""

    def application(**replicas: int) -> SimpleNamespace:
        deployment = SimpleNamespace(replica_states=replicas)
        return SimpleNamespace(
            status=SimpleNamespace(value="RUNNING"), deployments={"d": deployment}
        )

    known = {
        "asleep": application(),
        "waking": application(STARTING=1),
        "running": application(RUNNING=2, STARTING=1),
    }
    asked: list[str] = []

    async def unfit(pool: EnginePool, name: str) -> str:
        asked.append(name)
        return ""

    seen = SimpleNamespace(applications=known)
    monkeypatch.setattr("serving.gateway.leases.serve.status", lambda: seen)
    monkeypatch.setattr(EnginePool, "_unfit", unfit)
    pool = EnginePool()
    pool._handles = {name: cast(DeploymentHandle, None) for name in known}
    await pool.look()
    assert asked == ["running"]
    assert pool.state("asleep") == ASLEEP
    assert pool.state("waking") == WAKING
    assert pool.state("running") == EngineState(2, "RUNNING", starting=True)


@pytest.mark.parametrize(
    ("state", "ready", "word"),
    [
        (RUNNING, True, "running"),
        (ASLEEP, True, "idle"),
        (WAKING, True, "starting"),
        (EngineState(1, "RUNNING", starting=True), True, "running"),
        (EngineState(1, "RUNNING", "why"), False, "unfit"),
        (EngineState(0, "DEPLOYING", starting=True), False, "deploying"),
        (EngineState(0, "UNHEALTHY", starting=True), False, "unhealthy"),
    ],
)
def test_what_can_wake_counts_as_ready(state: EngineState, ready: bool, word: str) -> None:
    assert (state.ready, state.word) == (ready, word)


def test_retry_after_is_what_the_last_start_took_less_what_has_passed() -> None:
    starts = leases._Starts()
    assert starts.left_s("engine", 0) == leases.RETRY_AFTER_LOADING_S
    for now, state in ((100.0, ASLEEP), (110.0, WAKING), (130.0, WAKING), (155.0, RUNNING)):
        starts.note({"engine": state}, now)
    # Not begun, 15 s into it, and longer than the last time.
    assert starts.left_s("engine", 200) == 45
    starts.note({"engine": WAKING}, 300)
    assert starts.left_s("engine", 315) == 30
    assert starts.left_s("engine", 400) == leases.RETRY_AFTER_BUSY_S


def test_a_start_that_failed_is_no_measure() -> None:
    starts = leases._Starts()
    for now, state in ((0.0, WAKING), (50.0, EngineState(0, "UNHEALTHY")), (90.0, RUNNING)):
        starts.note({"engine": state}, now)
    assert starts.left_s("engine", 100) == leases.RETRY_AFTER_LOADING_S


@pytest.mark.parametrize(
    ("hint", "called", "sessions"),
    [
        (Hint(), [()], []),
        (Hint(prompt="Once"), [(Hint(prompt="Once"),)], []),
        (Hint(session="s-1"), [()], ["s-1"]),
    ],
)
async def test_serves_router_gets_of_a_request_what_its_policy_needs(
    hint: Hint, called: list[tuple[Hint, ...]], sessions: list[str]
) -> None:
    pool, stream = pool_of(ENDPOINT)
    handle = FakeHandle(stream)
    pool._use("engine", cast(DeploymentHandle, handle))
    async with pool.lease("engine", "tiny-moe", 60, hint):
        pass
    assert (handle.called, handle.sessions) == (called, sessions)


async def test_a_changed_policy_gets_a_new_handle_and_an_unchanged_one_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, Balancing]] = []

    async def make(name: str, policy: Balancing) -> FakeHandle:
        made.append((name, policy))
        return FakeHandle(FakeStream(None))

    async def nothing(pool: EnginePool) -> None:
        pass

    monkeypatch.setattr(leases, "_handle", make)
    monkeypatch.setattr(EnginePool, "_refresh", nothing)
    monkeypatch.setattr(EnginePool, "_poll", nothing)
    pool = EnginePool()
    await pool.add({"a": "power-of-two", "b": "power-of-two"})
    first = pool._handles["a"]
    await pool.add({"a": "session-hash", "b": "power-of-two"})
    assert made == [("a", "power-of-two"), ("b", "power-of-two"), ("a", "session-hash")]
    assert pool._handles["a"] is not first
    # What was forgotten is asked for again.
    pool.keep_only(["b"])
    await pool.add({"a": "session-hash"})
    assert made[3:] == [("a", "session-hash")]


@dataclass
class ManyReplicas:
    """A handle whose calls go to these replicas, one after the other."""

    replicas: list[str]
    hints: list[tuple[Hint, ...]] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)

    def options(self, *, session_id: str) -> ManyReplicas:
        return self

    def remote(self, *arguments: Hint) -> FakeStream:
        self.hints.append(arguments)
        name = self.replicas[len(self.streams) % len(self.replicas)]
        self.streams.append(FakeStream(replace(ENDPOINT, replica=name)))
        return self.streams[-1]


def pool_with(handle: ManyReplicas, running: int) -> EnginePool:
    pool, _ = pool_of(None, EngineState(running, "RUNNING"))
    pool._use("engine", cast(DeploymentHandle, handle))
    return pool


async def test_leases_are_taken_until_the_wanted_replica_answers() -> None:
    handle = ManyReplicas(["a", "b", "c"])
    hint = Hint(prompt="Once", replica="c")
    async with pool_with(handle, 3).lease("engine", "m", 60, hint) as endpoint:
        assert endpoint.replica == "c"
        # The others have their slots back while this one is used.
        assert [stream.cancelled for stream in handle.streams] == [1, 1, 0]
    await asyncio.sleep(0.01)
    assert [stream.cancelled for stream in handle.streams] == [1, 1, 1]
    # By its policy, Serve would have chosen the same one each time.
    assert handle.hints == [(hint,), (), ()]


@pytest.mark.parametrize(("running", "attempts"), [(1, 1), (2, 8), (100, 32)])
async def test_a_replica_that_is_not_reached_is_404_after_so_many_attempts(
    running: int, attempts: int
) -> None:
    handle = ManyReplicas(["a", "b"])
    with pytest.raises(ApiError) as raised:
        async with pool_with(handle, running).lease("engine", "m", 60, Hint(replica="gone")):
            raise AssertionError("the lease was given")
    error = raised.value
    assert (error.status, error.code, error.param) == (
        404,
        "previous_response_not_found",
        "previous_response_id",
    )
    assert [stream.cancelled for stream in handle.streams] == [1] * attempts
