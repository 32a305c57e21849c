"""A fair queue with limits: how many requests run and wait, whose turn it is, who is refused.

Owns the limits, the order and the counters of both. Every request passes three scopes, the
gateway, its model and its variant (an engine application), and runs only where all three have a
slot free. Plain and synchronous, the clock passed in; leaves waiting to `admission`.

The order is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), in its hierarchical
form: gateway, model, variant, priority, flow. A flow is a tenant's long or short requests of
one priority to one variant; the same tenant's requests to two variants wait independently.

- Each server has a virtual time v. The child served next is the one with the lowest start tag
  max(v, f); v becomes that tag, and the child's finish tag f becomes it plus cost / weight. The
  cost is the request's estimated tokens.
- The priorities of a variant weigh 10 (interactive) to 1 (batch) however many flows each has, so
  a crowd of batch tenants gets no more than one. Flows of one priority weigh the same.
- A variant weighs 10 for each interactive flow that waits and 1 for all its batch, a model as
  its variants together. Those that are full are passed over; as no tag is taken to be below v,
  they claim nothing for that time when they have room again.
- In a priority v also grows by cost / waiting requests, as in WF²Q+ (Bennett and Zhang, 1997).
  By start tags alone, tenants that are always new would overtake a known one for ever.
- Tags count while requests wait; a server whose queue is empty starts anew.

So of what comes after a waiting flow, no more overtakes it within its priority than its tag is
ahead of v, times the most requests that wait; see `_Band`.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from serving.router.request import Priority

Reason = Literal["full", "waited", "displaced"]
"""Why a request was refused: no room to wait, waited too long, or an interactive one took its
place in the queue."""

WEIGHTS: Mapping[Priority, float] = {"interactive": 10.0, "batch": 1.0}
# Estimated tokens, prompt and answer limit together, from which a request is long.
LONG_TOKENS = 8_192
# No request counts for more, or one that asks for 10^18 tokens would put the clocks out for ever.
MOST_TOKENS = 1_048_576

RATE_TIME_CONSTANT_S = 30.0
RETRY_AFTER_UNMEASURED_S = 5.0
LEAST_RETRY_AFTER_S = 1.0
MOST_RETRY_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class Limit:
    """Requests that may run, and that may wait, in one scope; None: not bounded here."""

    running: int | None = None
    queued: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("running", self.running), ("queued", self.queued)):
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; give 0 or more, or None for no bound")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of a model, and of each of its variants by the name of its application."""

    limit: Limit = Limit()
    variants: Mapping[str, Limit] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """All limits of one gateway process. What is not named is not bounded of its own."""

    gateway: Limit = Limit()
    models: Mapping[str, ModelLimits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        models = Counter(name for model in self.models.values() for name in model.variants)
        for name, count in models.items():
            if count > 1:
                raise ValueError(
                    f"variant {name!r} is named by {count} models; an application has one limit, "
                    "so name it under the one model that it serves"
                )


@dataclass(frozen=True, slots=True)
class ScopeName:
    """Whose limits: a variant's, a model's where `variant` is empty, else the gateway's."""

    model: str = ""
    variant: str = ""

    @property
    def kind(self) -> Literal["gateway", "model", "variant"]:
        """The scope in a word."""
        return "variant" if self.variant else "model" if self.model else "gateway"

    def __str__(self) -> str:
        return f"{self.kind} {self.variant or self.model}".rstrip()


class Refused(Exception):
    """A request gets no slot; `scope` is the narrowest one that had no room for it.

    `retry_after_s` is the time in which the scope's waiting requests and one more would finish
    at its measured rate, from `LEAST_RETRY_AFTER_S` to `MOST_RETRY_AFTER_S`;
    `RETRY_AFTER_UNMEASURED_S` where none has finished yet.
    """

    def __init__(self, reason: Reason, retry_after_s: float, scope: ScopeName) -> None:
        super().__init__(f"refused by the {scope}: {reason}; retry after {retry_after_s:.0f} s")
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.scope = scope


@dataclass(frozen=True, slots=True)
class Counts:
    """A scope's requests: those here now, and since its start what became of all."""

    running: int
    queued: int
    admitted: int
    refused: Mapping[Reason, int]
    abandoned: int
    """Left by themselves while they waited."""


class Ticket:
    """One request's place, from its arrival until it leaves."""

    __slots__ = ("cost", "flow", "number", "priority", "refusal", "state", "variant")

    def __init__(
        self, number: int, variant: _Variant, tenant: str, tokens: int, priority: Priority
    ) -> None:
        self.number = number
        self.variant = variant
        self.flow = (tenant, tokens >= LONG_TOKENS)
        self.cost = min(max(tokens, 1), MOST_TOKENS)
        self.priority = priority
        self.state: Literal["waiting", "running", "gone"] = "waiting"
        self.refusal: Refused | None = None


class _DrainRate:
    """Completions per second, exponentially weighted by `RATE_TIME_CONSTANT_S`.

    Only time in which requests run is counted, so a rate outlives idleness, and falls where
    engines hang.
    """

    __slots__ = ("_busy_s", "_completions", "_seen")

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._completions = 0.0
        self._seen = 0.0

    def resume(self, now: float) -> None:
        """The first request of a busy time starts."""
        self._seen = now

    def completed(self, now: float) -> None:
        """A request ends."""
        passed_s = now - self._seen
        self._seen = now
        self._busy_s += passed_s
        self._completions = self._completions * math.exp(-passed_s / RATE_TIME_CONSTANT_S) + 1

    def per_second(self, now: float, busy: bool) -> float | None:
        """The rate; None before the first completion."""
        passed_s = now - self._seen if busy else 0.0
        busy_s = self._busy_s + passed_s
        if not self._completions or busy_s <= 0:
            return None
        # The mean over a window that has not been there for its whole length yet.
        window_s = -RATE_TIME_CONSTANT_S * math.expm1(-busy_s / RATE_TIME_CONSTANT_S)
        return self._completions * math.exp(-passed_s / RATE_TIME_CONSTANT_S) / window_s


class _Server:
    """A virtual time, and the finish tag in the virtual time of the server above."""

    __slots__ = ("finish", "virtual")

    def __init__(self) -> None:
        self.virtual = 0.0
        self.finish = 0.0

    def tag(self, child: _Server) -> float:
        """The start tag of what `child` has served next."""
        return max(self.virtual, child.finish)

    def charge(self, child: _Server, virtual_cost: float) -> None:
        """Serve something of `child`."""
        self.virtual = self.tag(child)
        child.finish = self.virtual + virtual_cost

    def restart(self, children: Iterable[_Server]) -> None:
        """Forget what was served."""
        self.virtual = 0.0
        for child in children:
            child.finish = 0.0


@dataclass(slots=True)
class _Flow:
    entry: tuple[float, int, tuple[str, bool]]
    """Start tag, number of the request that was first then, and key."""
    waiting: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)


