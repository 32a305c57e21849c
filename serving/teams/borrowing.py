"""What one gateway holds of each limit, and what of it its requests take.

Owns the gateway's side of the books: what is idle, what to give back, what to ask for. Plain and
synchronous; the clock, which never goes back, is passed in. Leaves asking and waiting to `limiter`,
and dividing a limit among gateways to `lending`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

from serving.teams.quota import LEASE_S, TIMELESS, UNKNOWN, Answer, Answers, Ask, Report
from serving.teams.windows import LimitName, Rule, Window

# Idle units to hold, in reports' worth of use: a request seldom finds none, and a gateway that
# dies loses little of a budget.
AHEAD = 4
# How fast the measure of use forgets, per report.
FADING = 0.9
# What a request asks for beside its own need, in times that need.
BLOCK = 8
# For how long a refusal answers for the requests that follow, seconds.
REFUSED_S = 0.25


@dataclass(slots=True)
class Taking:
    """Units of one limit that one request has."""

    holding: Holding
    window: Window
    cell: int
    amount: int

    def settle(self, amount: int, now: float) -> None:
        """Make it `amount` units: put back what is too much, take what is missing."""
        if amount < self.amount:
            self.window.put_back(self.amount - amount, self.cell)
        elif amount > self.amount:
            self.holding.take(amount - self.amount, now)
        self.amount = amount


@dataclass(frozen=True, slots=True)
class Refusal:
    """The bank's last no: to how many units, until when it holds, when to come again."""

    need: int
    until: float
    retry_at: float
    booked: bool


class Holding:
    """One limit of one subject, as this gateway holds it."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.limit = 0
        self.refusal: Refusal | None = None
        self.recall = False
        self.held = 0
        self._giving = 0
        """Given back in a report that may not have arrived."""
        self._free = 0
        self._ends = math.inf
        self._recent = 0
        self._pace = 0.0
        self._renew()

    def _renew(self) -> None:
        self._window = Window(self.rule.span_s)
        self._start = TIMELESS if self.rule.period is None else UNKNOWN
        self._ends = math.inf
        self.held = self._giving = 0

    def idle(self, now: float) -> int:
        """Units that requests may take; below 0, units taken beyond what is held."""
        if now >= self._ends:
            self._renew()
        return self._own() - self._window.taken(now)

    def _own(self) -> int:
        own = self.held - self._giving
        # The limit may have been lowered since.
        return own if own < self.limit else self.limit

    def take(self, amount: int, now: float) -> Taking:
        """Take units, whether or not they are idle."""
        self._recent += amount
        return Taking(self, self._window, self._window.take(amount, now), amount)

    def remaining(self, now: float) -> int:
        """Units that are left to requests of the subject, on all gateways as of the last report."""
        return min(self.limit, max(0, self._free + self.idle(now)))

    def whole_in_s(self, now: float) -> float:
        """Seconds after which nothing that this gateway has taken counts any more."""
        if self.rule.period is None:
            return self._window.empty_in_s(now)
        return self._ends - now if now < self._ends < math.inf else 0.0

    def refused(self, need: int, now: float) -> Refusal | None:
        """The last refusal, where it answers for `need` units as well."""
        refusal = self.refusal
        if refusal is None or now >= refusal.until or need < refusal.need:
            return None
        return refusal

    def ask(self, now: float, *, need: int = 0, beat: bool = False, lapsed: bool = False) -> Ask:
        """What to report, and to ask for: `need` units for a request that waits for them.

        At a `beat`, what is idle is made to fit the use. `lapsed`: the bank was not reached for
        so long that it may have lent to others what is idle here.
        """
        if beat:
            self._pace = max(float(self._recent), FADING * self._pace)
            self._recent = 0
        target = 0 if self.recall or lapsed else math.floor(AHEAD * self._pace)
        idle = self.idle(now)
        if idle > 2 * target and (lapsed or beat):
            self._giving += idle - target
        taken = self._window.taken(now)
        # What was promised back but is taken is not idle, and is booked.
        kept = max(taken, self._own())
        self._giving = max(self._giving, self.held - kept)
        idle = kept - taken
        lacking = max(0, need - idle)
        ahead = (BLOCK - 1) * need if need else target - idle if beat else 0
        return Ask(
            limit=self.limit,
            window=self._start,
            held=self.held,
            change=kept - self.held,
            idle=idle,
            need=lacking,
            want=lacking + max(0, ahead),
            frees=self._window.frees(now),
        )

    def hear(self, ask: Ask, answer: Answer, sent: float, now: float) -> None:
        """Take what the bank has answered to `ask`, which was sent at `sent`."""
        self.idle(now)
        if ask.window != self._start:
            # The period ended while the answer was under way.
            return
        if answer.window != self._start:
            self._open(answer.window, booked=max(0, ask.change), now=now)
            self.held += answer.given
        else:
            self.held += ask.change + answer.given
            self._giving = 0
        self._ends = sent + answer.ends_in_s
        self._free, self.recall = answer.free, answer.recall
        if ask.need:
            self.refusal = None
        if answer.given < ask.need:
            retry_at = now + answer.retry_after_s
            self.refusal = Refusal(ask.need, now + REFUSED_S, retry_at, answer.booked)

    def _open(self, window: float, booked: int, now: float) -> None:
        if self._start != UNKNOWN:
            self._renew()
            self._window.take(booked, now)
        self._start, self.held = window, booked

    def is_empty(self, now: float) -> bool:
        """Whether the bank needs no more reports: nothing is idle, or will be."""
        idle = self.idle(now)
        if self._giving or idle or self._recent:
            return False
        return self.rule.period is not None or not self._window.taken(now)


class Subject:
    """A team or a key as one gateway knows it: what it holds of each of its limits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.holdings: dict[LimitName, Holding] = {}
        self.lock = asyncio.Lock()
        """Held while a report of this subject is under way."""
        self.asking = 0
        """Requests that ask for units, or wait to."""
        self.running = 0
        """Requests that may still take units, or put some back."""
        self.lease_until = -math.inf

    def holding(self, rule: Rule, limit: int) -> Holding:
        """What is held of this limit, which now is `limit` units."""
        found = self.holdings.get(rule.limit)
        if found is None:
            found = self.holdings[rule.limit] = Holding(rule)
        found.limit = limit
        return found

    def lapsed(self, now: float) -> bool:
        """Whether what is idle may be lent to others by now."""
        return now >= self.lease_until

    def report(self, number: int, now: float, needs: Mapping[LimitName, int] | None) -> Report:
        """All that is held, and the units by limit that a request needs; None: this is a beat."""
        lapsed = self.lapsed(now)
        asks = {
            name: holding.ask(
                now, need=(needs or {}).get(name, 0), beat=needs is None, lapsed=lapsed
            )
            for name, holding in self.holdings.items()
        }
        return Report(self.name, number, asks)

    def hear(self, report: Report, answers: Answers, sent: float, now: float) -> None:
        """Take the bank's answers to a report that was sent at `sent`."""
        if not answers:
            return
        self.lease_until = sent + LEASE_S
        for name, answer in answers.items():
            self.holdings[name].hear(report.asks[name], answer, sent, now)

    def is_called_back(self, now: float) -> bool:
        """Whether others wait for what is idle here."""
        return any(each.recall and each.idle(now) > 0 for each in self.holdings.values())

    def is_empty(self, now: float) -> bool:
        """Whether it can be forgotten; what it has used up of a budget the bank remembers."""
        return not self.running and all(holding.is_empty(now) for holding in self.holdings.values())
