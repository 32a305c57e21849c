"""Sends a request to its variant, and elsewhere where that can cure a fault.

Owns what is tried in which order, the time limits, and the headers that tell a client who
answered. A request goes to a second engine only before the client was told anything, only for
faults that lie with the engine, and within a budget. Leaves turns to `admission`, replicas to
`leases`, connections to `engine_http` and `external`, the copying to `relay`, and who may answer
to `router.fallback`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from serving.engines.keys import EngineKeys
from serving.engines.lease import Endpoint
from serving.gateway import errors
from serving.gateway.admission import Admission
from serving.gateway.breakers import Breakers
from serving.gateway.call import (
    FALLBACK_HEADER,
    OVERHEAD_HEADER,
    REPLICA_HEADER,
    RETRIES_HEADER,
    ROUTE_HEADER,
    Call,
)
from serving.gateway.engine_http import EngineClient, EngineConnectionError, EngineSilentError
from serving.gateway.external import ExternalClient
from serving.gateway.fair_queue import Refused
from serving.gateway.leases import EnginePool
from serving.gateway.relay import Pace, Reply, relay
from serving.gateway.retry_budget import RetryBudget
from serving.gateway.settings import GatewaySettings
from serving.router.balancing import Hint
from serving.router.fallback import Target, is_bound, others
from serving.router.request import VARIANT_HEADER
from serving.router.settings import External
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger("ray.serve")

# On other replicas of the same variant.
MOST_RETRIES = 2
# Engines that may go away with one request: it may be what ends them.
MOST_DEATHS = 2
# For a request whose turn came in its last second.
LEASE_WITHIN_S = 1.0


class Dispatch:
    """The requests of one gateway process on their way to engines."""

    def __init__(
        self,
        pool: EnginePool,
        engines: EngineClient,
        keys: EngineKeys,
        metrics: GatewayMetrics,
        admission: Admission,
        breakers: Breakers,
    ) -> None:
        self._pool = pool
        self._engines = engines
        self._outside = ExternalClient()
        self._keys = keys
        self._metrics = metrics
        self._admission = admission
        self._breakers = breakers
        self._budget = RetryBudget()
        self.running: Counter[str] = Counter()
        """Requests of each engine application that run here or wait for a lease."""

    async def answer(self, call: Call, reply: Reply, settings: GatewaySettings) -> str:
        """Have `call` answered; returns the outcome as `relay` does.

        Raises ApiError where nobody could answer.
        """
        self._budget.earn()
        try:
            async with asyncio.timeout(settings.request_timeout_s):
                return await self._try(call, reply, settings)
        except TimeoutError:
            raise errors.timed_out(settings.request_timeout_s) from None

    async def _try(self, call: Call, reply: Reply, settings: GatewaySettings) -> str:
        headers, deaths = reply.headers, 0
        try:
            return await self._to_variant(call, reply, settings)
        except errors.ApiError as error:
            told = fault = error
        for retries, turn in enumerate(self._turns(call, settings), 1):
            if not fault.elsewhere or reply.told:
                break
            # A fault before the engine had the request is no load on anybody.
            if fault.code == errors.DIED:
                deaths += 1
                if deaths == MOST_DEATHS or not self._budget.spend():
                    break
            self._metrics.retries.labels(*call.labels, fault.code).inc()
            reply.headers = [*headers, (RETRIES_HEADER.encode(), str(retries).encode())]
            try:
                if isinstance(turn, External):
                    return await self._to_outside(turn, call, reply, settings)
                return await self._to_variant(turn, reply, settings)
            except errors.ApiError as error:
                fault = error
        if not reply.started:
            reply.headers = headers
        raise told

    def _turns(self, call: Call, settings: GatewaySettings) -> Iterator[Call | External]:
        """Who is asked after the first fault, in order, by the states at each one's turn."""
        if not call.hint.replica:
            for _ in range(MOST_RETRIES):
                if self._pool.state(call.variant.app_name).running_replicas > 1:
                    yield call
        if is_bound(call.decision):
            return
        chosen = Target(call.model, call.variant)
        for each in others(
            settings.table, chosen, call.asked, lambda route: self._pool.state(route.app_name).ready
        ):
            if isinstance(each, External):
                yield each
            elif call.may_move_to(each.model.id):
                yield _moved(call, each)

    async def _to_variant(self, call: Call, reply: Reply, settings: GatewaySettings) -> str:
        application, began = call.variant.app_name, time.monotonic()
        self.running[application] += 1
        try:
            async with self._admission.slot(
                call.model.id,
                application,
                tokens=call.tokens,
                wait_s=settings.queue_timeout_s,
                tenant=call.asked.tenant,
                priority=call.asked.priority,
            ):
                left_s = max(began + settings.queue_timeout_s - time.monotonic(), LEASE_WITHIN_S)
                async with self._pool.lease(
                    application, call.model.id, left_s, call.hint, settings.wake_timeout_s
                ) as endpoint:
                    with self._metrics.leases.labels(*call.labels).track_inprogress():
                        return await self._to_replica(call, reply, endpoint, settings)
        except Refused as refused:
            raise errors.no_capacity(call.model.id, refused.retry_after_s) from None
        finally:
            self.running[application] -= 1

    async def _to_replica(
        self, call: Call, reply: Reply, endpoint: Endpoint, settings: GatewaySettings
    ) -> str:
        overhead_s = time.perf_counter() - call.started
        self._metrics.overhead.labels(*call.labels).observe(overhead_s)
        reply.headers = [
            *reply.headers,
            (VARIANT_HEADER.encode(), call.variant.variant.encode()),
            (ROUTE_HEADER.encode(), call.decision.rule.encode()),
            (REPLICA_HEADER.encode(), endpoint.replica.encode()),
            (OVERHEAD_HEADER.encode(), f"{overhead_s * 1000:.1f}".encode()),
        ]
        if call.moved:
            reply.headers.append((FALLBACK_HEADER.encode(), call.name.encode()))
        replica, sent = endpoint.replica, time.monotonic()
        pace = _pace(settings, partial(self._breakers.replied, replica))
        try:
            async with self._engines.post(
                endpoint,
                call.path,
                call.engine_headers(endpoint, self._keys.current()),
                call.body,
                settings.connect_timeout_s,
                settings.first_byte_timeout_s if call.stream else None,
            ) as engine:
                outcome = await relay(engine, reply, call.path, call.model.id, pace)
        except EngineSilentError as silent:
            self._breakers.silent(replica, sent)
            raise errors.engine_silent(call.model.id, silent.limit_s) from None
        except EngineConnectionError:
            self._breakers.fault(replica)
            raise errors.engine_died(call.model.id) from None
        except errors.ApiError as error:
            if error.code == errors.DIED:
                self._breakers.fault(replica)
            elif error.code == errors.SILENT:
                self._breakers.silent(replica, sent)
            raise
        if outcome == "cut":
            self._breakers.fault(replica)
        return outcome

    async def _to_outside(
        self, to: External, call: Call, reply: Reply, settings: GatewaySettings
    ) -> str:
        reply.headers = [
            *reply.headers,
            (ROUTE_HEADER.encode(), call.decision.rule.encode()),
            (FALLBACK_HEADER.encode(), to.name.encode()),
        ]
        try:
            async with self._outside.post(to, call, settings) as source:
                return await relay(source, reply, call.path, call.model.id, _pace(settings))
        except EngineSilentError as silent:
            raise errors.engine_silent(call.model.id, silent.limit_s) from None
        except EngineConnectionError as error:
            logger.warning("fallback %s: %s", to.name, error)
            raise errors.engine_died(call.model.id) from None


def _pace(settings: GatewaySettings, came: Callable[[], None] | None = None) -> Pace:
    return Pace(
        keep_alive_s=settings.keep_alive_s,
        first_byte_s=settings.first_byte_timeout_s,
        between_s=settings.between_bytes_timeout_s,
        came=came,
    )


def _moved(call: Call, to: Target) -> Call:
    """The call for another variant; what it knew of replicas is of no use there."""
    body = call.body
    if to.model.id != call.model.id:
        body = json.dumps({**json.loads(body), "model": to.model.id}).encode()
    return replace(call, model=to.model, variant=to.variant, body=body, hint=Hint(), moved=True)