class _Band(_Server):
    """The waiting requests of one priority of a variant, by flow.

    A flow's tag is at most its last request's cost ahead of v. Requests that arrive later with
    flows of their own start at v or above, and each one served moves v by its cost / waiting. So
    with W requests waiting at most, newcomers of no more than W times that cost are served first,
    and those that already had a lower tag.
    """

    __slots__ = ("_finishes", "_flows", "_heap", "_sweep_at", "queued")

    def __init__(self) -> None:
        super().__init__()
        self.queued = 0
        self._flows: dict[tuple[str, bool], _Flow] = {}
        self._heap: list[tuple[float, int, tuple[str, bool]]] = []
        self._finishes: dict[tuple[str, bool], float] = {}
        """Of flows that have nothing waiting; those below v say nothing."""
        self._sweep_at = 64

    @property
    def flows(self) -> int:
        """How many flows wait."""
        return len(self._flows)

    def push(self, ticket: Ticket) -> None:
        """Queue a request, at the end of its flow."""
        flow = self._flows.get(ticket.flow)
        if flow is None:
            start = max(self.virtual, self._finishes.pop(ticket.flow, 0.0))
            flow = self._flows[ticket.flow] = _Flow((start, ticket.number, ticket.flow))
            heapq.heappush(self._heap, flow.entry)
        flow.waiting[ticket.number] = ticket
        self.queued += 1

    def first(self) -> Ticket:
        """The request whose turn it is."""
        return next(iter(self._flows[self._heap[0][2]].waiting.values()))

    def pop(self) -> None:
        """Serve `first`."""
        start, _, key = heapq.heappop(self._heap)
        flow = self._flows[key]
        _, ticket = flow.waiting.popitem(last=False)
        self.virtual = max(start, self.virtual + ticket.cost / self.queued)
        finish = start + ticket.cost
        if flow.waiting:
            flow.entry = (finish, next(iter(flow.waiting)), key)
            heapq.heappush(self._heap, flow.entry)
        else:
            del self._flows[key]
            self._remember(key, finish)
        self._one_less()

    def remove(self, ticket: Ticket) -> None:
        """Take a request out that was not served; its flow is not charged for it."""
        flow = self._flows[ticket.flow]
        del flow.waiting[ticket.number]
        if not flow.waiting:
            del self._flows[ticket.flow]
            self._heap.remove(flow.entry)
            heapq.heapify(self._heap)
            self._remember(ticket.flow, flow.entry[0])
        self._one_less()

    def _remember(self, key: tuple[str, bool], finish: float) -> None:
        self._finishes[key] = finish
        if len(self._finishes) > self._sweep_at:
            ahead = {key: tag for key, tag in self._finishes.items() if tag > self.virtual}
            self._finishes = ahead
            self._sweep_at = 64 + 2 * len(ahead)

    def _one_less(self) -> None:
        self.queued -= 1
        if not self.queued:
            self.virtual = 0.0
            self._finishes.clear()


