"""Rows in the database of teams, against what requests said of themselves."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa

from serving.teams import ledger as ledger_module
from serving.teams.accounts import Accounts, Price
from serving.teams.caller import Caller
from serving.teams.database import Database
from serving.teams.errors import StoreError
from serving.teams.ledger import Entry, Ledger, SqlUsageStore
from serving.teams.metering import Usage
from serving.teams.spool import Spool, UsageRecord
from serving.teams.tables import usage

CALLER = Caller("search", "abcd1234", frozenset({"inference"}), None, None)
USED = Usage(
    prompt_tokens=100,
    cached_tokens=40,
    output_tokens=30,
    draft_tokens=20,
    accepted_tokens=10,
    complete=True,
)
ROOT = Path(__file__).parents[3]
# Stores all the time, and says of each request that has ended how many tokens it had.
GATEWAY = """
import asyncio, sys, time
from pathlib import Path
from serving.teams import ledger
from serving.teams.caller import Caller
from serving.teams.database import open_database
from serving.teams.metering import Usage
from serving.teams.spool import Spool
ledger.STORE_EVERY_S = 0.02
CALLER = Caller("search", "abcd1234", frozenset({"inference"}), None, None)
async def main(url, folder):
    store = ledger.SqlUsageStore(open_database(url))
    running = ledger.Ledger(Spool(Path(folder)), store)
    running.start()
    for number in range(10**9):
        entry = running.admit(CALLER, "qwen", "mtp", f"{sys.argv[3]}-{number}", time.perf_counter())
        await asyncio.sleep(0)
        entry.end(Usage(output_tokens=number, complete=True), 200)
        print(f"{sys.argv[3]}-{number}", number, flush=True)
asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


class Shelf:
    """A store in memory that can be away."""

    def __init__(self) -> None:
        self.rows: dict[str, UsageRecord] = {}
        self.away = False
        self.batches: list[int] = []

    def write(self, records: Sequence[UsageRecord]) -> None:
        if self.away:
            raise StoreError("the database is away")
        self.batches.append(len(records))
        for record in records:
            self.rows.setdefault(record.id, record)


def admit(ledger: Ledger, request_id: str = "r") -> Entry:
    return ledger.admit(CALLER, "qwen", "mtp", request_id, time.perf_counter())


def rows_of(database: Database) -> list[dict[str, object]]:
    with database.read() as connection:
        found = connection.execute(sa.select(usage).order_by(usage.c.request_id)).mappings()
        return [dict(row) for row in found]


def record(name: str, **values: object) -> UsageRecord:
    fields = {"request_id": name, "at": 1.0, "team": "search", "key_id": "k", "model": "qwen"}
    return UsageRecord(**{"id": name, **fields, "variant": "mtp", **values})  # type: ignore[arg-type]


async def test_a_finished_request_is_one_row_with_all_its_columns(
    database: Database, tmp_path: Path
) -> None:
    ledger = Ledger(Spool(tmp_path / "spool"), SqlUsageStore(database), now=lambda: 1000.0)
    entry = ledger.admit(CALLER, "qwen", "mtp", "r1", time.perf_counter() - 2)
    entry.answered("qwen-small", "plain", 200)
    entry.first_token()
    entry.note(Usage(prompt_tokens=100, output_tokens=5))
    entry.end(USED, 200)
    entry.end(Usage(), 500)
    await ledger.close()
    [row] = rows_of(database)
    assert 997 < row.pop("at") <= 998  # type: ignore[operator]
    assert 2 <= row.pop("ttft_s") <= row.pop("duration_s")  # type: ignore[operator]
    assert row.pop("id") != "r1"
    assert row == {
        "request_id": "r1",
        "team": "search",
        "key_id": "abcd1234",
        "model": "qwen-small",
        "variant": "plain",
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "output_tokens": 30,
        "draft_tokens": 20,
        "accepted_tokens": 10,
        "status": 200,
        "complete": True,
        "cost": None,
    }


async def test_requests_with_one_request_id_are_charged_each(tmp_path: Path) -> None:
    shelf = Shelf()
    ledger = Ledger(Spool(tmp_path), shelf)
    for _ in range(3):
        admit(ledger, "same").end(USED, 200)
    await ledger.close()
    assert [row.output_tokens for row in shelf.rows.values()] == [30, 30, 30]


def test_rows_that_are_there_already_stay_as_they_are(database: Database) -> None:
    store = SqlUsageStore(database)
    store.write([record("a", output_tokens=1)])
    store.write([record("a", output_tokens=2), record("b", output_tokens=3)])
    assert [row["output_tokens"] for row in rows_of(database)] == [1, 3]


