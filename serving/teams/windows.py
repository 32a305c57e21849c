"""How long a unit of each limit stays taken: a minute, while a request runs, a day or a month.

Owns the kinds of limits, the calendar of budgets and the count of what is taken now. Plain and
synchronous; the clock is passed in. Leaves who may take how much to `lending` and `borrowing`.

- Of requests and tokens per minute, no more than the limit are taken in any 60 s, wherever they
  begin. A unit comes back 60 to 61 s after it was taken.
- Of requests at once, never more than the limit run.
- Of a budget, no more than the limit is taken in any day or month of UTC.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

LimitName = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "tokens_per_day",
    "tokens_per_month",
]
Period = Literal["day", "month"]

MINUTE_S = 60.0
# What is taken within one cell comes back at once, with the cell's end.
CELL_S = 1.0


class Instant(NamedTuple):
    """A moment by two clocks, seconds: one for durations, one for the calendar."""

    mono: float
    """Never goes back; its zero means nothing."""
    unix: float


@dataclass(frozen=True, slots=True)
class Rule:
    """What one limit counts, and how long it counts it."""

    limit: LimitName
    counts: Literal["slots", "requests", "tokens"]
    span_s: float | None = None
    """How long a unit stays taken; None: until its request or the period ends."""
    period: Period | None = None


RULES: tuple[Rule, ...] = (
    Rule("concurrent_requests", "slots"),
    Rule("requests_per_minute", "requests", span_s=MINUTE_S),
    Rule("tokens_per_minute", "tokens", span_s=MINUTE_S),
    Rule("tokens_per_day", "tokens", period="day"),
    Rule("tokens_per_month", "tokens", period="month"),
)
RULE_OF: dict[str, Rule] = {rule.limit: rule for rule in RULES}


def calendar(period: Period, unix: float) -> tuple[float, float]:
    """Start and end, in Unix seconds, of the UTC day or month that holds `unix`."""
    start = datetime.fromtimestamp(unix, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return start.timestamp(), (start + timedelta(days=1)).timestamp()
    start = start.replace(day=1)
    # Four days after the 28th is the next month, whatever the month.
    end = (start.replace(day=28) + timedelta(days=4)).replace(day=1)
    return start.timestamp(), end.timestamp()


class Window:
    """What is taken of one limit now.

    Each unit stays taken for `span_s` seconds and up to CELL_S more; None: until it is put back.
    """

    __slots__ = ("_cells", "_next", "_order", "_span_s", "_taken")

    def __init__(self, span_s: float | None) -> None:
        self._span_s = span_s
        self._cells: dict[int, int] = {}
        self._order: deque[int] = deque()
        self._taken = 0
        # When the oldest cell ends.
        self._next = math.inf

    def taken(self, now: float) -> int:
        """Units taken at `now`, by the same clock as everywhere here, which never goes back."""
        while now >= self._next:
            self._taken -= self._cells.pop(self._order.popleft())
            self._next = self._end(self._order[0]) if self._order else math.inf
        return self._taken

    def take(self, amount: int, now: float) -> int:
        """Count `amount` units as taken; returns the cell to name when some are put back."""
        cell = 0 if self._span_s is None else int(now // CELL_S)
        if cell not in self._cells:
            self._cells[cell] = 0
            self._order.append(cell)
            self._next = self._end(self._order[0])
        self._cells[cell] += amount
        self._taken += amount
        return cell

    def put_back(self, amount: int, cell: int) -> None:
        """Free `amount` of the units taken in `cell`, unless they came back by themselves."""
        if cell in self._cells:
            self._cells[cell] -= amount
            self._taken -= amount

    def empty_in_s(self, now: float) -> float:
        """Seconds until nothing is taken, if nothing more is; infinite where that is unknown."""
        return self._end(self._order[-1]) - now if self.taken(now) else 0.0

    def frees(self, now: float) -> tuple[tuple[float, int], ...]:
        """When units come back by themselves: seconds from `now`, and how many; soonest first."""
        if self._span_s is None or not self.taken(now):
            return ()
        return tuple((self._end(cell) - now, self._cells[cell]) for cell in self._order)

    def _end(self, cell: int) -> float:
        return math.inf if self._span_s is None else (cell + 1) * CELL_S + self._span_s
