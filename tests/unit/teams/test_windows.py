from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.teams.caller import Limits
from serving.teams.windows import CELL_S, MINUTE_S, RULES, Period, Window, calendar

steps = st.lists(
    st.tuples(st.floats(0, 40), st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=60
)


def unix(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_every_limit_that_can_be_set_has_a_rule() -> None:
    assert {rule.limit for rule in RULES} == set(Limits.model_fields)


@pytest.mark.parametrize(
    ("period", "at", "start", "end"),
    [
        ("day", "2026-03-29T23:59:59", "2026-03-29", "2026-03-30"),
        ("day", "2026-03-30T00:00:00", "2026-03-30", "2026-03-31"),
        ("month", "2026-12-31T23:59:59", "2026-12-01", "2027-01-01"),
        ("month", "2028-02-29T12:00:00", "2028-02-01", "2028-03-01"),
        ("month", "2026-03-01T00:00:00", "2026-03-01", "2026-04-01"),
    ],
)
def test_days_and_months_are_those_of_utc(period: Period, at: str, start: str, end: str) -> None:
    assert calendar(period, unix(at)) == (unix(start), unix(end))


def test_a_unit_comes_back_within_a_cell_after_its_minute() -> None:
    window = Window(MINUTE_S)
    window.take(3, 10.25)
    assert window.taken(10.25 + MINUTE_S) == 3
    assert window.taken(10.25 + MINUTE_S + CELL_S) == 0


def test_a_unit_without_a_span_comes_back_only_when_it_is_put_back() -> None:
    window = Window(None)
    cell = window.take(2, 0.0)
    assert window.taken(1e9) == 2
    window.put_back(1, cell)
    assert window.taken(1e9) == 1
    assert window.frees(1e9) == ()


def test_what_came_back_by_itself_cannot_be_put_back_again() -> None:
    window = Window(MINUTE_S)
    early = window.take(5, 0.0)
    window.take(1, 70.0)
    assert window.taken(70.0) == 1
    window.put_back(5, early)
    assert window.taken(70.0) == 1


@given(steps)
def test_a_unit_counts_for_at_least_its_minute_and_at_most_a_cell_more(
    taken: list[tuple[float, int, int]],
) -> None:
    window, now, log = Window(MINUTE_S), 0.0, []
    for wait_s, amount, too_much in taken:
        now += wait_s
        cell = window.take(amount, now)
        back = min(amount, too_much)
        window.put_back(back, cell)
        log.append((now, amount - back))
        least = sum(count for at, count in log if now - at < MINUTE_S)
        most = sum(count for at, count in log if now - at < MINUTE_S + CELL_S)
        assert least <= window.taken(now) <= most


@given(steps)
def test_what_is_told_of_units_to_come_back_is_what_comes_back(
    taken: list[tuple[float, int, int]],
) -> None:
    window, now = Window(MINUTE_S), 0.0
    for wait_s, amount, _ in taken:
        now += wait_s
        window.take(amount, now)
    told, before = window.frees(now), window.taken(now)
    assert window.empty_in_s(now) == told[-1][0]
    assert sum(amount for _, amount in told) == before
    for in_s, amount in told:
        before -= amount
        assert window.taken(now + in_s) == before
