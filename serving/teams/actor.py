"""The bank of quota as a Ray actor, of which a stack has one.

Owns the actor's life: it loads the bank from the store when it is first asked, saves what is lent
before it is used, and starts again by itself where its process or node has died. Leaves all
reckoning to `lending`.

Where the store cannot be written, budgets lend nothing more. The other limits go on: they are
exact then, too, unless the actor dies before the store is back; its successor would for a minute
not know what they have lent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from serving.teams.lending import Bank
from serving.teams.quota import Answers, QuotaStore, Report, Usage
from serving.teams.windows import RULE_OF, Instant, LimitName

logger = logging.getLogger("ray.serve")

ACTOR_NAME = "quota-bank"
# How often what was given back is written, and silent gateways are counted out, seconds.
SWEEP_S = 5.0
# A gateway waits no longer than this for a write.
SAVE_WITHIN_S = 1.0


def _now() -> Instant:
    return Instant(time.monotonic(), time.time())


class QuotaBank:
    """One bank on one store; `open_store` is called in the actor, and may block.

    A store that cannot be read makes every call raise, until it can.
    """

    def __init__(
        self, open_store: Callable[[], QuotaStore], clock: Callable[[], Instant] = _now
    ) -> None:
        self._open_store = open_store
        self._clock = clock
        self._store: QuotaStore | None = None
        self._bank: Bank | None = None
        self._loading = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._failed = False
        """Whether the last write failed or hangs; the sweep finds out when the store is back."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self) -> None:
        """Load the bank: what the store has without a gateway is free the sooner."""
        await self._loaded()

    async def exchange(self, gateway: str, reports: list[Report]) -> list[Answers]:
        """See `Lender`; raises what the store raises where it could not be read yet."""
        bank = await self._loaded()
        answers = bank.exchange(gateway, reports, self._clock())
        lent = any(answer.given for each in answers for answer in each.values())
        if lent and bank.owing() and not await self._save_soon(bank):
            return [_without_budgets(each) for each in answers]
        return answers

    async def usage(self, subject: str) -> dict[LimitName, Usage]:
        """What is used of the limits of `team:<name>` or `key:<id>`; see `exchange`."""
        return (await self._loaded()).usage(subject)

    async def _loaded(self) -> Bank:
        async with self._loading:
            if self._bank is None:
                self._store = await asyncio.to_thread(self._open_store)
                charges = await asyncio.to_thread(self._store.load)
                self._bank = Bank(charges, self._clock())
                self._keep(self._sweep(self._store, self._bank))
            return self._bank

    async def _save_soon(self, bank: Bank) -> bool:
        """Write what is lent; returns whether it was written in time."""
        if self._failed or self._store is None:
            return False
        saving = self._keep(self._save(self._store, bank, sweep=False))
        await asyncio.wait({saving}, timeout=SAVE_WITHIN_S)
        if not saving.done():
            self._failed = True
        return not self._failed

    async def _save(self, store: QuotaStore, bank: Bank, *, sweep: bool) -> None:
        # One at a time, and never left before its end: an older write must not come last.
        async with self._saving:
            charges = bank.changed() if sweep else bank.owing()
            # After a failure it is tried in any case, or nobody would see that the store is back.
            if not charges and not self._failed:
                return
            try:
                await asyncio.to_thread(store.save, charges)
            except Exception as error:
                if not self._failed:
                    logger.warning("the quota store cannot be written: %r", error)
                self._failed = True
            else:
                self._failed = False
                bank.mark_saved(charges)

    async def _sweep(self, store: QuotaStore, bank: Bank) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            bank.sweep(self._clock())
            await self._save(store, bank, sweep=True)

    def _keep(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _without_budgets(answers: Answers) -> Answers:
    """The answers, with nothing lent that a restarted bank would have to know for long."""
    return {
        limit: replace(answer, given=0, booked=False)
        if answer.given and RULE_OF[limit].period is not None
        else answer
        for limit, answer in answers.items()
    }


class RayLender:
    """The actor as a gateway reaches it; see `Lender`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def exchange(self, gateway: str, reports: list[Report]) -> list[Answers]:
        """See `QuotaBank.exchange`; raises Ray's errors where the actor is away."""
        answers: list[Answers] = await self._handle.exchange.remote(gateway, reports)
        return answers

    async def usage(self, subject: str) -> dict[LimitName, Usage]:
        """See `QuotaBank.usage`."""
        used: dict[LimitName, Usage] = await self._handle.usage.remote(subject)
        return used


def quota_bank(open_store: Callable[[], QuotaStore], namespace: str) -> RayLender:
    """The bank of this namespace, started where there is none; it ends with the Ray cluster.

    `open_store` is pickled: a function of a module, that finds its database's URL by itself.
    """
    actor = ray.remote(QuotaBank).options(
        name=ACTOR_NAME,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
    )
    handle = actor.remote(open_store)
    handle.load.remote()
    return RayLender(handle)
