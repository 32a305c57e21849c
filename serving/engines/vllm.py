"""vLLM engines on Ray Serve: one deployment per model variant.

Owns the replica: it starts vLLM through `ray.serve.llm`, serves vLLM's own
FastAPI app on a port of its own, grants leases on that port and says when the
engine hangs. Leaves to the gateway every byte of a request, and to `stack` the
settings and the deployment's options.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import uvicorn
from prometheus_client import REGISTRY
from ray import serve
from ray.serve.llm import LLMServer
from ray.util import get_node_ip_address

from serving.engines.keys import AsgiApp, EngineKeyMiddleware, EngineKeys, Receive, Scope, Send
from serving.engines.lease import LEASE_HEADER, Endpoint, LeaseBook

# Three checks in a row must fail before Serve replaces a replica; with a check
# every 2 s a hung engine is out after about 3 x (6 + 2) = 24 s.
HEALTH_CHECK_PERIOD_S = 2.0
ENGINE_REPLY_WITHIN_S = 6.0
# An engine that answers but has finished no step for this long while requests
# wait is stuck: a single prefill chunk never takes minutes.
STALLED_AFTER_S = 180.0


class EngineHungError(RuntimeError):
    """The engine process does not answer, or has work and makes no progress."""


class VllmEngine(LLMServer):
    """A replica of one model variant.

    Ray Serve calls the constructor, which returns when the model is loaded and
    the port is open.
    """

    async def start(self) -> None:
        """Start the engine, then its HTTP port on this node's address."""
        await super().start()
        self._leases = LeaseBook()
        self._replica_id: str = serve.get_replica_context().replica_id.unique_id
        self._watch = _ProgressWatch()
        app = await self.__serve_build_asgi_app__()
        self._server = _EmbeddedServer(
            EngineKeyMiddleware(_LeaseTracker(app, self._leases), EngineKeys.from_environment()),
            host=get_node_ip_address(),
        )
        self._url = await self._server.start()

    async def lease(self, hint: str | None = None) -> AsyncIterator[Endpoint]:
        """Yield this replica's endpoint, then hold Serve's slot until the request has ended.

        Serve's request router chooses the replica, and reads `hint` (the
        request's prompt, where a prefix-aware policy is configured) from this
        call's arguments.
        """
        lease_id = self._leases.grant()
        yield Endpoint(url=self._url, replica=self._replica_id, lease_id=lease_id)
        await self._leases.wait_until_ended(lease_id)

    async def check_health(self) -> None:
        """Raise when the engine is dead, does not answer, or is stuck with work waiting."""
        await super().check_health()
        if self.engine is None:
            return
        try:
            async with asyncio.timeout(ENGINE_REPLY_WITHIN_S):
                # Any call that the engine core's own loop answers would do.
                await self.engine._engine_client.is_sleeping()
        except TimeoutError:
            raise EngineHungError(
                f"the engine core has not answered within {ENGINE_REPLY_WITHIN_S:.0f} s"
            ) from None
        self._watch.check(has_work=self._leases.open_count > 0)


class _ProgressWatch:
    """Notices an engine whose step counter stands still while it has requests."""

    def __init__(self) -> None:
        self._steps = -1.0
        self._moved_at = time.monotonic()

    def check(self, *, has_work: bool) -> None:
        steps = _engine_steps()
        if steps != self._steps or not has_work:
            self._steps, self._moved_at = steps, time.monotonic()
        elif time.monotonic() - self._moved_at > STALLED_AFTER_S:
            raise EngineHungError(
                f"no engine step for {STALLED_AFTER_S:.0f} s while requests are waiting"
            )


def _engine_steps() -> float:
    """Engine steps so far, from vLLM's own Prometheus metrics."""
    for metric in REGISTRY.collect():
        if metric.name == "vllm:iteration_tokens_total":
            return sum(s.value for s in metric.samples if s.name.endswith("_count"))
    return -1.0


class _LeaseTracker:
    """Tells the lease book when a leased request starts and ends."""

    def __init__(self, app: AsgiApp, leases: LeaseBook) -> None:
        self._app = app
        self._leases = leases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lease_id = dict(scope["headers"]).get(LEASE_HEADER.encode(), b"").decode("latin-1")
        self._leases.request_started(lease_id)
        try:
            await self._app(scope, receive, send)
        finally:
            self._leases.request_ended(lease_id)


class _EmbeddedServer(uvicorn.Server):
    """uvicorn on the replica's event loop; Serve, not uvicorn, handles signals."""

    def __init__(self, app: AsgiApp, host: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=0,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=75,
            )
        )
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def start(self) -> str:
        """Open the port and return its URL."""
        self._task = asyncio.create_task(self.serve())
        while not self.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the engine's HTTP port could not be opened")
            await asyncio.sleep(0.01)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"
