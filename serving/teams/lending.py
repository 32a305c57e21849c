"""The bank of quota: divides each limit among gateways, so that their shares never exceed it.

Owns who holds how many units, what becomes of them when a gateway is gone, and rebuilding all
this from the store. Plain and synchronous; the clock is passed in. What is taken within a share is
the gateway's to count (`borrowing`); leaves running and saving to `actor`.

Why the sum holds: a gateway counts the units that a window (`windows`) has taken against what it
holds, and the bank never lends more than the limit less all that is held. What a silent gateway
held counts as taken: for its lease and the window's length, of a budget until its period ends.
After a restart, so does all that the store has, until gateways report what of it they hold. Two
things can exceed a limit, and are then booked: tokens that an engine generated beyond what was
reserved, and requests that still run on a gateway that could not reach the bank for its lease.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from serving.teams.quota import (
    BEAT_S,
    LEASE_S,
    TIMELESS,
    Answer,
    Answers,
    Ask,
    Charge,
    Report,
    Usage,
    charge_name,
)
from serving.teams.windows import CELL_S, RULE_OF, Instant, LimitName, Rule, calendar

# A gateway that needed units and got none is remembered for two of its reports, seconds.
WANTED_S = 2 * BEAT_S
# One that has missed so many reports gives nothing back soon, seconds.
SILENT_S = 3 * BEAT_S
# When a slot comes back nobody knows.
RETRY_SLOT_S = 1.0
NOTHING = Charge(TIMELESS, 0)


@dataclass(slots=True)
class _Share:
    """What one gateway holds of one limit."""

    held: int = 0
    idle: int = 0
    frees: tuple[tuple[float, int], ...] = ()
    """When units come back: on the bank's clock, and how many."""
    heard: float = 0.0


@dataclass(slots=True)
class _Line:
    """One limit of one subject."""

    rule: Rule
    window: float = TIMELESS
    ends: float = math.inf
    """End of the period, Unix seconds."""
    limit: int = 0
    shares: dict[str, _Share] = field(default_factory=dict)
    gone: list[tuple[float, int]] = field(default_factory=list)
    """Units that no gateway reports: until when they count as taken, and how many."""
    wanted_until: float = -math.inf
    saved: Charge = NOTHING

    @property
    def charge(self) -> Charge:
        held = sum(share.held for share in self.shares.values())
        return Charge(self.window, held + sum(amount for _, amount in self.gone))

    @property
    def unsaved(self) -> bool:
        """Whether more is lent than the store knows of."""
        return self.charge.used > (self.saved.used if self.saved.window == self.window else 0)

    def turn(self, now: Instant) -> None:
        """Begin the period of `now`, and forget what has come back."""
        self.gone = [(until, amount) for until, amount in self.gone if until > now.mono]
        if self.rule.period is not None and now.unix >= self.ends:
            # Never an earlier one: a clock set back must not open a period again.
            self.window, self.ends = calendar(self.rule.period, now.unix)
            self.gone = []
            for share in self.shares.values():
                share.held = share.idle = 0

    def drop(self, gateway: str, heard: float) -> None:
        """Count what a silent gateway held as taken, for as long as it may be."""
        share = self.shares.pop(gateway, None)
        if share and share.held and self.rule.counts != "slots":
            self.gone.append((self.counts_until(heard), share.held))

    def counts_until(self, heard: float) -> float:
        """Until when a unit counts as taken that a gateway last reported at `heard`."""
        if self.rule.period is not None:
            return math.inf
        return heard + LEASE_S + (0.0 if self.rule.span_s is None else self.rule.span_s + CELL_S)

    def book(self, gateway: str, ask: Ask, now: Instant) -> _Share:
        """Take over what the gateway says that it holds."""
        held = ask.held if ask.window == self.window else 0
        share = self.shares.get(gateway)
        if share is None:
            share = self.shares[gateway] = _Share()
            self._claim(held)
        elif ask.window != self.window and share.held:
            # The gateway has let go of the period before its end; what it held is used up.
            self.gone.append((math.inf, share.held))
        share.held = max(0, held + ask.change)
        share.idle = min(ask.idle, share.held)
        share.frees = tuple((now.mono + in_s, amount) for in_s, amount in ask.frees)
        share.heard = now.mono
        self.limit = ask.limit
        return share

    def _claim(self, held: int) -> None:
        left = []
        for until, amount in self.gone:
            claimed = min(held, amount)
            held -= claimed
            if amount > claimed:
                left.append((until, amount - claimed))
        self.gone = left

    def serve(self, gateway: str, ask: Ask, now: Instant) -> Answer:
        """Book what the gateway says, and lend what it asks for where that is left."""
        self.turn(now)
        share = self.book(gateway, ask, now)
        available = self.limit - self.charge.used
        # Half of what is left is for the others, and less of it the less there is.
        fair = max(0, available) // (2 * len(self.shares))
        elsewhere = self._idle_elsewhere(share, now)
        given = 0
        if ask.need > available:
            if len(self.shares) > 1:
                self.wanted_until = now.mono + WANTED_S
        elif ask.need or now.mono >= self.wanted_until:
            given = max(ask.need, min(ask.want, fair))
            share.held += given
            share.idle += given - ask.need
        missing = max(0, ask.need - available)
        wanted = now.mono < self.wanted_until
        return Answer(
            given=given,
            window=self.window,
            ends_in_s=self.ends - now.unix,
            free=max(0, available - given) + elsewhere,
            recall=wanted or (fair == 0 and len(self.shares) > 1),
            coming=0 < missing <= elsewhere,
            retry_after_s=self._retry_after(missing - elsewhere, now),
        )

    def _idle_elsewhere(self, own: _Share, now: Instant) -> int:
        return sum(
            share.idle
            for share in self.shares.values()
            if share is not own and now.mono - share.heard < SILENT_S
        )

    def _retry_after(self, missing: int, now: Instant) -> float:
        if missing <= 0:
            return 0.0
        known = [entry for share in self.shares.values() for entry in share.frees]
        for at, amount in sorted(known + self.gone):
            missing -= amount
            if missing <= 0 and at < math.inf:
                return max(0.0, at - now.mono)
        if self.rule.period is not None:
            return self.ends - now.unix
        return self.rule.span_s or RETRY_SLOT_S


