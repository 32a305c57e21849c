"""Admission: a request waits here for its turn, before it takes a lease.

Owns waiting in asyncio, the limits that settings and running replicas come to, and their
metrics. Leaves the order to `fair_queue`, replicas and their own slots to `leases`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.gateway.fair_queue import (
    Counts,
    FairQueue,
    Limit,
    Limits,
    ModelLimits,
    ScopeName,
    Ticket,
)
from serving.gateway.settings import GatewaySettings
from serving.router.request import Priority
from serving.router.settings import Bounds
from serving.router.table import VariantRoute

# Waiting requests for each that may run, where the stack file does not say.
QUEUED_PER_SLOT = 4


class Admission:
    """Waits in asyncio for the turn that `FairQueue` gives; for one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._queue = FairQueue(limits, self._told)
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}

    def set_limits(self, limits: Limits) -> None:
        """Take these limits; see `FairQueue.set_limits`."""
        self._queue.set_limits(limits, time.monotonic())

    def counts(self) -> dict[ScopeName, Counts]:
        """Every scope's counters; see `FairQueue.counts`."""
        return self._queue.counts()

    @asynccontextmanager
    async def slot(
        self,
        model: str,
        variant: str,
        *,
        tokens: int,
        wait_s: float,
        tenant: str = "",
        priority: Priority = "interactive",
    ) -> AsyncIterator[None]:
        """Hold a slot for as long as the block runs, having waited for it `wait_s` at most.

        `tokens` is the estimated prompt and the answer's limit. Raises Refused.
        """
        ticket = self._queue.arrive(
            model, variant, tokens=tokens, now=time.monotonic(), tenant=tenant, priority=priority
        )
        try:
            if ticket.state == "waiting":
                await self._turn(ticket, wait_s)
            yield
        finally:
            # Also of a turn that came unseen: a task can be cancelled after its future has a
            # result and before it goes on.
            self._queue.leave(ticket, time.monotonic())

    async def _turn(self, ticket: Ticket, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(wait_s, self._late, ticket)
        self._waiters[ticket] = turn = loop.create_future()
        try:
            await turn
        finally:
            timer.cancel()
            del self._waiters[ticket]
        if ticket.refusal is not None:
            raise ticket.refusal

    def _late(self, ticket: Ticket) -> None:
        self._queue.expire(ticket, time.monotonic())
        self._told(ticket)

    def _told(self, ticket: Ticket) -> None:
        # A result for refusals too: an exception that a cancelled task never fetches is logged.
        turn = self._waiters[ticket]
        if not turn.done():
            turn.set_result(None)


class AdmissionMetrics(Collector):
    """The counters of an `Admission`, by model and engine application; both empty: all of them."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        labels = ("model", "application")
        running = GaugeMetricFamily(
            "moe_serving_running", "Requests that have a slot", None, labels
        )
        queued = GaugeMetricFamily("moe_serving_queued", "Requests that wait for one", None, labels)
        admitted = CounterMetricFamily("moe_serving_admitted", "Slots given", None, labels)
        refused = CounterMetricFamily(
            "moe_serving_refused", "Requests refused, by reason", None, (*labels, "reason")
        )
        for name, counts in self._admission.counts().items():
            place = (name.model, name.variant)
            running.add_metric(place, counts.running)
            queued.add_metric(place, counts.queued)
            admitted.add_metric(place, counts.admitted)
            for reason, count in counts.refused.items():
                refused.add_metric((*place, reason), count)
        return iter((running, queued, admitted, refused))


def limits_of(settings: GatewaySettings, replicas: Callable[[VariantRoute], int]) -> Limits:
    """This process's share of what the stack may run and queue.

    `replicas` are those that run of a variant now. One that may still grow is given a replica
    more, since Serve's autoscaler has to see who waits; one without any gets one's slots, for
    its requests to be refused or held by `leases`, which knows why there is none.
    """

    def of_variant(route: VariantRoute) -> Limit:
        running = replicas(route)
        slots = route.slots * max(1, running, min(running + 1, route.may_grow_to))
        queued = QUEUED_PER_SLOT * slots if route.max_queued is None else route.max_queued
        return _share(Bounds(running=slots, queued=queued), settings.gateways)

    models = {
        model.id: ModelLimits(
            _share(model.limits, settings.gateways),
            {route.app_name: of_variant(route) for route in model.variants},
        )
        for model in settings.table.models
    }
    return Limits(_share(settings.limits, settings.gateways), models)


def _share(bounds: Bounds, gateways: int) -> Limit:
    def part(count: int | None) -> int | None:
        return None if count is None else math.ceil(count / gateways)

    return Limit(part(bounds.running), part(bounds.queued))
