"""Leases on engine replicas, taken through Serve's request router.

Owns the handles, what state each engine application is in, and the release of
every lease. One Serve call per request at most; no token passes here. Leaves keeping
leases for the next request to `idle_leases`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from serving.engines.lease import Endpoint
from serving.gateway import errors
from serving.gateway.idle_leases import IdleLeases, Lease, release
from serving.gateway.request_routers import answers_nobody, routing_by, takes_requests
from serving.router.balancing import Balancing, Hint

logger = logging.getLogger("ray.serve")

# Serve's status takes about 20 ms of CPU, so it is asked for often only where the
# last answer was bad news, or where someone waits for it.
POLL_EVERY_S = 10.0
FRESH_FOR_S = 2.0
RECHECK_EVERY_S = 0.5
UNFIT_WITHIN_S = 2.0
# Serve 2.60 cannot be asked for one replica.
MOST_ATTEMPTS = 32
RETRY_AFTER_LOADING_S = 10.0
RETRY_AFTER_BUSY_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine application as Serve's controller sees it."""

    running_replicas: int
    status: str
    unfit: str = ""
    """Why its replicas should get no request, by their own word."""
    starting: bool = False
    """Whether a replica is being started."""

    @property
    def asleep(self) -> bool:
        """Whether no replica runs since none was needed; a request that waits starts one.

        Serve calls such an application running. One that has lost its last replica is
        `UNHEALTHY` until it has another, one that is new or changed `DEPLOYING`.
        """
        return not self.running_replicas and self.status == "RUNNING"

    @property
    def ready(self) -> bool:
        """Whether a request is answered: by a replica that runs, or by one that it wakes."""
        return not self.unfit if self.running_replicas else self.asleep

    @property
    def word(self) -> str:
        """The state in a word, for people."""
        if self.asleep:
            return "starting" if self.starting else "idle"
        return "unfit" if self.running_replicas and self.unfit else self.status.lower()


UNKNOWN = EngineState(0, "NOT_STARTED")