class _Scope(_Server):
    """Limits, counters and drain rate of one scope."""

    __slots__ = (
        "abandoned",
        "admitted",
        "batch",
        "limit",
        "name",
        "named",
        "queued",
        "rate",
        "refused",
        "running",
    )

    def __init__(self, name: ScopeName) -> None:
        super().__init__()
        self.name = name
        self.limit = Limit()
        self.named = False
        """Whether the limits name it; one that they do not is forgotten when it is empty."""
        self.running = 0
        self.queued = 0
        self.admitted = 0
        self.refused: Counter[Reason] = Counter()
        self.abandoned = 0
        self.rate = _DrainRate()
        self.batch: dict[int, Ticket] = {}
        """Waiting batch requests, in the order of their arrival."""

    @property
    def has_slot(self) -> bool:
        """Whether one more may run."""
        return self.limit.running is None or self.running < self.limit.running

    @property
    def is_full(self) -> bool:
        """Whether no more may wait."""
        return self.limit.queued is not None and self.queued >= self.limit.queued

    @property
    def disposable(self) -> bool:
        """Whether nothing is lost by forgetting it."""
        return not (self.named or self.running or self.queued)

    def retry_after_s(self, now: float) -> float:
        """When one more request might have been served."""
        rate = self.rate.per_second(now, self.running > 0)
        if rate is None:
            return RETRY_AFTER_UNMEASURED_S
        wait_s = (self.queued + 1) / rate if rate else math.inf
        return min(max(wait_s, LEAST_RETRY_AFTER_S), MOST_RETRY_AFTER_S)

    def counts(self) -> Counts:
        """What is to be read from outside."""
        return Counts(self.running, self.queued, self.admitted, dict(self.refused), self.abandoned)


class _Gateway(_Scope):
    __slots__ = ("models",)

    def __init__(self) -> None:
        super().__init__(ScopeName())
        self.models: dict[str, _Model] = {}


class _Model(_Scope):
    __slots__ = ("variants",)

    def __init__(self, name: str) -> None:
        super().__init__(ScopeName(name))
        self.variants: dict[str, _Variant] = {}