def test_the_cost_is_that_of_the_price_when_the_row_is_written(database: Database) -> None:
    accounts, store = Accounts(database, b"secret" * 8), SqlUsageStore(database)
    counts = {"prompt_tokens": 1_000_000, "cached_tokens": 400_000, "output_tokens": 500_000}
    accounts.set_price("qwen", Price(input=2, cached=0.5, output=8))
    store.write([record("a", **counts), record("other", model="other", **counts)])
    accounts.set_price("qwen", Price(input=200, cached=50, output=800))
    store.write([record("a", **counts)])
    costs = {row["request_id"]: row["cost"] for row in rows_of(database)}
    assert costs == {"a": pytest.approx(0.6 * 2 + 0.4 * 0.5 + 0.5 * 8), "other": None}


def test_a_senseless_count_does_not_hold_up_other_rows(database: Database) -> None:
    SqlUsageStore(database).write([record("a", prompt_tokens=10**15), record("b", output_tokens=3)])
    rows = rows_of(database)
    assert [row["prompt_tokens"] for row in rows] == [2**31 - 1, 0]
    assert rows[1]["output_tokens"] == 3


async def test_a_store_that_is_away_loses_nothing_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    shelf.away = True
    ledger = Ledger(Spool(tmp_path, segment_bytes=1000), shelf)
    for _ in range(3):
        for _ in range(5):
            admit(ledger).end(USED, 200)
        await ledger.store()
    assert shelf.rows == {}
    shelf.away = False
    await ledger.store()
    assert len(shelf.rows) == 15
    await ledger.close()
    assert caplog.text.count("usage waits in the spool: the database is away") == 1
    assert caplog.text.count("usage is stored again") == 1


async def test_rows_that_were_stored_but_not_let_go_of_are_there_once(tmp_path: Path) -> None:
    shelf, spool = Shelf(), Spool(tmp_path)
    ledger = Ledger(spool, shelf)
    admit(ledger).end(USED, 200)
    spool.seal()
    # As a process would that is killed after the commit.
    for segment in spool.pending():
        shelf.write(segment.records)
    await ledger.close()
    assert (len(shelf.rows), shelf.batches) == (1, [1, 1])


async def test_a_request_that_runs_at_the_end_is_charged_by_the_next_gateway(
    tmp_path: Path,
) -> None:
    shelf = Shelf()
    first = Ledger(Spool(tmp_path), shelf)
    entry = admit(first)
    entry.answered("qwen", "mtp", 200)
    entry.note(Usage(prompt_tokens=100, output_tokens=12))
    await first.close()
    assert shelf.rows == {}
    second = Ledger(Spool(tmp_path), shelf)
    await second.close()
    [row] = shelf.rows.values()
    assert (row.output_tokens, row.status, row.complete) == (12, 200, False)


async def test_rows_are_stored_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "ROWS_AT_ONCE", 4)
    shelf = Shelf()
    ledger = Ledger(Spool(tmp_path), shelf)
    for _ in range(10):
        admit(ledger).end(USED, 200)
    await ledger.close()
    assert shelf.batches == [4, 4, 2]


async def test_a_started_ledger_stores_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "STORE_EVERY_S", 0.01)
    shelf = Shelf()
    ledger = Ledger(Spool(tmp_path), shelf)
    ledger.start()
    admit(ledger).end(USED, 200)
    async with asyncio.timeout(20):
        while not shelf.rows:
            await asyncio.sleep(0.01)
    await ledger.close()
    assert len(shelf.rows) == 1


async def test_a_note_is_due_after_a_while_and_then_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(Spool(tmp_path), Shelf())
    entry = admit(ledger)
    monkeypatch.setattr(ledger_module, "NOTE_EVERY_S", 1000)
    assert not entry.due
    monkeypatch.setattr(ledger_module, "NOTE_EVERY_S", 0)
    assert entry.due
    entry.note(USED)
    monkeypatch.setattr(ledger_module, "NOTE_EVERY_S", 1000)
    assert not entry.due
    await ledger.close()


async def test_killed_gateways_lose_no_row_and_write_none_twice(
    url: str, database: Database, tmp_path: Path
) -> None:
    said: dict[str, int] = {}
    for gateway in ("first", "second"):
        command = [sys.executable, "-c", GATEWAY, url, str(tmp_path / "spool"), gateway]
        running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert running.stdout is not None
        lines = [running.stdout.readline()]
        while len(lines) < 400:
            lines.append(running.stdout.readline())
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        lines += running.stdout.readlines()
        running.stdout.close()
        whole = [line.split() for line in lines if line.endswith("\n")]
        said |= {name: int(tokens) for name, tokens in whole}
    heir = Ledger(Spool(tmp_path / "spool"), SqlUsageStore(database))
    await heir.close()
    rows = rows_of(database)
    by_name = {str(row["request_id"]): row["output_tokens"] for row in rows}
    assert len(by_name) == len(rows)
    assert {name: by_name[name] for name in said} == said
    assert len(rows) - len(said) <= 2
