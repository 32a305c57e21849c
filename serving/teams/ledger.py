"""The usage ledger: each request of a team once, in the database of teams.

Owns moving records there off the request path, and what they cost. Leaves keeping them until
then to `spool`, reading counts from replies to `metering`, and adding them up to `usage_report`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from serving.teams.caller import Caller
from serving.teams.database import Database
from serving.teams.errors import StoreError
from serving.teams.metering import Usage
from serving.teams.spool import Spool, UsageRecord
from serving.teams.tables import prices, usage

logger = logging.getLogger(__name__)

STORE_EVERY_S = 1.0
NOTE_EVERY_S = 1.0
"""A killed gateway's running requests lack at most the tokens of so long."""
ROWS_AT_ONCE = 500
# What an INTEGER of PostgreSQL holds; one senseless count must not hold up all other rows.
_MOST_TOKENS = 2**31 - 1
_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens", "draft_tokens", "accepted_tokens")


class UsageStore(Protocol):
    """Where the rows end up."""

    def write(self, records: Sequence[UsageRecord]) -> None:
        """Store those that are not there yet, by their id, all or none.

        Blocks; raises StoreError.
        """


class SqlUsageStore:
    """A `UsageStore` in a database whose tables are up to date.

    A row's cost is by the model's price when the row is written.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def write(self, records: Sequence[UsageRecord]) -> None:
        """See `UsageStore`."""
        insert = sqlite.insert if self._database.embedded else postgresql.insert
        statement = insert(usage).on_conflict_do_nothing(index_elements=[usage.c.id])
        models = {record.model for record in records}
        columns = (prices.c.model, prices.c.input, prices.c.cached, prices.c.output)
        wanted = sa.select(*columns).where(prices.c.model.in_(models))
        with self._database.write() as connection:
            priced = {model: tuple(each) for model, *each in connection.execute(wanted)}
            connection.execute(statement, [_row(record, priced) for record in records])


class Entry:
    """A running request's place in the ledger; `end` is its last call."""

    def __init__(self, spool: Spool, record: UsageRecord, started: float) -> None:
        self._spool = spool
        self._record = record
        self._started = started
        self._noted = time.perf_counter()
        self._over = False
        spool.append(record, ended=False)

    def answered(self, model: str | None, variant: str, status: int) -> None:
        """Say who answers, with which status of HTTP; another model than was asked for, or None."""
        model = model or self._record.model
        self._record = self._record._replace(model=model, variant=variant, status=status)

    def first_token(self) -> None:
        """Note that the first part of the reply is here."""
        self._record = self._record._replace(ttft_s=time.perf_counter() - self._started)

    @property
    def due(self) -> bool:
        """Whether it is time to `note` again; cheap enough to ask with every part of a reply."""
        return time.perf_counter() - self._noted >= NOTE_EVERY_S

    def note(self, used: Usage) -> None:
        """Keep what was used so far, in case this process is killed."""
        self._noted = time.perf_counter()
        self._spool.append(self._with(used), ended=False)

    def end(self, used: Usage, status: int) -> None:
        """Keep what the request used; calls after the first do nothing."""
        if not self._over:
            self._over = True
            record = self._with(used)._replace(status=status, complete=used.complete)
            self._spool.append(record, ended=True)

    def _with(self, used: Usage) -> UsageRecord:
        return self._record._replace(
            prompt_tokens=used.prompt_tokens or 0,
            cached_tokens=used.cached_tokens,
            output_tokens=used.output_tokens or 0,
            draft_tokens=used.draft_tokens,
            accepted_tokens=used.accepted_tokens,
            duration_s=time.perf_counter() - self._started,
        )


class Ledger:
    """Writes what goes through one gateway process; `start` and `close` it in its event loop.

    A store that is away costs requests nothing: the spool keeps their records until it is back.
    """

    def __init__(
        self, spool: Spool, store: UsageStore, now: Callable[[], float] = time.time
    ) -> None:
        self._spool = spool
        self._store = store
        self._now = now
        self._away = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Store once a second from now on, first what killed gateways left behind."""
        self._task = asyncio.create_task(self._keep_storing())

    async def close(self) -> None:
        """Store the rest, or leave it to the next gateway."""
        self._closing.set()
        if self._task is not None:
            await self._task
        await self.store()
        self._spool.close()

    def admit(
        self, caller: Caller, model: str, variant: str, request_id: str, started: float
    ) -> Entry:
        """Begin the record of a request that came in at `started`, by `time.perf_counter`."""
        record = UsageRecord(
            id=self._spool.new_id(),
            request_id=request_id,
            at=self._now() - (time.perf_counter() - started),
            team=caller.team,
            key_id=caller.key_id,
            model=model,
            variant=variant,
        )
        return Entry(self._spool, record, started)

    async def store(self) -> None:
        """Move what has ended into the store; where that fails, the next call tries again."""
        self._spool.seal()
        try:
            await asyncio.to_thread(self._move)
        except Exception as error:
            if not self._away:
                # What is not the store's own complaint is a fault of ours, for the log.
                fault = None if isinstance(error, StoreError) else error
                logger.error("usage waits in the spool: %s", error, exc_info=fault)
            self._away = True
        else:
            if self._away:
                logger.warning("usage is stored again")
            self._away = False

    async def _keep_storing(self) -> None:
        while not self._closing.is_set():
            await self.store()
            try:
                await asyncio.wait_for(self._closing.wait(), STORE_EVERY_S)
            except TimeoutError:
                continue

    def _move(self) -> None:
        # What goes on in newer files must be on the disk before older ones go.
        self._spool.sync()
        with closing(self._spool.pending()) as segments:
            for segment in segments:
                for rows in _in_batches(segment.records):
                    self._store.write(rows)
                self._spool.done(segment)


def _in_batches(records: Sequence[UsageRecord]) -> Iterator[Sequence[UsageRecord]]:
    for start in range(0, len(records), ROWS_AT_ONCE):
        yield records[start : start + ROWS_AT_ONCE]


def _row(record: UsageRecord, priced: dict[str, tuple[float, ...]]) -> dict[str, Any]:
    row = record._asdict()
    for name in _COUNTS:
        if row[name] is not None:
            row[name] = min(row[name], _MOST_TOKENS)
    row["cost"] = _cost(record, priced[record.model]) if record.model in priced else None
    return row


def _cost(record: UsageRecord, per_million: tuple[float, ...]) -> float:
    uncached = record.prompt_tokens - record.cached_tokens
    counts = (uncached, record.cached_tokens, record.output_tokens)
    return sum(map(float.__mul__, per_million, map(float, counts))) / 1e6
