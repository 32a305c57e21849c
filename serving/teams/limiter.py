"""Admits requests within the limits of their team and their key, exactly across gateways.

One gateway process's side: it borrows units from the bank ahead of use, so that most requests wait
for nobody, and reports to it at each beat. Owns asking, waiting, refusing and the `x-ratelimit-*`
headers. Leaves the books to `borrowing`, the division of limits to `lending`, and tokens' counts to
the caller. A caller without limits costs no call.

- What a limit promises is in `windows`. Tokens are reserved before a request runs and settled
  when it has ended; what it used beyond the reservation is booked all the same.
- Before it refuses, a gateway asks the bank; units that lie idle on others are called back, for
  which a request waits RECALL_WITHIN_S at most.
- Without the bank a gateway goes on with what it holds, for LEASE_S at most, and then refuses
  (503): to admit unchecked would make every limit void for as long as the bank is away, and only
  those who have limits are refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType

from serving.teams.borrowing import Holding, Refusal, Subject, Taking
from serving.teams.caller import Caller
from serving.teams.errors import TeamsError
from serving.teams.quota import BEAT_S, Answers, Lender, Report
from serving.teams.windows import RULES, LimitName

logger = logging.getLogger("ray.serve")

# An exchange with the bank takes milliseconds; one that takes longer is lost.
CALL_WITHIN_S = 2.0
# Others have been told to give back idle units within one beat; longer than that is not fair.
RECALL_WITHIN_S = 3 * BEAT_S
ASK_AGAIN_S = 0.1
LEAST_RETRY_AFTER_S = 1.0
# OpenAI's and Anthropic's clients wait no longer than this by themselves.
MOST_AUTOMATIC_RETRY_S = 60.0


class LimitedError(TeamsError):
    """The request would exceed a limit of its team or key (429).

    `retry_after_s` is None where no wait helps. `headers` are for the reply, Retry-After left out.
    """

    def __init__(
        self,
        message: str,
        limit: LimitName,
        units: int,
        retry_after_s: float | None,
        headers: dict[str, str],
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.units = units
        self.retry_after_s = retry_after_s
        self.headers = headers
        if retry_after_s is None or retry_after_s > MOST_AUTOMATIC_RETRY_S:
            headers["x-should-retry"] = "false"


class LimiterUnavailableError(TeamsError):
    """The limits of this team or key cannot be checked now (503)."""

    retry_after_s = LEAST_RETRY_AFTER_S


@dataclass(slots=True)
class _Need:
    """Units of one limit that a request needs."""

    subject: Subject
    holding: Holding
    units: int

    def is_met(self, now: float) -> bool:
        return now < self.subject.lease_until and self.holding.idle(now) >= self.units


class Grant:
    """An admitted request's units; a context manager that settles, if nothing else has.

    Its slot is freed exactly once, by `settle` or at the latest by the end of the block. Tokens
    are then charged as noted last; where nothing was noted, as reserved.
    """

    def __init__(
        self,
        needs: list[_Need],
        clock: Callable[[], float],
        settled: Callable[[list[_Need]], None],
    ) -> None:
        self._needs = needs
        self._clock = clock
        self._settled = settled
        now = clock()
        self._takings = [need.holding.take(need.units, now) for need in needs]
        self._noted: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The `x-ratelimit-*` headers of a reply, as things are now; none without limits."""
        return _headers(self._needs, self._clock())

    def note(self, prompt_tokens: int, output_tokens: int) -> None:
        """Remember what the request has used so far."""
        self._noted = prompt_tokens + output_tokens

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """Charge these tokens in place of those reserved, and free the slot; once only."""
        self._settle(prompt_tokens + output_tokens)

    def close(self) -> None:
        """Settle by what is noted, if `settle` was not called."""
        self._settle(self._noted)

    def _settle(self, tokens: int | None) -> None:
        takings, self._takings = self._takings, []
        if takings:
            now = self._clock()
            for taking in takings:
                _settle(taking, tokens, now)
            self._settled(self._needs)

    def __enter__(self) -> Grant:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _settle(taking: Taking, tokens: int | None, now: float) -> None:
    counts = taking.holding.rule.counts
    if counts == "slots":
        taking.settle(0, now)
    elif counts == "tokens" and tokens is not None:
        taking.settle(tokens, now)


