"""Gateways, a bank of quota and its store in virtual time, with all that can go wrong between them.

Time passes only where nothing else is left to do, so a day takes as long as what happens in it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from serving.teams.actor import QuotaBank
from serving.teams.caller import Caller, Limits
from serving.teams.limiter import Grant, LimitedError, Limiter, LimiterUnavailableError
from serving.teams.quota import Answers, Charge, Report
from serving.teams.windows import Instant

Result = TypeVar("Result")
# 2 January 2026, 00:00 UTC.
MIDNIGHT = 1_767_312_000.0


class _Selector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits for something that never comes"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer, and whose threads are calls."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        # Timers due at the very moment must count as due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class MemoryStore:
    """A store that outlives the bank; `broken` makes its calls fail."""

    def __init__(self) -> None:
        self.charges: dict[str, Charge] = {}
        self.broken = False
        self.saves = 0

    def load(self) -> Mapping[str, Charge]:
        self._check()
        return dict(self.charges)

    def save(self, charges: Mapping[str, Charge]) -> None:
        self._check()
        self.saves += 1
        self.charges.update(charges)

    def _check(self) -> None:
        if self.broken:
            raise OSError("the store is broken")


class Link:
    """A gateway's way to the bank: slow, and losing what it is told to lose."""

    def __init__(self, world: World, delay: Callable[[], float]) -> None:
        self.cut = False
        self.lose_answers = 0
        self.calls: list[list[str]] = []
        self._world = world
        self._delay = delay

    async def exchange(self, gateway: str, reports: list[Report]) -> list[Answers]:
        self.calls.append([report.subject for report in reports])
        bank = self._world.bank
        # As when the caller gives up: the call goes on all the same.
        call = asyncio.ensure_future(self._call(bank, gateway, reports))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(call)

    async def _call(
        self, bank: QuotaBank | None, gateway: str, reports: list[Report]
    ) -> list[Answers]:
        await asyncio.sleep(self._delay())
        if self.cut or bank is None or bank is not self._world.bank:
            raise ConnectionError("the bank is away")
        answers = await bank.exchange(gateway, reports)
        await asyncio.sleep(self._delay())
        if self.lose_answers:
            self.lose_answers -= 1
            await asyncio.sleep(30)
            raise ConnectionError("the answer was lost")
        if self.cut or bank is not self._world.bank:
            raise ConnectionError("the bank is away")
        return answers


@dataclass
class Gateway:
    link: Link
    limiter: Limiter
    tasks: set[asyncio.Task[str]] = field(default_factory=set)
    alive: bool = True


@dataclass
class Admitted:
    """One admission as an onlooker sees it."""

    team: str
    at: float
    day: float
    """Start of the day that its tokens were taken of."""
    tokens: int
    running: bool = True


class World:
    """Everything; `await` its methods inside `in_virtual_time`."""

    def __init__(
        self,
        gateways: int,
        limits: Mapping[str, Limits],
        delay: Callable[[], float] = lambda: 0.001,
    ) -> None:
        self.limits = limits
        self.store = MemoryStore()
        self.wall = MIDNIGHT
        self.admitted: list[Admitted] = []
        self.exceeded: list[str] = []
        """What was over its limit after an admission: what no story may leave."""
        self._delay = delay
        self._loop = asyncio.get_running_loop()
        self.bank: QuotaBank | None = None
        self.start_bank()
        self.gateways = [self._gateway() for _ in range(gateways)]

    def _gateway(self) -> Gateway:
        link = Link(self, self._delay)
        return Gateway(link, Limiter(link, clock=self._loop.time))

    @property
    def now(self) -> Instant:
        return Instant(self._loop.time(), self.wall + self._loop.time())

    def start_bank(self) -> None:
        self.bank = QuotaBank(lambda: self.store, clock=lambda: self.now)
        # A store that cannot be read is the business of whoever asks.
        self._loading = asyncio.ensure_future(self.bank.load())
        self._loading.add_done_callback(lambda done: done.cancelled() or done.exception())

    def kill_bank(self) -> None:
        if self.bank is not None:
            for task in self.bank._tasks:
                task.cancel()
        self.bank = None

    def caller(self, team: str) -> Caller:
        return Caller(
            team=team,
            key_id=f"k{team}",
            scopes=frozenset({"inference"}),
            models=None,
            priority=None,
            team_limits=self.limits[team],
        )

    def kill_gateway(self, index: int) -> None:
        """End it without a word, and start another one."""
        dead = self.gateways[index]
        dead.alive = False
        dead.link.cut = True
        for task in dead.tasks:
            task.cancel()
        if dead.limiter._beating is not None:
            dead.limiter._beating.cancel()
        self.gateways[index] = self._gateway()

    async def admit(self, gateway: int, team: str, tokens: int = 1) -> Grant:
        return await self.gateways[gateway].limiter.admit(self.caller(team), tokens)

    def send(self, index: int, team: str, tokens: int, used: int, lasts_s: float) -> None:
        """Start a request that ends by itself; `used` below 0: it is cancelled, untold."""
        gateway = self.gateways[index]
        task = asyncio.ensure_future(self._request(gateway, team, tokens, used, lasts_s))
        gateway.tasks.add(task)
        task.add_done_callback(gateway.tasks.discard)

    async def _request(
        self, gateway: Gateway, team: str, tokens: int, used: int, lasts_s: float
    ) -> str:
        try:
            grant = await gateway.limiter.admit(self.caller(team), tokens)
        except LimitedError as error:
            return error.limit
        except LimiterUnavailableError:
            return "away"
        seen = self._note(gateway, team, tokens)
        try:
            with grant:
                await asyncio.sleep(lasts_s)
                if used >= 0 and gateway.alive:
                    grant.settle(used, 0)
                    seen.tokens = min(seen.tokens, used)
        finally:
            seen.running = False
        return "done"

    def _note(self, gateway: Gateway, team: str, tokens: int) -> Admitted:
        holding = gateway.limiter._subjects[f"team:{team}"].holdings.get("tokens_per_day")
        day = holding._start if holding is not None else 0.0
        self.admitted.append(Admitted(team, self._loop.time(), day, tokens))
        self._check(team)
        return self.admitted[-1]

    def used(self, team: str, within_s: float = 60.0) -> dict[str, int]:
        """What an onlooker counts of each limit now."""
        own = [each for each in self.admitted if each.team == team]
        recent = [each for each in own if self._loop.time() - each.at < within_s]
        day = max((each.day for each in own), default=0.0)
        return {
            "concurrent_requests": sum(each.running for each in own),
            "requests_per_minute": len(recent),
            "tokens_per_minute": sum(each.tokens for each in recent),
            "tokens_per_day": sum(each.tokens for each in own if each.day == day),
        }

    def _check(self, team: str) -> None:
        for name, count in self.used(team).items():
            limit = getattr(self.limits[team], name)
            if limit is not None and count > limit:
                self.exceeded.append(f"{team}, {name}: {count} of {limit}")

    async def settle_down(self) -> None:
        """Until no request runs."""
        while tasks := [task for gateway in self.gateways for task in gateway.tasks]:
            await asyncio.wait(tasks)
