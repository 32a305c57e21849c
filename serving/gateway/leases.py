"""Leases on engine replicas, taken through Serve's request router.

Owns the handles, what state each engine application is in, and the release of
every lease. One Serve call per request; no token passes here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from serving.engines.lease import Endpoint
from serving.gateway import errors

logger = logging.getLogger("ray.serve")

# Serve's status takes about 20 ms of CPU, so it is asked for often only where the
# last answer was bad news, or where someone waits for it.
POLL_EVERY_S = 10.0
FRESH_FOR_S = 2.0
RECHECK_EVERY_S = 0.5
RETRY_AFTER_LOADING_S = 10.0
RETRY_AFTER_BUSY_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine application as Serve's controller sees it."""

    running_replicas: int
    status: str
    message: str = ""

    @property
    def ready(self) -> bool:
        """Whether at least one replica takes requests."""
        return self.running_replicas > 0


UNKNOWN = EngineState(0, "NOT_STARTED")


class EnginePool:
    """Handles of all engine applications of the routing table."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle] = {}
        self._states: Mapping[str, EngineState] = {}
        self._looked_at = -math.inf
        self._looking = asyncio.Lock()
        self._poller: asyncio.Task[None] | None = None

    async def add(self, app_names: Iterable[str]) -> None:
        """Have a handle and the state of each of these applications."""
        for name in set(app_names) - self._handles.keys():
            handle = await asyncio.to_thread(serve.get_app_handle, name)
            self._handles[name] = handle.options(method_name="lease", stream=True)
        async with self._looking:
            await self._refresh()
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())

    def keep_only(self, app_names: Iterable[str]) -> None:
        """Forget all other applications; running leases are not touched."""
        for name in self._handles.keys() - set(app_names):
            del self._handles[name]

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
        self._states = {
            name: EngineState(
                running_replicas=sum(
                    deployment.replica_states.get("RUNNING", 0)
                    for deployment in application.deployments.values()
                ),
                status=str(application.status.value),
                message=application.message,
            )
            for name, application in status.applications.items()
        }

    @asynccontextmanager
    async def lease(
        self, app_name: str, model: str, queue_timeout_s: float
    ) -> AsyncIterator[Endpoint]:
        """Hold one slot of one replica for as long as the block runs.

        Raises ApiError: 503 where no replica runs, 429 where none is free in time.
        """
        handle = self._handles.get(app_name)
        if not self.state(app_name).ready:
            await self.look()
        if handle is None or not self.state(app_name).ready:
            raise self._unavailable(app_name, model)
        stream: DeploymentResponseGenerator = handle.remote()
        try:
            yield await self._first(stream, app_name, model, queue_timeout_s)
        finally:
            # The replica also ends the lease when its HTTP request ends; this
            # frees the slot of a request that never reached it.
            with contextlib.suppress(RayError, RayServeException):
                stream.cancel()

    async def _first(
        self, stream: DeploymentResponseGenerator, app_name: str, model: str, timeout_s: float
    ) -> Endpoint:
        first = asyncio.ensure_future(anext(stream))
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            while not first.done():
                await asyncio.wait({first}, timeout=RECHECK_EVERY_S)
                if first.done():
                    break
                await self.look()
                if not self.state(app_name).ready:
                    raise self._unavailable(app_name, model)
                if asyncio.get_running_loop().time() > deadline:
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

    def _unavailable(self, app_name: str, model: str) -> errors.ApiError:
        state = self.state(app_name).status
        return errors.engine_unavailable(
            model, f"its engine is {state.lower()}", RETRY_AFTER_LOADING_S
        )

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            await self.look()