class Limiter:
    """One gateway process's limiter, for one event loop; `clock` never goes back, seconds."""

    def __init__(self, lender: Lender, clock: Callable[[], float] = time.monotonic) -> None:
        self._lender = lender
        self._clock = clock
        self._gateway = uuid.uuid4().hex
        self._subjects: dict[str, Subject] = {}
        self._known: dict[str, tuple[Caller, list[tuple[Subject, Holding]]]] = {}
        """By key: the caller seen last, and what its limits are held in."""
        self._number = 0
        self._away = False
        """Whether the last exchange failed; the beat finds out when the bank is back."""
        self._urgent: set[Subject] = set()
        self._wake = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    async def admit(self, caller: Caller, tokens: int) -> Grant:
        """Take a request, `tokens` tokens (estimated prompt and longest answer) and a slot.

        Raises LimitedError, or LimiterUnavailableError where the bank is away.
        """
        needs = self._needs(caller, tokens)
        for need in needs:
            if need.units > need.holding.limit:
                raise _too_large(need, needs, self._clock())
        if needs and self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        for subject in _subjects(needs):
            subject.running += 1
        try:
            while lacking := _unmet(needs, self._clock()):
                await self._borrow(lacking[0].subject, needs)
        except BaseException:
            _let_go(needs)
            raise
        return Grant(needs, self._clock, self._settled)

    async def close(self) -> None:
        """Stop reporting, and give back what is idle; what still runs counts as before."""
        if self._beating is None:
            return
        self._beating.cancel()
        await asyncio.wait({self._beating})
        for subject in self._subjects.values():
            subject.lease_until = -math.inf
        await self._report(list(self._subjects.values()))

    def _needs(self, caller: Caller, tokens: int) -> list[_Need]:
        known = self._known.get(caller.key_id)
        if known is None or known[0] is not caller:
            known = self._known[caller.key_id] = (caller, self._limits_of(caller))
        return [
            _Need(subject, holding, tokens if holding.rule.counts == "tokens" else 1)
            for subject, holding in known[1]
        ]

    def _limits_of(self, caller: Caller) -> list[tuple[Subject, Holding]]:
        found = []
        for name, limits in (
            (f"team:{caller.team}", caller.team_limits),
            (f"key:{caller.key_id}", caller.key_limits),
        ):
            for rule in RULES:
                limit = getattr(limits, rule.limit)
                if limit is not None:
                    subject = self._subjects.get(name)
                    if subject is None:
                        subject = self._subjects[name] = Subject(name)
                    found.append((subject, subject.holding(rule, limit)))
        return found

    def _settled(self, needs: list[_Need]) -> None:
        """A request has let go of its needs: give back at once what others wait for."""
        _let_go(needs)
        due = {need.subject for need in needs if need.holding.recall}
        if due:
            self._urgent |= due
            self._wake.set()

    async def _borrow(self, subject: Subject, needs: list[_Need]) -> None:
        """Hold what the needs lack of this subject, having asked the bank; raises as `admit`."""
        own = [need for need in needs if need.subject is subject]
        latest = self._clock() + RECALL_WITHIN_S
        subject.asking += 1
        try:
            async with subject.lock:
                while short := _unmet(own, self._clock()):
                    self._refuse(short, needs)
                    coming = await self._ask(subject, short)
                    if coming and self._clock() < latest:
                        await asyncio.sleep(ASK_AGAIN_S)
                        for need in short:
                            need.holding.refusal = None
        finally:
            subject.asking -= 1

    def _refuse(self, short: list[_Need], needs: list[_Need]) -> None:
        """Raise where asking the bank is known to be of no use now."""
        now = self._clock()
        for need in short:
            if refusal := need.holding.refused(need.units, now):
                raise _limited(need, refusal, needs, now)
        if self._away:
            raise _unavailable(short[0].subject)

    async def _ask(self, subject: Subject, short: list[_Need]) -> bool:
        """Ask the bank; returns whether what it refused is idle elsewhere and called back."""
        units = {need.holding.rule.limit: need.units for need in short}
        report, sent = self._next_report(subject, units), self._clock()
        answers = await self._exchange([report])
        if not answers or not answers[0]:
            raise _unavailable(subject)
        subject.hear(report, answers[0], sent, self._clock())
        refused = [
            answer for name, answer in answers[0].items() if answer.given < report.asks[name].need
        ]
        return bool(refused) and all(answer.coming for answer in refused)

    def _next_report(self, subject: Subject, units: dict[LimitName, int] | None) -> Report:
        self._number += 1
        return subject.report(self._number, self._clock(), units)

    async def _exchange(self, reports: list[Report]) -> list[Answers]:
        """The bank's answers; none where it is away."""
        try:
            async with asyncio.timeout(CALL_WITHIN_S):
                answers = await self._lender.exchange(self._gateway, reports)
        except Exception as error:
            if not self._away:
                logger.warning("the bank of quota cannot be reached: %r", error)
            self._away = True
            return []
        self._away = False
        return answers

    async def _beat(self) -> None:
        """Report all subjects at every beat, and at once those of which others want units."""
        due = self._clock() + BEAT_S
        while True:
            try:
                async with asyncio.timeout(max(0.0, due - self._clock())):
                    await self._wake.wait()
                    subjects = list(self._urgent)
            except TimeoutError:
                due = self._clock() + BEAT_S
                subjects = list(self._subjects.values())
            self._wake.clear()
            self._urgent.clear()
            await self._report(subjects)

    async def _report(self, subjects: list[Subject]) -> None:
        # One that is asking reports by that, and may hold its lock for long.
        subjects = [subject for subject in subjects if not subject.asking]
        if not subjects:
            return
        async with AsyncExitStack() as locks:
            for subject in subjects:
                await locks.enter_async_context(subject.lock)
            reports, sent = [self._next_report(each, None) for each in subjects], self._clock()
            answers = await self._exchange(reports)
            now = self._clock()
            for subject, report, answer in zip(subjects, reports, answers, strict=False):
                subject.hear(report, answer, sent, now)
                if subject.is_empty(now):
                    self._subjects.pop(subject.name, None)
                    self._known.clear()
                elif subject.is_called_back(now):
                    self._urgent.add(subject)
                    self._wake.set()