class _Starts:
    """How long engines take that were asleep, from the first look at their start to its end."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}

    def note(self, states: Mapping[str, EngineState], now: float) -> None:
        """Take the states as they are `now`, in seconds of a clock that only goes forward."""
        for name, state in states.items():
            if state.asleep and state.starting:
                self._began.setdefault(name, now)
            elif (began := self._began.pop(name, None)) is not None and state.running_replicas:
                self._took[name] = now - began

    def left_s(self, name: str, now: float) -> float:
        """Seconds until this engine should be ready, if it takes as long as the last time."""
        if (took := self._took.get(name)) is None:
            return RETRY_AFTER_LOADING_S
        return max(took - (now - self._began.get(name, now)), RETRY_AFTER_BUSY_S)


class _Patience:
    """How long one request waits: for an engine to wake, and then for a slot. Seconds."""

    def __init__(self, queue_timeout_s: float, wake_timeout_s: float) -> None:
        self.wake_timeout_s = wake_timeout_s
        self._queue_timeout_s = queue_timeout_s
        self._began = self._awake_since = time.monotonic()

    def is_over(self, *, asleep: bool) -> bool:
        """Whether it ends now; time with an engine `asleep` is none of that for a slot."""
        now = time.monotonic()
        if asleep:
            self._awake_since = now
            return now - self._began > self.wake_timeout_s
        return now - self._awake_since > self._queue_timeout_s


class EnginePool:
    """Handles of all engine applications of the routing table."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle] = {}
        self._balancing: dict[str, Balancing] = {}
        self._idle: dict[str, IdleLeases] = {}
        self._states: Mapping[str, EngineState] = {}
        self._looked_at = -math.inf
        self._looking = asyncio.Lock()
        self._starts = _Starts()
        self._poller: asyncio.Task[None] | None = None
        self.on_look: Callable[[], None] = lambda: None
        """Called whenever the states are new."""

    async def add(self, balancing: Mapping[str, Balancing]) -> None:
        """Have the state of each of these applications, and a handle that balances so."""
        for name, policy in balancing.items():
            if self._balancing.get(name) != policy:
                handle = await _handle(name, policy)
                self._use(name, handle)
                self._balancing[name] = policy
        async with self._looking:
            await self._refresh()
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())

    def keep_only(self, app_names: Iterable[str]) -> None:
        """Forget all other applications; running leases are not touched."""
        for name in self._handles.keys() - set(app_names):
            self._idle.pop(name).clear()
            del self._handles[name], self._balancing[name]

    def _use(self, app_name: str, handle: DeploymentHandle) -> None:
        if app_name in self._idle:
            self._idle[app_name].clear()
        self._handles[app_name] = handle
        self._idle[app_name] = IdleLeases(partial(takes_requests, handle))

    def state(self, app_name: str) -> EngineState:
        """The application's state at the last look, at most `POLL_EVERY_S` old."""
        return self._states.get(app_name, UNKNOWN)

    async def look(self) -> None:
        """Make the states at most `FRESH_FOR_S` old, where Serve's controller answers."""
        async with self._looking:
            if time.monotonic() - self._looked_at < FRESH_FOR_S:
                return
            try:
                await self._refresh()
            except Exception:
                # The controller may be restarting; the last known states stand.
                logger.exception("cannot read the state of the engine applications")

    async def _refresh(self) -> None:
        status = await asyncio.to_thread(serve.status)
        self._looked_at = time.monotonic()
        states = {
            name: EngineState(
                running_replicas=sum(
                    deployment.replica_states.get("RUNNING", 0)
                    for deployment in application.deployments.values()
                ),
                status=str(application.status.value),
                starting=any(
                    deployment.replica_states.get("STARTING", 0)
                    for deployment in application.deployments.values()
                ),
            )
            for name, application in status.applications.items()
        }
        self._starts.note(states, self._looked_at)
        # Only where a replica runs: the question would wake one.
        asked = [name for name in self._handles if name in states and states[name].running_replicas]
        for name, unfit in zip(asked, await asyncio.gather(*map(self._unfit, asked)), strict=True):
            states[name] = replace(states[name], unfit=unfit)
        self._states = states
        self.on_look()

    async def _unfit(self, app_name: str) -> str:
        """What one of the engine's replicas says of itself; no answer is no reason."""
        if answers_nobody(self._handles[app_name]):
            return ""
        ask = self._handles[app_name].options(method_name="unfit", stream=False)
        try:
            async with asyncio.timeout(UNFIT_WITHIN_S):
                return str(await ask.remote())
        except (TimeoutError, RayError, RayServeException):
            return ""

    @asynccontextmanager
    async def lease(
        self,
        app_name: str,
        model: str,
        queue_timeout_s: float,
        hint: Hint,
        wake_timeout_s: float = 0.0,
    ) -> AsyncIterator[Endpoint]:
        """Hold one slot of one replica for as long as the block runs.

        An engine that is asleep is woken and waited for, `wake_timeout_s` at most; with 0 it is
        left alone. `hint` is what Serve's request router may choose the replica by. Raises
        ApiError: 503 where no replica runs, or none is awake in time, 429 where none is free in
        time, 404 where it is not the one that `hint` needs.
        """
        handle, idle = self._handles.get(app_name), self._idle.get(app_name)
        if not self.state(app_name).running_replicas or not self.state(app_name).ready:
            await self.look()
        if handle is None or idle is None:
            raise self._unavailable(app_name, model)
        self._check(handle, app_name, model)
        if self.state(app_name).asleep:
            if hint.replica:
                raise errors.response_out_of_reach(model)
            if not wake_timeout_s:
                raise self._waking(app_name, model, wake_timeout_s)
        if hint != Hint():
            # Its replica's slot may be among those that are kept.
            idle.clear()
        patience = _Patience(queue_timeout_s, wake_timeout_s)
        lease, whole = idle.take(), False
        if lease is None:
            with idle.waiting():
                lease = await self._granted(handle, app_name, model, hint, patience)
        idle.begun(lease)
        try:
            yield lease.endpoint
            whole = True
        finally:
            # The replica also ends the lease some time after its HTTP request has; this
            # frees the slot of a request that never reached it.
            idle.ended(lease, whole=whole)

    async def _granted(
        self,
        handle: DeploymentHandle,
        app_name: str,
        model: str,
        hint: Hint,
        patience: _Patience,
    ) -> Lease:
        """A lease that Serve's router has given; raises ApiError."""
        taken: list[DeploymentResponseGenerator] = []
        try:
            for attempt in range(self._attempts(app_name, hint)):
                # A policy would choose the same replica again.
                taken.append(_ask(handle, Hint() if attempt else hint))
                endpoint = await self._first(taken[-1], handle, app_name, model, patience)
                if hint.replica in ("", endpoint.replica):
                    break
            else:
                raise errors.response_out_of_reach(model)
            if endpoint.unfit:
                raise errors.engine_unfit(model, endpoint.unfit, RETRY_AFTER_LOADING_S)
            return Lease(taken.pop(), endpoint)
        finally:
            for stream in taken:
                release(stream)

    def _attempts(self, app_name: str, hint: Hint) -> int:
        """How many leases may be taken until one is on the replica that is wanted.

        Those on others are held so long, and make them look busier to Serve's router.
        """
        replicas = self.state(app_name).running_replicas
        return min(4 * replicas, MOST_ATTEMPTS) if hint.replica and replicas > 1 else 1

    async def _first(
        self,
        stream: DeploymentResponseGenerator,
        handle: DeploymentHandle,
        app_name: str,
        model: str,
        patience: _Patience,
    ) -> Endpoint:
        first = asyncio.ensure_future(anext(stream))
        try:
            while not first.done():
                await asyncio.wait({first}, timeout=RECHECK_EVERY_S)
                if first.done():
                    break
                await self.look()
                self._check(handle, app_name, model)
                state = self.state(app_name)
                if patience.is_over(asleep=state.asleep):
                    if state.asleep:
                        raise self._waking(app_name, model, patience.wake_timeout_s)
                    raise errors.no_capacity(model, RETRY_AFTER_BUSY_S)
            endpoint: Endpoint = first.result()
            return endpoint
        except BackPressureError:
            raise errors.no_capacity(model, RETRY_AFTER_BUSY_S) from None
        except (RayError, RayServeException, StopAsyncIteration) as problem:
            logger.warning("lease on %s failed: %s", app_name, type(problem).__name__)
            raise self._unavailable(app_name, model) from None
        finally:
            first.cancel()

    def _check(self, handle: DeploymentHandle, app_name: str, model: str) -> None:
        """Raises ApiError where nobody will answer soon."""
        if not self.state(app_name).ready:
            raise self._unavailable(app_name, model)
        if answers_nobody(handle):
            reason = "none of its replicas answers"
            raise errors.engine_unavailable(model, reason, RETRY_AFTER_LOADING_S)

    def _unavailable(self, app_name: str, model: str) -> errors.ApiError:
        if unfit := self.state(app_name).unfit:
            return errors.engine_unfit(model, unfit, RETRY_AFTER_LOADING_S)
        state = self.state(app_name).status
        return errors.engine_unavailable(
            model, f"its engine is {state.lower()}", RETRY_AFTER_LOADING_S
        )

    def _waking(self, app_name: str, model: str, waited_s: float) -> errors.ApiError:
        return errors.engine_waking(
            model, waited_s, self._starts.left_s(app_name, time.monotonic())
        )

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            await self.look()


async def _handle(app_name: str, policy: Balancing) -> DeploymentHandle:
    """A new handle for leases, which balances by this policy.

    A handle keeps its first request router, and Serve gives the same handle out again. Its
    router belongs to the event loop it is made on; only the name is asked for in a thread.
    """
    found = await asyncio.to_thread(serve.get_app_handle, app_name)
    return DeploymentHandle(
        found.deployment_name, app_name, _create_router=routing_by(policy)
    ).options(method_name="lease", stream=True)


def _ask(handle: DeploymentHandle, hint: Hint) -> DeploymentResponseGenerator:
    if hint.session:
        handle = handle.options(session_id=hint.session)
    # An argument without a prompt makes Serve's prefix-aware router fail.
    stream: DeploymentResponseGenerator = handle.remote(*([hint] if hint.prompt else []))
    return stream
