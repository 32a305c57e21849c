"""Limits in three scopes, a fair order, refusals, and slots that always come back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.gateway.fair_queue import (
    LEAST_RETRY_AFTER_S,
    LONG_TOKENS,
    MOST_RETRY_AFTER_S,
    RATE_TIME_CONSTANT_S,
    RETRY_AFTER_UNMEASURED_S,
    Counts,
    FairQueue,
    Limit,
    Limits,
    ModelLimits,
    Refused,
    ScopeName,
    Ticket,
)
from serving.router.request import Priority

GATEWAY, MODEL, PLAIN, MTP = (
    ScopeName(),
    ScopeName("m"),
    ScopeName("m", "plain"),
    ScopeName("m", "mtp"),
)


def limits(
    gateway: Limit | None = None,
    model: Limit | None = None,
    plain: Limit | None = None,
    mtp: Limit | None = None,
) -> Limits:
    """Of one model with two variants."""
    none = Limit()
    of_model = ModelLimits(model or none, {"plain": plain or none, "mtp": mtp or none})
    return Limits(gateway or none, {"m": of_model})


class Queue:
    """A fair queue with its clock, and what it told."""

    def __init__(self, given_limits: Limits) -> None:
        self.now = 100.0
        self.told: list[Ticket] = []
        self.core = FairQueue(given_limits, self.told.append)

    def arrive(
        self,
        tenant: str = "",
        priority: Priority = "interactive",
        tokens: int = 100,
        variant: str = "plain",
        model: str = "m",
    ) -> Ticket:
        return self.core.arrive(
            model, variant, tokens=tokens, now=self.now, tenant=tenant, priority=priority
        )

    def refusal(self, tenant: str = "", priority: Priority = "interactive") -> Refused:
        with pytest.raises(Refused) as caught:
            self.arrive(tenant, priority)
        return caught.value

    def leave(self, ticket: Ticket) -> None:
        self.core.leave(ticket, self.now)

    def limit(self, given_limits: Limits) -> None:
        self.core.set_limits(given_limits, self.now)

    def counts(self, scope: ScopeName = GATEWAY) -> Counts:
        return self.core.counts()[scope]

    def served(self, running: Ticket) -> Iterator[Ticket]:
        """With one slot: whose turn it is, one after another, each running until the next."""
        while True:
            self.told.clear()
            self.leave(running)
            if not self.told:
                return
            (running,) = self.told
            yield running


def one_slot() -> tuple[Queue, Ticket]:
    """A queue whose one slot is taken."""
    queue = Queue(limits(plain=Limit(running=1)))
    return queue, queue.arrive("first")


def test_a_request_with_a_slot_free_runs_at_once() -> None:
    queue = Queue(limits(plain=Limit(running=1)))
    assert queue.arrive().state == "running"
    assert queue.told == []
    for scope in (GATEWAY, MODEL, PLAIN):
        assert queue.counts(scope) == Counts(1, 0, 1, {}, 0)
    assert queue.counts(MTP).running == 0


@pytest.mark.parametrize("scope", ["gateway", "model", "plain"])
def test_each_scope_bounds_what_runs_and_what_waits(scope: str) -> None:
    queue = Queue(limits(**{scope: Limit(running=2, queued=1)}))
    states = [queue.arrive().state for _ in range(3)]
    assert states == ["running", "running", "waiting"]
    refusal = queue.refusal()
    name = {"gateway": GATEWAY, "model": MODEL, "plain": PLAIN}[scope]
    assert (refusal.reason, refusal.scope) == ("full", name)
    assert queue.counts() == Counts(2, 1, 2, {"full": 1}, 0)


def test_the_refusal_names_the_narrowest_full_scope() -> None:
    queue = Queue(limits(gateway=Limit(1, 0), model=Limit(queued=0)))
    queue.arrive()
    refusal = queue.refusal()
    assert refusal.scope == MODEL
    assert "model m" in str(refusal) and "full" in str(refusal)


def test_without_limits_everything_runs() -> None:
    queue = Queue(Limits())
    assert {queue.arrive().state for _ in range(500)} == {"running"}


def test_a_released_slot_goes_to_the_waiting() -> None:
    queue, running = one_slot()
    waiting = queue.arrive()
    queue.leave(running)
    assert queue.told == [waiting]
    assert waiting.state == "running"
    assert (queue.counts().running, queue.counts().queued) == (1, 0)


def test_a_slot_is_released_once_however_often_it_is_given_back() -> None:
    queue = Queue(limits(plain=Limit(running=2)))
    first, _ = queue.arrive(), queue.arrive()
    for _ in range(3):
        queue.leave(first)
    assert queue.counts().running == 1


def test_who_leaves_while_waiting_takes_no_slot() -> None:
    queue, running = one_slot()
    left, stays = queue.arrive(), queue.arrive()
    queue.leave(left)
    queue.leave(left)
    queue.leave(running)
    assert (left.state, stays.state) == ("gone", "running")
    assert queue.counts() == Counts(1, 0, 2, {}, 1)


def test_a_request_that_waited_too_long_is_refused_by_the_scope_that_held_it() -> None:
    queue = Queue(limits(gateway=Limit(running=9), model=Limit(running=1)))
    running, waiting = queue.arrive(), queue.arrive()
    queue.core.expire(waiting, queue.now)
    assert waiting.refusal is not None
    assert (waiting.refusal.reason, waiting.refusal.scope) == ("waited", MODEL)
    queue.leave(running)
    assert queue.counts() == Counts(0, 0, 1, {"waited": 1}, 0)


def test_a_running_request_does_not_expire() -> None:
    queue, running = one_slot()
    queue.core.expire(running, queue.now)
    assert (running.state, running.refusal, queue.counts().running) == ("running", None, 1)


def test_a_flow_is_served_in_its_own_order() -> None:
    queue, running = one_slot()
    waiting = [queue.arrive("a", tokens=size) for size in (900, 20, 300, 5)]
    assert list(queue.served(running)) == waiting


def test_a_tenant_with_many_requests_does_not_delay_one_with_few() -> None:
    queue, running = one_slot()
    many = [queue.arrive("many") for _ in range(20)]
    few = [queue.arrive("few") for _ in range(2)]
    assert list(islice(queue.served(running), 4)) == [many[0], few[0], many[1], few[1]]


def test_tenants_get_the_same_tokens_and_not_the_same_requests() -> None:
    queue, running = one_slot()
    for _ in range(50):
        queue.arrive("small", tokens=100)
        queue.arrive("large", tokens=400)
    served = Counter(ticket.flow[0] for ticket in islice(queue.served(running), 50))
    assert served == {"small": 40, "large": 10}


def test_a_tenant_that_sends_one_request_at_a_time_pays_for_the_last_one() -> None:
    queue, running = one_slot()
    tokens = {"small": 100, "medium": 200, "large": 400}
    for tenant, size in tokens.items():
        queue.arrive(tenant, tokens=size)
    served = Counter[str]()
    for ticket in islice(queue.served(running), 700):
        tenant = ticket.flow[0]
        served[tenant] += tokens[tenant]
        queue.arrive(tenant, tokens=tokens[tenant])
    # 28,000 each by start tags alone; v that grows by itself forgives a part of the last one.
    assert served["large"] < 1.3 * served["small"]


def test_long_and_short_requests_of_a_tenant_do_not_wait_for_each_other() -> None:
    queue, running = one_slot()
    longs = [queue.arrive("a", tokens=LONG_TOKENS) for _ in range(3)]
    shorts = [queue.arrive("a", tokens=LONG_TOKENS - 1) for _ in range(3)]
    first = list(islice(queue.served(running), 2))
    assert first == [longs[0], shorts[0]]


def test_interactive_gets_ten_tokens_for_each_of_batch() -> None:
    queue, running = one_slot()
    for _ in range(220):
        queue.arrive("a")
        queue.arrive("a", "batch")
    served = Counter(ticket.priority for ticket in islice(queue.served(running), 220))
    assert served == {"interactive": 200, "batch": 20}


def test_a_crowd_of_batch_tenants_gets_no_more_than_one() -> None:
    queue, running = one_slot()
    for each in range(100):
        queue.arrive(f"b{each}", "batch")
    for _ in range(100):
        queue.arrive("a")
    served = Counter(ticket.priority for ticket in islice(queue.served(running), 55))
    assert served == {"interactive": 50, "batch": 5}


def test_batch_runs_at_once_where_nothing_else_waits() -> None:
    queue, running = one_slot()
    batch = queue.arrive("a", "batch")
    queue.leave(running)
    assert batch.state == "running"


def test_what_was_served_before_the_queue_was_empty_does_not_count() -> None:
    queue, running = one_slot()
    large = queue.arrive("a", "batch", tokens=1_000_000)
    queue.leave(running)
    interactive = [queue.arrive("a") for _ in range(3)]
    batch = queue.arrive("a", "batch")
    assert list(queue.served(large)) == [interactive[0], batch, *interactive[1:]]


def test_a_request_that_was_not_served_costs_its_flow_nothing() -> None:
    queue, running = one_slot()
    left = [queue.arrive("a", tokens=5_000) for _ in range(10)]
    b = [queue.arrive("b") for _ in range(3)]
    for ticket in left:
        queue.leave(ticket)
    a = [queue.arrive("a") for _ in range(3)]
    order = [ticket.flow[0] for ticket in queue.served(running)]
    assert {ticket.state for ticket in left} == {"gone"}
    assert order == ["b", "a"] * 3
    assert {ticket.state for ticket in a + b} == {"gone"}


def test_a_tenant_is_not_overtaken_for_ever_by_tenants_that_are_always_new() -> None:
    queue, running = one_slot()
    known = [queue.arrive("known") for _ in range(5)]
    new = count()
    for _ in range(10):
        queue.arrive(f"new{next(new)}")
    waits = Counter[Ticket]()
    for served in islice(queue.served(running), 300):
        queue.arrive(f"new{next(new)}")
        for ticket in known:
            if ticket.state == "waiting":
                waits[ticket] += 1
        if served is known[-1]:
            break
    # Ten to fifteen wait, so each of the five waits for about as many.
    assert known[-1].state == "running"
    assert waits[known[-1]] <= 5 * 2 * 15


def test_tenants_that_went_away_are_forgotten_while_others_wait() -> None:
    queue, running = one_slot()
    for each in range(10):
        queue.arrive(f"t{each}")
    new = count(10)
    for _ in islice(queue.served(running), 3_000):
        queue.arrive(f"t{next(new)}")
    band = queue.core._variant("m", "plain").bands["interactive"]
    assert queue.counts().queued == 10
    assert len(band._finishes) < 300


def test_one_enormous_request_does_not_put_newcomers_behind_for_ever() -> None:
    queue, running = one_slot()
    queue.arrive("huge", tokens=10**18)
    queue.arrive("old")
    turns = queue.served(running)
    assert next(turns).flow[0] == "huge"
    for _ in range(40_000):
        queue.arrive("old")
    new = queue.arrive("new")
    assert any(ticket is new for ticket in islice(turns, 30_000))


def test_a_full_variant_does_not_hold_up_another_one() -> None:
    queue = Queue(limits(gateway=Limit(running=2), plain=Limit(running=1)))
    queue.arrive(variant="plain")
    mtp = queue.arrive(variant="mtp")
    blocked = [queue.arrive(variant="plain") for _ in range(3)]
    behind = queue.arrive(variant="mtp")
    queue.leave(mtp)
    assert queue.told == [behind]
    assert {ticket.state for ticket in blocked} == {"waiting"}


@pytest.mark.parametrize("shared", ["model", "gateway"])
def test_flows_share_a_scope_alike_whatever_their_variant(shared: str) -> None:
    queue = Queue(limits(**{shared: Limit(running=1)}))
    running = queue.arrive("first")
    for _ in range(40):
        for tenant in ("a", "b", "c"):
            queue.arrive(tenant, variant="plain")
        queue.arrive("d", variant="mtp")
    served = Counter(ticket.flow[0] for ticket in islice(queue.served(running), 80))
    assert served == {"a": 20, "b": 20, "c": 20, "d": 20}


def test_flows_share_the_gateway_alike_whatever_their_model() -> None:
    queue = Queue(limits(gateway=Limit(running=1)))
    running = queue.arrive("first")
    for _ in range(40):
        for tenant in ("a", "b", "c"):
            queue.arrive(tenant)
        queue.arrive("d", model="n")
    served = Counter(ticket.flow[0] for ticket in islice(queue.served(running), 80))
    assert served == {"a": 20, "b": 20, "c": 20, "d": 20}


def test_a_crowd_of_batch_in_one_variant_yields_to_interactive_in_another() -> None:
    queue = Queue(limits(model=Limit(running=1)))
    running = queue.arrive("first")
    for each in range(100):
        queue.arrive(f"b{each}", "batch", variant="plain")
    for _ in range(100):
        queue.arrive("a", variant="mtp")
    served = Counter(ticket.priority for ticket in islice(queue.served(running), 55))
    assert served == {"interactive": 50, "batch": 5}


def test_a_variant_that_was_full_claims_nothing_for_that_time() -> None:
    narrow = limits(model=Limit(running=2), mtp=Limit(running=1))
    queue = Queue(narrow)
    stuck = queue.arrive("m", variant="mtp")
    running = queue.arrive("p")
    for _ in range(300):
        queue.arrive("p")
        queue.arrive("m", variant="mtp")
    turns = queue.served(running)
    assert {ticket.flow[0] for ticket in islice(turns, 100)} == {"p"}
    # From now on both may run, in one slot.
    queue.limit(replace(narrow, models={"m": ModelLimits(Limit(running=2))}))
    queue.limit(limits(model=Limit(running=2)))
    served = Counter(ticket.flow[0] for ticket in islice(turns, 40))
    assert served == {"p": 20, "m": 20}
    assert stuck.state == "running"


def test_interactive_takes_the_place_of_the_newest_batch() -> None:
    queue = Queue(limits(plain=Limit(1, 3)))
    queue.arrive()
    oldest, newest = queue.arrive("x", "batch"), queue.arrive("y", "batch")
    queue.arrive("a")
    arrived = queue.arrive("a")
    assert queue.told == [newest]
    assert newest.refusal is not None
    assert (newest.refusal.reason, newest.refusal.scope) == ("displaced", PLAIN)
    assert (oldest.state, arrived.state, queue.counts().queued) == ("waiting", "waiting", 3)
    assert queue.counts().refused == {"displaced": 1}


def test_batch_and_a_full_queue_of_interactive_displace_nobody() -> None:
    queue = Queue(limits(plain=Limit(1, 1)))
    running = queue.arrive()
    batch = queue.arrive("", "batch")
    assert queue.refusal("", "batch").reason == "full"
    queue.leave(batch)
    waiting = queue.arrive()
    assert queue.refusal().reason == "full"
    assert (running.state, waiting.state, queue.told) == ("running", "waiting", [])


@pytest.mark.parametrize("shared", ["model", "gateway"])
def test_a_full_shared_queue_gives_up_batch_of_another_variant(shared: str) -> None:
    queue = Queue(limits(**{shared: Limit(1, 2), "mtp": Limit(queued=2)}))
    queue.arrive()
    queue.arrive("x", variant="plain")
    batch = queue.arrive("x", "batch", variant="mtp")
    arrived = queue.arrive("y", variant="plain")
    assert (queue.told, arrived.state) == ([batch], "waiting")
    assert (queue.counts(PLAIN).queued, queue.counts(MTP).queued) == (2, 0)


def test_one_place_makes_room_in_every_scope_that_is_full() -> None:
    queue = Queue(limits(gateway=Limit(1, 2), model=Limit(1, 2), plain=Limit(1, 1)))
    queue.arrive()
    elsewhere = queue.arrive("x", "batch", variant="mtp")
    here = queue.arrive("x", "batch", variant="plain")
    queue.arrive("y", variant="plain")
    assert queue.told == [here]
    assert (elsewhere.state, queue.counts().queued) == ("waiting", 2)


def test_nobody_is_displaced_in_vain() -> None:
    wide = limits(plain=Limit(1, 4))
    queue = Queue(wide)
    queue.arrive()
    batch = [queue.arrive("x", "batch") for _ in range(3)]
    queue.limit(limits(plain=Limit(1, 1)))
    assert queue.refusal().reason == "full"
    assert {ticket.state for ticket in batch} == {"waiting"}


def test_a_raised_limit_starts_the_waiting() -> None:
    queue = Queue(limits(plain=Limit(running=0)))
    waiting = [queue.arrive() for _ in range(4)]
    assert queue.counts().running == 0
    queue.limit(limits(plain=Limit(running=3)))
    assert queue.told == waiting[:3]


def test_a_lowered_limit_interrupts_nobody() -> None:
    queue = Queue(limits(plain=Limit(4, 4)))
    tickets = [queue.arrive() for _ in range(8)]
    queue.limit(limits(plain=Limit(2, 1)))
    assert (queue.counts().running, queue.counts().queued, queue.told) == (4, 4, [])
    assert queue.refusal().reason == "full"
    for ticket in tickets[:2]:
        queue.leave(ticket)
    assert (queue.counts().running, queue.told) == (2, [])
    queue.leave(tickets[2])
    assert queue.told == [tickets[4]]


def test_a_variant_that_disappears_is_forgotten_with_its_last_request() -> None:
    queue = Queue(limits(plain=Limit(running=1)))
    running, waiting = queue.arrive(), queue.arrive()
    queue.limit(Limits())
    assert set(queue.core.counts()) == {GATEWAY, MODEL, PLAIN}
    assert waiting.state == "waiting"
    queue.leave(running)
    assert queue.told == [waiting]
    queue.leave(waiting)
    assert set(queue.core.counts()) == {GATEWAY}


def test_a_variant_that_comes_back_is_the_same() -> None:
    queue = Queue(limits(plain=Limit(running=1)))
    first = queue.arrive()
    queue.limit(Limits())
    queue.limit(limits(plain=Limit(running=2)))
    queue.leave(first)
    queue.leave(first)
    assert queue.counts(PLAIN) == Counts(0, 0, 1, {}, 0)


def test_a_ticket_of_a_forgotten_variant_does_not_touch_its_successor() -> None:
    queue = Queue(Limits())
    old = queue.arrive()
    queue.leave(old)
    new = queue.arrive()
    queue.leave(old)
    assert (new.state, queue.counts(PLAIN).running) == ("running", 1)


@pytest.mark.parametrize("how", ["leave", "expire", "refuse", "displace"])
def test_what_the_limits_do_not_name_leaves_no_trace(how: str) -> None:
    queue = Queue(Limits(gateway=Limit(1, 1), models={}))
    running = queue.arrive(model="named", variant="v")
    if how == "refuse":
        queue.arrive(model="named", variant="v")
        with pytest.raises(Refused):
            queue.arrive(model="other")
    else:
        waiting = queue.arrive("", "batch", model="other")
        if how == "leave":
            queue.leave(waiting)
        elif how == "expire":
            queue.core.expire(waiting, queue.now)
        else:
            queue.arrive(model="named", variant="v")
    queue.leave(running)
    assert ScopeName("other") not in queue.core.counts()
    assert ScopeName("other", "plain") not in queue.core.counts()


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="queued is -1; give 0 or more, or None"):
        Limit(1, -1)


def test_a_variant_of_two_models_is_refused() -> None:
    of_model = ModelLimits(variants={"app": Limit(1)})
    with pytest.raises(ValueError, match="variant 'app' is named by 2 models"):
        Limits(models={"a": of_model, "b": of_model})


def test_retry_after_is_the_waiting_and_one_over_the_measured_rate() -> None:
    queue = Queue(limits(plain=Limit(1, 3)))
    running = queue.arrive()
    for _ in range(300):
        queue.now += 2.0
        queue.leave(running)
        running = queue.arrive()
    for _ in range(3):
        queue.arrive()
    # One in two seconds, counted right after one.
    assert queue.refusal().retry_after_s == pytest.approx(4 * 2.0, rel=0.05)


def test_retry_after_is_right_from_the_first_completion_on() -> None:
    queue = Queue(limits(plain=Limit(1, 0)))
    running = queue.arrive()
    queue.now += 3.0
    queue.leave(running)
    queue.arrive()
    assert queue.refusal().retry_after_s == pytest.approx(3.0, rel=0.06)


def test_retry_after_without_a_completion_is_a_fixed_one() -> None:
    queue = Queue(limits(plain=Limit(1, 0)))
    queue.arrive()
    queue.now += 1_000.0
    assert queue.refusal().retry_after_s == RETRY_AFTER_UNMEASURED_S


def test_retry_after_has_bounds() -> None:
    queue = Queue(limits(plain=Limit(1, 0)))
    for _ in range(1_000):
        queue.leave(queue.arrive())
        queue.now += 0.001
    running = queue.arrive()
    queue.now += 0.001
    queue.leave(running)
    queue.arrive()
    assert queue.refusal().retry_after_s == LEAST_RETRY_AFTER_S
    queue.now += 1_000 * RATE_TIME_CONSTANT_S
    assert queue.refusal().retry_after_s == MOST_RETRY_AFTER_S


def test_the_rate_outlives_idleness_and_falls_where_nothing_finishes() -> None:
    queue = Queue(limits(plain=Limit(1, 0)))
    for _ in range(100):
        running = queue.arrive()
        queue.now += 2.0
        queue.leave(running)
        queue.now += 50.0
        queue.limit(limits(plain=Limit(0, 0)))
        without_a_slot = queue.refusal().retry_after_s
        queue.limit(limits(plain=Limit(1, 0)))
    queue.arrive()
    before = queue.refusal().retry_after_s
    assert without_a_slot == before
    queue.now += RATE_TIME_CONSTANT_S
    after = queue.refusal().retry_after_s
    assert before == pytest.approx(2.0, rel=0.05)
    assert after == pytest.approx(before * math.e, rel=0.05)


MODELS = {"one": ("a", "b"), "two": ("c", "d")}
VARIANTS = [(model, variant) for model, names in MODELS.items() for variant in names]
some_limit = st.builds(
    Limit, st.none() | st.integers(0, 4), st.none() | st.integers(0, 4)
) | st.just(Limit(1, 3))


@st.composite
def some_limits(draw: st.DrawFn) -> Limits:
    """Of two models with two variants each, any of which may be missing."""
    models = {}
    for model, names in MODELS.items():
        if draw(st.integers(0, 4)):
            named = [name for name in names if draw(st.integers(0, 4))]
            models[model] = ModelLimits(
                draw(some_limit), {name: draw(some_limit) for name in named}
            )
    return Limits(draw(some_limit), models)


def scopes_of(ticket: Ticket) -> tuple[ScopeName, ScopeName, ScopeName]:
    name = ticket.variant.name
    return (name, ScopeName(name.model), GATEWAY)


class Interleavings(RuleBasedStateMachine):
    """Any order of events, against a model that only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.here: list[Ticket] = []
        """Those that wait or run."""
        self.gone: list[Ticket] = []
        self.limits: dict[ScopeName, Limit] = {}
        self.ceiling: dict[ScopeName, float] = {}
        self.queue = FairQueue(Limits(Limit(2, 3)), self.tell)
        self.limits[GATEWAY] = Limit(2, 3)

    def tell(self, ticket: Ticket) -> None:
        assert ticket in self.here
        if ticket.state == "running":
            self.check_turn(ticket)
        else:
            assert ticket.refusal is not None and ticket.refusal.reason == "displaced"
            assert ticket.priority == "batch"
            self.here.remove(ticket)
            self.gone.append(ticket)

    def check_turn(self, ticket: Ticket) -> None:
        """No older one of its flow waits, and no limit is passed."""
        for other in self.here:
            if (other.variant, other.flow, other.priority) == (
                ticket.variant,
                ticket.flow,
                ticket.priority,
            ):
                assert other.state != "waiting" or other.number > ticket.number
        for scope in scopes_of(ticket):
            limit = self.limits.get(scope, Limit())
            counts = self.queue.counts()[scope]
            assert limit.running is None or counts.running <= limit.running

    def leave(self, ticket: Ticket) -> None:
        self.here.remove(ticket)
        self.gone.append(ticket)
        self.queue.leave(ticket, self.now)
        assert ticket.state == "gone"

    @rule(
        where=st.sampled_from(VARIANTS),
        tenant=st.sampled_from("xyz"),
        priority=st.sampled_from(["interactive", "batch"]),
        tokens=st.sampled_from([0, 1, 10, 300, LONG_TOKENS, 10**9]),
        times=st.integers(1, 3),
    )
    def arrive(
        self, where: tuple[str, str], tenant: str, priority: Priority, tokens: int, times: int
    ) -> None:
        for _ in range(times):
            before = self.queue.counts()
            path = (ScopeName(*where), ScopeName(where[0]), GATEWAY)
            try:
                ticket = self.queue.arrive(
                    *where, tokens=tokens, now=self.now, tenant=tenant, priority=priority
                )
            except Refused as refusal:
                assert refusal.reason == "full"
                assert LEAST_RETRY_AFTER_S <= refusal.retry_after_s <= MOST_RETRY_AFTER_S
                queued = before[refusal.scope].queued
                assert refusal.scope in path
                assert queued >= (self.limits[refusal.scope].queued or 0)
                continue
            self.here.append(ticket)
            if ticket.state == "running":
                self.check_turn(ticket)
            else:
                after = self.queue.counts()
                for scope in path:
                    bound = self.limits.get(scope, Limit()).queued
                    assert bound is None or after[scope].queued <= bound

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def finish_or_disconnect(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.here)))

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def give_back_again(self, data: st.DataObject) -> None:
        before = self.queue.counts()
        ticket = data.draw(st.sampled_from(self.gone))
        self.queue.leave(ticket, self.now)
        self.queue.expire(ticket, self.now)
        assert self.queue.counts() == before

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.here))
        waited = ticket.state == "waiting"
        self.queue.expire(ticket, self.now)
        if waited:
            assert ticket.refusal is not None and ticket.refusal.reason == "waited"
            self.here.remove(ticket)
            self.gone.append(ticket)
        else:
            assert ticket.state == "running"

    @rule(seconds=st.floats(0, 100))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(new=some_limits())
    def change_limits(self, new: Limits) -> None:
        self.take(new)

    @rule(where=st.sampled_from(VARIANTS), left=st.integers(0, 1))
    def a_replica_dies(self, where: tuple[str, str], left: int) -> None:
        """Its variant's limit falls, and then all that ran there fail."""
        self.take(
            Limits(
                self.limits[GATEWAY],
                {where[0]: ModelLimits(Limit(), {where[1]: Limit(left, 2)})},
            )
        )
        for ticket in list(self.here):
            if ticket.variant.name == ScopeName(*where) and ticket.state == "running":
                self.leave(ticket)

    def take(self, new: Limits) -> None:
        for scope, counts in self.queue.counts().items():
            self.ceiling[scope] = counts.running
        self.limits[GATEWAY] = new.gateway
        for model, of_model in new.models.items():
            self.limits[ScopeName(model)] = of_model.limit
            for variant, limit in of_model.variants.items():
                self.limits[ScopeName(model, variant)] = limit
        named = {GATEWAY}
        for model, of_model in new.models.items():
            named |= {ScopeName(model)} | {ScopeName(model, each) for each in of_model.variants}
        before = set(self.queue.counts())
        for scope in before - named:
            used = self.queue.counts()[scope]
            if not used.running and not used.queued:
                self.limits.pop(scope, None)
        self.queue.set_limits(new, self.now)

    @invariant()
    def forgotten_scopes_have_no_limits(self) -> None:
        for scope in self.limits.keys() - self.queue.counts().keys():
            del self.limits[scope]

    @invariant()
    def counters_are_right(self) -> None:
        running = Counter[ScopeName]()
        queued = Counter[ScopeName]()
        for ticket in self.here:
            for scope in scopes_of(ticket):
                (running if ticket.state == "running" else queued)[scope] += 1
        for scope, counts in self.queue.counts().items():
            assert (counts.running, counts.queued) == (running[scope], queued[scope])
            assert counts.admitted >= counts.running
        assert running.keys() | queued.keys() <= self.queue.counts().keys()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        total = self.queue.counts()[GATEWAY]
        outcomes = total.admitted + total.abandoned + sum(total.refused.values())
        assert outcomes + total.queued == self.queue._arrivals

    @invariant()
    def limits_hold_but_for_those_that_ran_when_they_were_lowered(self) -> None:
        for scope, counts in self.queue.counts().items():
            limit = self.limits.get(scope, Limit()).running
            bound = math.inf if limit is None else limit
            assert counts.running <= max(bound, self.ceiling.get(scope, 0))
            self.ceiling[scope] = counts.running

    @invariant()
    def nobody_waits_who_could_run(self) -> None:
        counts = self.queue.counts()
        for ticket in self.here:
            if ticket.state == "waiting":
                assert any(
                    (limit := self.limits.get(scope, Limit()).running) is not None
                    and counts[scope].running >= limit
                    for scope in scopes_of(ticket)
                )

    def teardown(self) -> None:
        for ticket in list(self.here):
            if ticket in self.here:
                self.leave(ticket)
        for counts in self.queue.counts().values():
            assert (counts.running, counts.queued) == (0, 0)
        self.queue.set_limits(Limits(), self.now)
        assert set(self.queue.counts()) == {GATEWAY}