class _Variant(_Scope):
    __slots__ = ("bands", "path")

    def __init__(self, name: str, model: _Model, gateway: _Gateway) -> None:
        super().__init__(ScopeName(model.name.model, name))
        # In this order, since the first of equals is served first.
        self.bands: dict[Priority, _Band] = {"interactive": _Band(), "batch": _Band()}
        self.path: tuple[_Variant, _Model, _Gateway] = (self, model, gateway)

    def weight(self) -> float:
        """Its share of its model, by what waits."""
        return WEIGHTS["interactive"] * self.bands["interactive"].flows + (
            WEIGHTS["batch"] if self.bands["batch"].queued else 0.0
        )


class FairQueue:
    """The running and waiting requests of one gateway process.

    `now` is a monotonic time in seconds. `tell` is called for a waiting request that another
    event made run, or refused; it must not call back. No method leaves a request waiting that
    could run.
    """

    def __init__(self, limits: Limits, tell: Callable[[Ticket], None]) -> None:
        self._gateway = _Gateway()
        self._tell = tell
        self._arrivals = 0
        self.set_limits(limits, 0.0)

    def set_limits(self, limits: Limits, now: float) -> None:
        """Take these limits, and start what may run by them; no request is interrupted.

        A model or variant that they no longer name keeps its last limits for the requests it
        has, and is forgotten with the last of them.
        """
        self._gateway.limit, self._gateway.named = limits.gateway, True
        for model in self._gateway.models.values():
            model.named = False
            for variant in model.variants.values():
                variant.named = False
        for name, of_model in limits.models.items():
            model = self._model(name)
            model.limit, model.named = of_model.limit, True
            for variant_name, limit in of_model.variants.items():
                variant = self._variant(name, variant_name)
                variant.limit, variant.named = limit, True
        for model in list(self._gateway.models.values()):
            for variant in list(model.variants.values()):
                self._forget(variant)
            if model.disposable and not model.variants:
                self._gateway.models.pop(model.name.model, None)
        self._serve(now)

    def arrive(
        self,
        model: str,
        variant: str,
        *,
        tokens: int,
        now: float,
        tenant: str = "",
        priority: Priority = "interactive",
    ) -> Ticket:
        """A request's ticket: `running`, or `waiting` until `tell` is called for it.

        `tokens` is the estimated prompt and the answer's limit. Raises Refused where it can
        neither run nor wait.
        """
        scope = self._variant(model, variant)
        self._arrivals += 1
        ticket = Ticket(self._arrivals, scope, tenant, tokens, priority)
        of_variant, of_model, gateway = scope.path
        # Nobody waits who could run, so it passes nobody.
        if of_variant.has_slot and of_model.has_slot and gateway.has_slot:
            self._start(ticket, now)
        else:
            self._enqueue(ticket, now)
        return ticket

    def leave(self, ticket: Ticket, now: float) -> None:
        """Give back whatever the request has, its slot or its place; the second time, nothing."""
        if ticket.state == "gone":
            return
        if ticket.state == "waiting":
            self._withdraw(ticket)
            for scope in ticket.variant.path:
                scope.abandoned += 1
        else:
            ticket.state = "gone"
            for scope in ticket.variant.path:
                scope.running -= 1
                scope.rate.completed(now)
            if self._gateway.queued:
                self._serve(now)
        self._forget(ticket.variant)

    def expire(self, ticket: Ticket, now: float) -> None:
        """Refuse a request that has waited too long; one that does not wait is left alone."""
        if ticket.state == "waiting":
            path = ticket.variant.path
            scope = next(scope for scope in path if not scope.has_slot)
            self._withdraw(ticket)
            self._refuse(ticket, "waited", scope, now)
            self._forget(ticket.variant)

    def counts(self) -> dict[ScopeName, Counts]:
        """Every scope's counters. A request counts in all three of its scopes."""
        scopes: list[_Scope] = [self._gateway]
        for model in self._gateway.models.values():
            scopes += [model, *model.variants.values()]
        return {scope.name: scope.counts() for scope in scopes}

    def _model(self, name: str) -> _Model:
        model = self._gateway.models.get(name)
        if model is None:
            model = self._gateway.models[name] = _Model(name)
        return model

    def _variant(self, model_name: str, name: str) -> _Variant:
        model = self._model(model_name)
        variant = model.variants.get(name)
        if variant is None:
            variant = model.variants[name] = _Variant(name, model, self._gateway)
        return variant

    def _forget(self, variant: _Variant) -> None:
        if variant.disposable:
            _, model, gateway = variant.path
            model.variants.pop(variant.name.variant, None)
            if model.disposable and not model.variants:
                gateway.models.pop(model.name.model, None)

    def _start(self, ticket: Ticket, now: float) -> None:
        ticket.state = "running"
        for scope in ticket.variant.path:
            if not scope.running:
                scope.rate.resume(now)
            scope.running += 1
            scope.admitted += 1

    def _enqueue(self, ticket: Ticket, now: float) -> None:
        full = [scope for scope in ticket.variant.path if scope.is_full]
        displaced: Ticket | None = None
        if full:
            # A place in the narrowest of them is one in the wider ones as well, enough but
            # where a limit was lowered below what waits.
            enough = all(scope.queued == scope.limit.queued for scope in full)
            if ticket.priority == "batch" or not full[0].batch or not enough:
                self._forget(ticket.variant)
                raise self._refuse(ticket, "full", full[0], now)
            displaced = next(reversed(full[0].batch.values()))
            self._withdraw(displaced)
        ticket.variant.bands[ticket.priority].push(ticket)
        for scope in ticket.variant.path:
            scope.queued += 1
            if ticket.priority == "batch":
                scope.batch[ticket.number] = ticket
        if displaced is not None:
            self._refuse(displaced, "displaced", full[0], now)
            self._forget(displaced.variant)
            self._tell(displaced)

    def _withdraw(self, ticket: Ticket) -> None:
        ticket.state = "gone"
        ticket.variant.bands[ticket.priority].remove(ticket)
        self._unqueue(ticket)

    def _unqueue(self, ticket: Ticket) -> None:
        variant, model, gateway = ticket.variant.path
        for scope in ticket.variant.path:
            scope.queued -= 1
            scope.batch.pop(ticket.number, None)
        if not variant.queued:
            variant.restart(variant.bands.values())
        if not model.queued:
            model.restart(model.variants.values())
        if not gateway.queued:
            gateway.restart(gateway.models.values())

    def _refuse(self, ticket: Ticket, reason: Reason, scope: _Scope, now: float) -> Refused:
        ticket.state = "gone"
        ticket.refusal = Refused(reason, scope.retry_after_s(now), scope.name)
        for each in ticket.variant.path:
            each.refused[reason] += 1
        return ticket.refusal

    def _serve(self, now: float) -> None:
        """Start waiting requests until none can run."""
        gateway = self._gateway
        while able := self._able():
            model = min(able, key=gateway.tag)
            variant = min(able[model], key=model.tag)
            band = min((band for band in variant.bands.values() if band.queued), key=variant.tag)
            ticket = band.first()
            weight = sum(variant.weight() for variant in able[model])
            gateway.charge(model, ticket.cost / weight)
            model.charge(variant, ticket.cost / variant.weight())
            variant.charge(band, ticket.cost / WEIGHTS[ticket.priority])
            band.pop()
            self._unqueue(ticket)
            self._start(ticket, now)
            self._tell(ticket)

    def _able(self) -> dict[_Model, list[_Variant]]:
        """The variants that have a request waiting which may run, by model."""
        able: dict[_Model, list[_Variant]] = {}
        if self._gateway.queued and self._gateway.has_slot:
            for model in self._gateway.models.values():
                if model.queued and model.has_slot:
                    for variant in model.variants.values():
                        if variant.queued and variant.has_slot:
                            able.setdefault(model, []).append(variant)
        return able
