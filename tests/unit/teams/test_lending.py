"""The bank by itself; with gateways, links and a store it is in `test_limiter`."""

from __future__ import annotations

from typing import Any

import pytest

from serving.teams.lending import RETRY_SLOT_S, WANTED_S, Bank
from serving.teams.quota import LEASE_S, TIMELESS, UNKNOWN, Answer, Ask, Charge, Report
from serving.teams.windows import CELL_S, MINUTE_S, Instant, LimitName

DAY = 1_767_312_000.0
DAY_S = 86_400.0
SLOTS: LimitName = "concurrent_requests"
MINUTE: LimitName = "requests_per_minute"
BUDGET: LimitName = "tokens_per_day"


class Desk:
    """A bank with a clock, and numbers for the reports."""

    def __init__(self, charges: dict[str, Charge] | None = None) -> None:
        self.mono = 0.0
        self.unix = DAY
        self.number = 0
        self.bank = Bank(charges or {}, self.now)

    @property
    def now(self) -> Instant:
        return Instant(self.mono, self.unix + self.mono)

    def ask(self, gateway: str, limit: LimitName, units: int = 10, **said: Any) -> Answer:
        self.number += 1
        window = UNKNOWN if limit == BUDGET else TIMELESS
        asked = {"limit": units, "window": window, "held": 0, "change": 0, "idle": 0} | said
        report = Report("team:a", self.number, {limit: Ask(**asked)})
        return self.bank.exchange(gateway, [report], self.now)[0][limit]

    def used(self, limit: LimitName) -> int:
        return self.bank.usage("team:a")[limit].used


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_gateway_gets_half_of_what_is_left_at_most(desk: Desk) -> None:
    assert desk.ask("g1", MINUTE, 100, need=1, want=80).given == 50
    assert desk.ask("g2", MINUTE, 100, need=1, want=80).given == 50 // 4


def test_the_need_is_met_as_long_as_there_is_something_left(desk: Desk) -> None:
    desk.ask("g1", MINUTE, 10, need=8, want=8)
    assert desk.ask("g2", MINUTE, 10, need=2, want=20).given == 2
    refused = desk.ask("g3", MINUTE, 10, need=1)
    assert (refused.given, refused.free) == (0, 0)


def test_a_need_is_met_whole_or_not_at_all(desk: Desk) -> None:
    desk.ask("g1", MINUTE, 10, need=8, want=8)
    assert desk.ask("g2", MINUTE, 10, need=3, want=3).given == 0


def test_idle_units_elsewhere_are_called_back_for_a_need(desk: Desk) -> None:
    desk.ask("g1", MINUTE, 10, need=8, want=8)
    assert not desk.ask("g1", MINUTE, 10, held=8, idle=5).recall
    desk.ask("g2", MINUTE, 10)
    answer = desk.ask("g2", MINUTE, 10, need=4)
    assert answer.coming and answer.given == 0
    assert desk.ask("g1", MINUTE, 10, held=8, idle=5).recall
    desk.ask("g1", MINUTE, 10, held=8, change=-5)
    assert desk.ask("g2", MINUTE, 10, need=4).given == 4


def test_while_somebody_waits_nobody_gets_more_than_a_need(desk: Desk) -> None:
    desk.ask("g1", SLOTS, 40, need=20, want=20)
    desk.ask("g2", SLOTS, 40, need=21)
    assert desk.ask("g1", SLOTS, 40, held=20, want=5).given == 0
    desk.mono += WANTED_S
    assert desk.ask("g1", SLOTS, 40, held=20, want=5).given == 5


def test_idle_units_of_a_silent_gateway_are_not_waited_for(desk: Desk) -> None:
    desk.ask("g1", MINUTE, 10, need=8, want=8)
    desk.ask("g1", MINUTE, 10, held=8, idle=8)
    desk.mono += LEASE_S / 2
    assert not desk.ask("g2", MINUTE, 10, need=5).coming


