"""vLLM engines on Ray Serve: one deployment per model variant.

Owns the replica: it starts vLLM through `ray.serve.llm`, serves vLLM's own
FastAPI app on a server of its own, grants leases on it and says when the engine
hangs or is not fit to serve. Leaves the sockets to `server`, the questions to
`probes` and `watchdog`, to the gateway every byte of a request, and to `stack` the
settings and the deployment's options.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import psutil
import ray
from prometheus_client import REGISTRY, Gauge
from ray import serve
from ray.serve.llm import LLMServer
from ray.util import get_node_ip_address

from serving.engines import drafting, probes
from serving.engines.keys import (
    ENGINE_KEY_HEADER,
    AsgiApp,
    EngineKeyMiddleware,
    EngineKeys,
    Receive,
    Scope,
    Send,
)
from serving.engines.lease import LEASE_HEADER, Endpoint, LeaseBook
from serving.engines.probe_settings import Probes
from serving.engines.server import EngineServer
from serving.engines.watchdog import AcceptanceWatch
from serving.processes import shared_memory
from serving.router.balancing import Hint

logger = logging.getLogger("ray.serve")

# Three checks in a row must fail before Serve replaces a replica; with a check
# every 2 s a hung engine is out after about 3 x (6 + 2) = 24 s.
HEALTH_CHECK_PERIOD_S = 2.0
ENGINE_REPLY_WITHIN_S = 6.0
# An engine that answers but has finished no step for this long while requests
# wait is stuck: a single prefill chunk never takes minutes.
STALLED_AFTER_S = 180.0
STEPS_METRIC = "vllm:iteration_tokens_total_count"
LEASES = Gauge("moe_serving_replica_leases", "Leases granted to gateways and not over", ["state"])
COLLAPSED = Gauge(
    "moe_serving_drafting_collapsed", "1 while almost no or almost every draft token is accepted"
)


class EngineHungError(RuntimeError):
    """The engine process does not answer, or has work and makes no progress."""


class VllmEngine(LLMServer):
    """A replica of one model variant.

    Ray Serve calls the constructor, which returns when the model is loaded and
    the server takes requests.
    """

    async def start(self) -> None:
        """Start the engine, then its HTTP server on this node's address and a unix socket."""
        with _serve_log_kept():
            await self._start()

    async def _start(self) -> None:
        if Path(self._llm_config.model_loading_config.model_source).is_dir():
            # Ray would start a process on each node to find that there is nothing to fetch.
            self._llm_config.get_or_create_callback().ctx.run_init_node = False
        await super().start()
        self._leases = LeaseBook()
        LEASES.labels("granted").set_function(lambda: self._leases.open_count)
        LEASES.labels("running").set_function(lambda: self._leases.running_count)
        self._replica_id: str = serve.get_replica_context().replica_id.unique_id
        self._watch = _ProgressWatch()
        self._unfit = ""
        self._probes = Probes.from_environment()
        keys = EngineKeys.from_environment()
        app = await self.__serve_build_asgi_app__()
        node = ray.get_runtime_context()
        self._node: str = node.get_node_id()
        self._server = EngineServer(
            EngineKeyMiddleware(_LeaseTracker(app, self._leases), keys),
            host=get_node_ip_address(),
            # `moe-serving down` removes it, with what killed replicas left there.
            folder=node.get_temp_dir(),
        )
        await self._server.start()
        target = probes.Target(
            url=self._server.url,
            model=self._llm_config.model_id,
            headers={ENGINE_KEY_HEADER: keys.current()},
            max_model_len=self._llm_config.engine_kwargs["max_model_len"],
        )
        self._unfit = await probes.run(self._probes, target, drafting.read) or ""
        if self._unfit:
            logger.error("not fit to serve: %s", self._unfit)
        self._acceptance = AcceptanceWatch(drafting.read())
        self._collapse: str | None = None

    async def unfit(self) -> str:
        """Why this replica should get no request; empty where it should."""
        return self._unfit

    async def __del__(self) -> None:
        """Clean up; Serve awaits this when it ends the replica in order."""
        if hasattr(self, "_server"):
            self._server.remove_socket()
        # Some 400 MB, which an engine core that is ended from outside leaves behind.
        memory = shared_memory(psutil.Process().children(recursive=True))
        await super().__del__()
        for block in memory:
            block.unlink(missing_ok=True)

    async def lease(self, hint: Hint | None = None) -> AsyncIterator[Endpoint]:
        """Yield this replica's endpoint, then hold Serve's slot until the request has ended.

        `hint` is for Serve's request router, which has read it when it chose this replica.
        """
        with self._leases.granted() as lease_id:
            yield Endpoint(
                url=self._server.url,
                replica=self._replica_id,
                lease_id=lease_id,
                node=self._node,
                socket=self._server.socket_path,
                unfit=self._unfit,
            )
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
        self._watch.check(has_work=self._leases.running_count > 0)
        self._watch_acceptance()

    def _watch_acceptance(self) -> None:
        collapse = self._acceptance.look(drafting.read())
        if collapse == self._collapse:
            return
        if collapse and not self._collapse:
            logger.error("drafting has collapsed: %s", collapse)
            if self._probes.on_collapse == "drain":
                self._unfit = self._unfit or f"drafting has collapsed: {collapse}"
        elif not collapse:
            logger.warning("drafting has recovered: %s", self._acceptance.window)
        self._collapse = collapse
        COLLAPSED.set(bool(collapse))


@contextlib.contextmanager
def _serve_log_kept() -> Iterator[None]:
    """Give Serve's log its file back after the block.

    vLLM and uvicorn set up their logging by `dictConfig`, which closes every handler there is. A
    controller that is restarted asks each replica for its log file, and ends one that has none.
    """
    buffers = [handler for handler in logger.handlers if isinstance(handler, MemoryHandler)]
    targets = [buffer.target for buffer in buffers]
    yield
    for buffer, target in zip(buffers, targets, strict=True):
        buffer.setTarget(target)


class _ProgressWatch:
    """Notices an engine whose step counter stands still while it has requests."""

    def __init__(self) -> None:
        self._steps = -1.0
        self._moved_at = time.monotonic()

    def check(self, *, has_work: bool) -> None:
        steps = _engine_steps() if has_work else -1.0
        if steps != self._steps or not has_work:
            self._steps, self._moved_at = steps, time.monotonic()
        elif time.monotonic() - self._moved_at > STALLED_AFTER_S:
            raise EngineHungError(
                f"no engine step for {STALLED_AFTER_S:.0f} s while requests are waiting"
            )


def _engine_steps() -> float:
    """Engine steps so far, from vLLM's own Prometheus metrics."""
    # All metrics together would take some milliseconds.
    found = REGISTRY.restricted_registry([STEPS_METRIC]).collect()
    return sum(sample.value for metric in found for sample in metric.samples)


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
