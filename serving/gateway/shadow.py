"""Shadow traffic: requests repeated to a second variant, whose answers are counted and dropped.

Owns the tasks of the repeats, their bound and their metrics. Leaves which request is repeated,
and to which variant, to the router. Nothing of a repeat reaches the client: it neither waits
for one, nor learns of its failure, nor ends it by leaving.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from serving.engines.keys import EngineKeys
from serving.gateway import errors
from serving.gateway.admission import Admission
from serving.gateway.call import Call
from serving.gateway.engine_http import EngineClient, EngineConnectionError
from serving.gateway.fair_queue import Refused
from serving.gateway.leases import EnginePool
from serving.gateway.settings import GatewaySettings
from serving.gateway.usage import Tail
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger("ray.serve")

# Each holds its request's body and a connection.
MOST_AT_ONCE = 16
# A repeat takes a slot that is free; it does not queue before the requests of clients.
SLOT_WITHIN_S = 1.0


class Shadows:
    """The repeats of one gateway process."""

    def __init__(
        self,
        pool: EnginePool,
        engines: EngineClient,
        keys: EngineKeys,
        metrics: GatewayMetrics,
        admission: Admission,
    ) -> None:
        self._admission = admission
        self._pool = pool
        self._engines = engines
        self._keys = keys
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self.running: Counter[str] = Counter()
        """Repeats under way, by engine application."""

    def repeat(self, call: Call, settings: GatewaySettings) -> None:
        """Send `call` in a task of its own, or count it as skipped where too many are under way."""
        if len(self._tasks) >= MOST_AT_ONCE:
            self._metrics.shadows.labels(*call.labels, "skipped").inc()
            return
        self.running[call.variant.app_name] += 1
        task = asyncio.create_task(self._run(call, settings))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._ended(call))

    def close(self) -> None:
        """End every repeat."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, call: Call) -> None:
        self.running[call.variant.app_name] -= 1

    async def _run(self, call: Call, settings: GatewaySettings) -> None:
        outcome = "failed"
        try:
            outcome = await self._send(call, settings)
        except errors.ApiError as error:
            outcome = str(error.status)
        except Refused:
            outcome = "429"
        except EngineConnectionError:
            outcome = "cut"
        except TimeoutError:
            outcome = "504"
        except asyncio.CancelledError:
            outcome = "ended"
            raise
        except Exception:
            logger.exception("the shadow of request %s failed", call.request_id)
        finally:
            self._metrics.shadows.labels(*call.labels, outcome).inc()

    async def _send(self, call: Call, settings: GatewaySettings) -> str:
        """Send the request and read the answer to its end; returns its status."""
        async with (
            asyncio.timeout(settings.request_timeout_s),
            self._admission.slot(
                call.model.id,
                call.variant.app_name,
                tokens=call.tokens,
                wait_s=SLOT_WITHIN_S,
                tenant="shadow",
                priority="batch",
            ),
            self._pool.lease(
                call.variant.app_name, call.model.id, SLOT_WITHIN_S, call.hint
            ) as endpoint,
        ):
            sent = time.perf_counter()
            headers = call.engine_headers(endpoint, self._keys.current())
            async with self._engines.post(
                endpoint, call.path, headers, call.body, settings.connect_timeout_s
            ) as engine:
                tail = Tail()
                while chunk := await engine.read():
                    tail.feed(chunk)
                if engine.status == 200:
                    self._count(call, time.perf_counter() - sent, tail)
                return str(engine.status)

    def _count(self, call: Call, duration_s: float, tail: Tail) -> None:
        self._metrics.shadow_duration.labels(*call.labels).observe(duration_s)
        tokens = tail.usage().completion_tokens
        if tokens is not None:
            self._metrics.shadow_tokens.labels(*call.labels).inc(tokens)