def test_when_to_retry_is_when_enough_has_come_back(desk: Desk) -> None:
    desk.ask("g1", MINUTE, 10, need=6, want=6)
    desk.ask("g1", MINUTE, 10, held=6, frees=((20.0, 2), (40.0, 4)))
    desk.ask("g2", MINUTE, 10, need=4, want=4)
    desk.ask("g2", MINUTE, 10, held=4, frees=((30.0, 4),))
    desk.mono += 5
    assert desk.ask("g3", MINUTE, 10, need=2).retry_after_s == pytest.approx(15)
    assert desk.ask("g3", MINUTE, 10, need=6).retry_after_s == pytest.approx(25)
    assert desk.ask("g3", MINUTE, 10, need=7).retry_after_s == pytest.approx(35)


def test_a_budget_is_to_be_retried_when_its_period_ends(desk: Desk) -> None:
    desk.ask("g1", BUDGET, 10, need=10, want=10)
    desk.mono = 3600
    assert desk.ask("g2", BUDGET, 10, need=1).retry_after_s == DAY_S - 3600


def test_a_slot_is_to_be_retried_soon(desk: Desk) -> None:
    desk.ask("g1", SLOTS, 1, need=1, want=1)
    assert desk.ask("g2", SLOTS, 1, need=1).retry_after_s == RETRY_SLOT_S


@pytest.mark.parametrize(
    ("limit", "counts_s"),
    [(SLOTS, LEASE_S), (MINUTE, LEASE_S + MINUTE_S + CELL_S), (BUDGET, DAY_S)],
)
def test_what_a_gone_gateway_held_counts_for_as_long_as_it_may_be_in_use(
    desk: Desk, limit: LimitName, counts_s: float
) -> None:
    desk.ask("g1", limit, 10, need=10, want=10)
    desk.mono = counts_s - 0.01
    assert desk.ask("g2", limit, 10, need=1).given == 0
    desk.mono = counts_s + 0.01
    assert desk.ask("g2", limit, 10, need=1, want=1).given == 1


def test_a_gateway_that_comes_back_claims_what_it_held(desk: Desk) -> None:
    window = desk.ask("g1", BUDGET, 100, need=40, want=40).window
    desk.mono = LEASE_S * 4
    desk.bank.sweep(desk.now)
    assert desk.used(BUDGET) == 40
    desk.ask("g1", BUDGET, 100, window=window, held=40, change=-30)
    assert desk.used(BUDGET) == 10


def test_a_report_that_comes_late_is_not_heard(desk: Desk) -> None:
    ask = Ask(limit=10, window=TIMELESS, held=0, change=0, idle=0, need=3, want=3)
    late = Report("team:a", 1, {MINUTE: ask})
    later = Report("team:a", 2, {MINUTE: ask})
    assert desk.bank.exchange("g1", [later], desk.now)[0][MINUTE].given == 3
    assert desk.bank.exchange("g1", [late], desk.now) == [{}]
    assert desk.used(MINUTE) == 3


def test_an_answer_that_was_lost_costs_nothing(desk: Desk) -> None:
    desk.ask("g1", MINUTE, 10, need=9, want=9)
    desk.ask("g1", MINUTE, 10, held=0)
    assert desk.ask("g2", MINUTE, 10, need=10, want=10).given == 10


def test_tokens_beyond_the_limit_are_booked_and_keep_others_out(desk: Desk) -> None:
    window = desk.ask("g1", BUDGET, 100, need=90, want=90).window
    desk.ask("g1", BUDGET, 100, window=window, held=90, change=30)
    assert desk.used(BUDGET) == 120
    assert desk.ask("g2", BUDGET, 100, need=1).given == 0


def test_a_new_day_has_the_whole_budget(desk: Desk) -> None:
    first = desk.ask("g1", BUDGET, 10, need=10, want=10)
    assert (first.window, first.ends_in_s) == (DAY, DAY_S)
    desk.mono = DAY_S
    second = desk.ask("g1", BUDGET, 10, window=DAY, held=10, need=10, want=10)
    assert (second.given, second.window) == (10, DAY + DAY_S)