@dataclass(slots=True)
class _Account:
    """One subject: its limits, and the last report of each gateway (number, when)."""

    lines: dict[LimitName, _Line] = field(default_factory=dict)
    heard: dict[str, tuple[int, float]] = field(default_factory=dict)

    def expire(self, now: Instant) -> None:
        for gateway, (_, heard) in list(self.heard.items()):
            if now.mono - heard > LEASE_S:
                del self.heard[gateway]
                for line in self.lines.values():
                    line.drop(gateway, heard)
        for line in self.lines.values():
            line.turn(now)


class Bank:
    """All subjects' limits; `charges` is what the store has, by `charge_name`."""

    def __init__(self, charges: Mapping[str, Charge], now: Instant) -> None:
        self._accounts: dict[str, _Account] = {}
        self._owing: dict[str, _Line] = {}
        for name, charge in charges.items():
            subject, _, limit = name.rpartition("/")
            if rule := RULE_OF.get(limit):
                self._restore(self._line(subject, rule.limit), charge, now)

    def _restore(self, line: _Line, charge: Charge, now: Instant) -> None:
        line.saved, line.window = charge, charge.window
        if line.rule.period is not None:
            line.ends = calendar(line.rule.period, charge.window)[1]
        if charge.used:
            line.gone.append((line.counts_until(now.mono), charge.used))
        line.turn(now)

    def _line(self, subject: str, limit: LimitName) -> _Line:
        account = self._accounts.setdefault(subject, _Account())
        if limit not in account.lines:
            rule = RULE_OF[limit]
            ends = math.inf if rule.period is None else -math.inf
            account.lines[limit] = _Line(rule, ends=ends)
        return account.lines[limit]

    def exchange(self, gateway: str, reports: list[Report], now: Instant) -> list[Answers]:
        """Take the reports of a gateway, and answer each; empty where one came too late."""
        return [self._answer(gateway, report, now) for report in reports]

    def _answer(self, gateway: str, report: Report, now: Instant) -> Answers:
        account = self._accounts.setdefault(report.subject, _Account())
        account.expire(now)
        if gateway in account.heard and report.number <= account.heard[gateway][0]:
            return {}
        account.heard[gateway] = (report.number, now.mono)
        answers = {}
        for limit, ask in report.asks.items():
            line = self._line(report.subject, limit)
            answers[limit] = line.serve(gateway, ask, now)
            if line.unsaved:
                self._owing[charge_name(report.subject, limit)] = line
        return answers

    def sweep(self, now: Instant) -> None:
        """Count out gateways that are silent, and forget subjects of which nothing is taken."""
        for subject, account in list(self._accounts.items()):
            account.expire(now)
            lines = account.lines.values()
            if not account.heard and not any(line.charge.used or line.saved.used for line in lines):
                del self._accounts[subject]

    def owing(self) -> dict[str, Charge]:
        """What is lent beyond what the store knows: to be written before it is used."""
        return {name: line.charge for name, line in self._owing.items()}

    def changed(self) -> dict[str, Charge]:
        """All that the store has otherwise, or not yet."""
        return {
            charge_name(subject, limit): line.charge
            for subject, account in self._accounts.items()
            for limit, line in account.lines.items()
            if line.charge != line.saved and (line.charge.used or line.saved.used)
        }

    def mark_saved(self, charges: Mapping[str, Charge]) -> None:
        """Remember that the store has these."""
        for name, charge in charges.items():
            subject, _, limit = name.rpartition("/")
            self._line(subject, RULE_OF[limit].limit).saved = charge
        self._owing = {name: line for name, line in self._owing.items() if line.unsaved}

    def usage(self, subject: str) -> dict[LimitName, Usage]:
        """What of the subject's limits is taken, or lost with a gateway."""
        account = self._accounts.get(subject, _Account())
        return {
            limit: Usage(
                line.limit, line.charge.used - sum(share.idle for share in line.shares.values())
            )
            for limit, line in account.lines.items()
        }