def _unmet(needs: list[_Need], now: float) -> list[_Need]:
    return [need for need in needs if not need.is_met(now)]


def _subjects(needs: list[_Need]) -> set[Subject]:
    return {need.subject for need in needs}


def _let_go(needs: list[_Need]) -> None:
    for subject in _subjects(needs):
        subject.running -= 1


def _headers(needs: list[_Need], now: float) -> dict[str, str]:
    """Of requests and of tokens, those of the limit that has least left."""
    binding: dict[str, tuple[int, Holding]] = {}
    for need in needs:
        holding, left = need.holding, need.holding.remaining(now)
        counts = holding.rule.counts
        if counts != "slots" and (counts not in binding or left < binding[counts][0]):
            binding[counts] = (left, holding)
    headers = {}
    for counted, (left, holding) in binding.items():
        headers[f"x-ratelimit-limit-{counted}"] = str(holding.limit)
        headers[f"x-ratelimit-remaining-{counted}"] = str(left)
        headers[f"x-ratelimit-reset-{counted}"] = _duration(holding.whole_in_s(now))
    return headers


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 0s, 12s, 6m0s, 23h59m0s; rounded up."""
    minutes, left = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}h{minutes}m{left}s" if hours else f"{minutes}m{left}s" if minutes else f"{left}s"
    )


def _words(need: _Need) -> str:
    kind, _, name = need.subject.name.partition(":")
    return f"the {kind} {name!r}, {need.holding.rule.limit} = {need.holding.limit}"


def _too_large(need: _Need, needs: list[_Need], now: float) -> LimitedError:
    text = (
        f"this request asks for {need.units} tokens, prompt and max_tokens together, which is more "
        f"than the whole limit of {_words(need)}; lower max_tokens or shorten the prompt"
    )
    holding = need.holding
    return LimitedError(text, holding.rule.limit, holding.limit, None, _headers(needs, now))


def _limited(
    need: _Need, refusal: Refusal, needs: list[_Need], now: float
) -> LimitedError | LimiterUnavailableError:
    if not refusal.booked:
        return _unavailable(need.subject)
    wait_s = max(LEAST_RETRY_AFTER_S, refusal.retry_at - now)
    text = f"the limit of {_words(need)} is reached; retry in {math.ceil(wait_s)} s"
    holding = need.holding
    return LimitedError(text, holding.rule.limit, holding.limit, wait_s, _headers(needs, now))


def _unavailable(subject: Subject) -> LimiterUnavailableError:
    kind, _, name = subject.name.partition(":")
    return LimiterUnavailableError(
        f"the limits of the {kind} {name!r} cannot be checked now; retry shortly"
    )