def test_a_gateway_that_forgets_a_day_before_its_end_does_not_get_it_again(desk: Desk) -> None:
    desk.ask("g1", BUDGET, 10, need=10, want=10)
    desk.mono = DAY_S - 0.001
    assert desk.ask("g1", BUDGET, 10, window=UNKNOWN, need=1).given == 0


def test_a_clock_set_back_does_not_open_a_day_again(desk: Desk) -> None:
    desk.unix += DAY_S
    desk.ask("g1", BUDGET, 10, need=10, want=10)
    desk.unix -= DAY_S
    assert desk.ask("g2", BUDGET, 10, need=1).given == 0
    restarted = Desk(desk.bank.changed())
    assert restarted.ask("g2", BUDGET, 10, need=1).given == 0


def test_a_restarted_bank_takes_what_was_lent_as_used_until_gateways_say_otherwise(
    desk: Desk,
) -> None:
    window = desk.ask("g1", BUDGET, 100, need=60, want=60).window
    desk.ask("g2", BUDGET, 100, need=40, want=40)
    restarted = Desk(desk.bank.owing())
    assert restarted.ask("g3", BUDGET, 100, need=1).given == 0
    restarted.ask("g1", BUDGET, 100, window=window, held=60, change=-50)
    assert restarted.ask("g3", BUDGET, 100, need=50, want=50).given == 50
    assert restarted.ask("g3", BUDGET, 100, window=window, held=50, need=1).given == 0


@pytest.mark.parametrize(
    ("limit", "counts_s"), [(SLOTS, LEASE_S), (MINUTE, LEASE_S + MINUTE_S + CELL_S)]
)
def test_what_nobody_claims_after_a_restart_comes_back(
    desk: Desk, limit: LimitName, counts_s: float
) -> None:
    desk.ask("g1", limit, 10, need=10, want=10)
    restarted = Desk(desk.bank.owing())
    restarted.mono = counts_s - 0.01
    assert restarted.ask("g2", limit, 10, need=1).given == 0
    restarted.mono = counts_s
    assert restarted.ask("g2", limit, 10, need=1, want=1).given == 1


def test_only_what_the_store_lacks_is_owing(desk: Desk) -> None:
    desk.ask("g1", MINUTE, 10, need=5, want=5)
    desk.bank.mark_saved(desk.bank.owing())
    desk.ask("g1", MINUTE, 10, held=5, change=-2)
    assert desk.bank.owing() == {}
    desk.ask("g2", MINUTE, 10, need=2, want=2)
    assert desk.bank.owing() == {}
    desk.ask("g2", MINUTE, 10, held=2, need=1, want=1)
    assert desk.bank.owing() == {"team:a/requests_per_minute": Charge(TIMELESS, 6)}


def test_a_subject_of_which_nothing_is_taken_is_forgotten(desk: Desk) -> None:
    desk.ask("g1", SLOTS, 10, need=5, want=5)
    desk.bank.mark_saved(desk.bank.changed())
    desk.mono = LEASE_S + 1
    desk.bank.sweep(desk.now)
    assert desk.bank.changed() == {"team:a/concurrent_requests": Charge(TIMELESS, 0)}
    desk.bank.mark_saved(desk.bank.changed())
    desk.bank.sweep(desk.now)
    assert desk.bank.usage("team:a") == {}


def test_a_lowered_limit_lends_nothing_until_less_is_held(desk: Desk) -> None:
    desk.ask("g1", SLOTS, 10, need=8, want=8)
    assert desk.ask("g2", SLOTS, 5, need=1).given == 0
    desk.ask("g1", SLOTS, 5, held=8, change=-4)
    assert desk.ask("g2", SLOTS, 5, need=1, want=1).given == 1


def test_a_row_that_this_version_does_not_know_is_left_alone() -> None:
    desk = Desk({"team:a/tokens_per_year": Charge(DAY, 5)})
    assert desk.bank.changed() == {}