Interleavings.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase


@dataclass(frozen=True)
class Client:
    """Sends its next request when the last one starts."""

    tenant: str
    priority: Priority
    tokens: int
    where: tuple[str, str]


def some_room(bounds: Limits) -> Limits:
    """These limits without queue bounds, and with a slot at least in each scope."""
    return Limits(
        models={
            model: ModelLimits(
                Limit(of_model.limit.running or None),
                {name: Limit(limit.running or None) for name, limit in of_model.variants.items()},
            )
            for model, of_model in bounds.models.items()
        }
    )


clients = st.builds(
    Client,
    st.sampled_from("abc"),
    st.sampled_from(["interactive", "batch"]),
    st.sampled_from([5, 10, 20]),
    st.sampled_from(VARIANTS),
)


@given(st.lists(clients, min_size=2, max_size=4, unique=True), some_limits(), st.integers(1, 3))
# Not shrunk, which would take minutes.
@settings(max_examples=40, deadline=None, phases=[Phase.reuse, Phase.generate])
def test_under_continuous_load_every_request_is_served_within_a_bound(
    sending: list[Client], bounds: Limits, slots: int
) -> None:
    told: list[Ticket] = []
    queue = FairQueue(replace(some_room(bounds), gateway=Limit(slots)), told.append)
    client_of: dict[Ticket, Client] = {}
    passed: dict[Ticket, int] = {}
    """Tokens that started while the request has waited."""
    running: list[Ticket] = []

    def send(client: Client) -> None:
        while True:
            ticket = queue.arrive(
                *client.where,
                tokens=client.tokens,
                now=0.0,
                tenant=client.tenant,
                priority=client.priority,
            )
            client_of[ticket] = client
            if ticket.state == "waiting":
                passed[ticket] = 0
                return
            running.append(ticket)

    for client in sending:
        send(client)
    # A flow's share is 1 / (10 flows + 1) at least, and its turn comes when each of the others
    # has had one; the rest is for tags that run ahead and slots that end in any order.
    flows, most = len(sending), max(client.tokens for client in sending)
    bound = 4 * flows * most * (10 * flows + 1)
    finish = Random(0)
    served = 0
    while served < 2 * bound:
        ended = running.pop(finish.randrange(len(running)))
        told.clear()
        queue.leave(ended, 0.0)
        for ticket in list(told):
            assert passed.pop(ticket) <= bound
            running.append(ticket)
            served += ticket.cost
            for other in passed:
                passed[other] += ticket.cost
            send(client_of.pop(ticket))
    assert len(passed) == flows
    assert max(passed.values()) <= bound
