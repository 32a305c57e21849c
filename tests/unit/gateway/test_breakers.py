"""Breakers open for what only a sick replica does, and close when it answers again."""

from __future__ import annotations

import pytest

from serving.gateway.breakers import (
    FIRST_OPEN_S,
    FORGOTTEN_AFTER_S,
    LONGEST_OPEN_S,
    SILENCES_TO_OPEN,
    Breakers,
)


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breakers(clock: Clock) -> Breakers:
    return Breakers(clock)


def open_one(breakers: Breakers, replica: str = "a") -> None:
    breakers.fault(replica)


def half_open_one(breakers: Breakers, clock: Clock) -> None:
    open_one(breakers)
    clock.seconds += FIRST_OPEN_S


def test_one_fault_opens_a_breaker(breakers: Breakers) -> None:
    assert (breakers.state("a"), breakers.allows("a")) == ("closed", True)
    breakers.fault("a")
    assert (breakers.state("a"), breakers.allows("a")) == ("open", False)
    assert not breakers.take("a", "lease")
    assert breakers.allows("b")


def test_a_reply_between_silences_starts_the_count_anew(breakers: Breakers, clock: Clock) -> None:
    for _ in range(3):
        for _ in range(SILENCES_TO_OPEN - 1):
            clock.seconds += 1
            breakers.silent("a", clock.seconds)
        breakers.replied("a")
    assert breakers.state("a") == "closed"


def test_silence_counts_where_nobody_was_answered_meanwhile(
    breakers: Breakers, clock: Clock
) -> None:
    breakers.replied("a")
    for _ in range(SILENCES_TO_OPEN):
        clock.seconds += 1
        sent = clock.seconds
        clock.seconds += 60
        breakers.silent("a", sent)
    assert breakers.state("a") == "open"


def test_load_alone_never_opens_a_breaker(breakers: Breakers, clock: Clock) -> None:
    for _ in range(10 * SILENCES_TO_OPEN):
        sent = clock.seconds
        clock.seconds += 30
        breakers.replied("a")
        clock.seconds += 30
        breakers.silent("a", sent)
    assert breakers.state("a") == "closed"


def test_an_answer_of_another_replica_excuses_nobody(breakers: Breakers, clock: Clock) -> None:
    for _ in range(SILENCES_TO_OPEN):
        sent = clock.seconds
        clock.seconds += 60
        breakers.replied("b")
        breakers.silent("a", sent)
    assert breakers.state("a") == "open"


def test_a_half_open_replica_takes_one_trial_at_a_time(breakers: Breakers, clock: Clock) -> None:
    open_one(breakers)
    clock.seconds += FIRST_OPEN_S - 0.001
    assert breakers.state("a") == "open"
    clock.seconds += 0.001
    assert (breakers.state("a"), breakers.allows("a")) == ("half-open", True)
    assert breakers.take("a", "first")
    assert not breakers.allows("a")
    assert not breakers.take("a", "second")


def test_a_trial_that_takes_long_bars_nobody_for_ever(breakers: Breakers, clock: Clock) -> None:
    half_open_one(breakers, clock)
    breakers.take("a", "a long answer")
    clock.seconds += FIRST_OPEN_S - 0.001
    assert not breakers.allows("a")
    clock.seconds += 0.001
    assert breakers.take("a", "another")


def test_asking_whether_a_lease_may_go_takes_no_trial(breakers: Breakers, clock: Clock) -> None:
    half_open_one(breakers, clock)
    assert breakers.allows("a")
    assert breakers.take("a", "first")


def test_a_trial_that_showed_nothing_makes_room_for_another(
    breakers: Breakers, clock: Clock
) -> None:
    half_open_one(breakers, clock)
    breakers.take("a", "first")
    breakers.ended("a", "some older lease")
    assert not breakers.allows("a")
    breakers.ended("a", "first")
    assert (breakers.state("a"), breakers.take("a", "second")) == ("half-open", True)


def test_a_reply_to_the_trial_closes_the_breaker(breakers: Breakers, clock: Clock) -> None:
    half_open_one(breakers, clock)
    breakers.take("a", "first")
    breakers.replied("a")
    assert breakers.state("a") == "closed"
    assert all(breakers.take("a", lease) for lease in ("second", "third"))


def test_each_trial_that_fails_doubles_the_time_up_to_a_minute(
    breakers: Breakers, clock: Clock
) -> None:
    half_open_one(breakers, clock)
    lasted = []
    for _ in range(5):
        breakers.take("a", "trial")
        breakers.fault("a")
        opened = clock.seconds
        while breakers.state("a") == "open":
            clock.seconds += 1
        lasted.append(clock.seconds - opened)
    assert lasted == [10, 20, 40, LONGEST_OPEN_S, LONGEST_OPEN_S]


def test_after_a_reply_the_time_is_short_again(breakers: Breakers, clock: Clock) -> None:
    half_open_one(breakers, clock)
    breakers.take("a", "trial")
    breakers.fault("a")
    clock.seconds += 2 * FIRST_OPEN_S
    breakers.take("a", "trial")
    breakers.replied("a")
    half_open_one(breakers, clock)
    assert breakers.state("a") == "half-open"


def test_a_silent_trial_is_a_fault(breakers: Breakers, clock: Clock) -> None:
    half_open_one(breakers, clock)
    breakers.take("a", "trial")
    sent = clock.seconds
    clock.seconds += 60
    breakers.silent("a", sent)
    assert breakers.state("a") == "open"


def test_requests_from_before_it_opened_change_nothing(breakers: Breakers, clock: Clock) -> None:
    sent = clock.seconds
    clock.seconds += 1
    open_one(breakers)
    for _ in range(20):
        breakers.fault("a")
    clock.seconds += FIRST_OPEN_S
    assert breakers.state("a") == "half-open"
    breakers.fault("a")
    breakers.take("a", "trial")
    breakers.silent("a", sent)
    assert breakers.state("a") == "half-open"


def test_a_replica_not_heard_of_for_ten_minutes_is_forgotten(
    breakers: Breakers, clock: Clock
) -> None:
    half_open_one(breakers, clock)
    breakers.take("a", "a trial whose end nobody told")
    clock.seconds += FORGOTTEN_AFTER_S
    assert (breakers.state("a"), breakers.allows("a")) == ("closed", True)


def test_memory_is_bounded_by_the_replicas_of_ten_minutes(breakers: Breakers, clock: Clock) -> None:
    for number in range(1000):
        breakers.replied(f"replica-{number}")
        breakers.allows(f"unheard-of-{number}")
        clock.seconds += FORGOTTEN_AFTER_S / 10
    assert len(breakers._breakers) == 10
