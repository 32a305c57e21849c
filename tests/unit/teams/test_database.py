"""Opening a database, its transactions, and what a killed process leaves of a SQLite file."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from serving.teams import tables
from serving.teams.database import (
    DATABASE_VARIABLE,
    Database,
    database_url,
    open_database,
)
from serving.teams.errors import StoreError
from tests.unit.teams.postgres import Cluster

WRITE_FOREVER = """
import sys, itertools
import sqlalchemy as sa
from serving.teams import tables
from serving.teams.database import open_database
database = open_database(sys.argv[1])
database.upgrade()
rows = sa.insert(tables.quotas)
for number in itertools.count():
    with database.write() as connection:
        # More than the cache holds: a kill finds a transaction half-written.
        connection.exec_driver_sql("PRAGMA cache_size = 10")
        connection.execute(rows, [
            {"name": f"{number}-{part}-" + "x" * 200, "window_start": 0, "used": number}
            for part in range(500)
        ])
    print(number, flush=True)
"""
ROW = {"name": "a", "window_start": 0.0, "used": 1}


def names(database: Database) -> set[str]:
    with database.read() as connection:
        return set(connection.scalars(sa.select(tables.quotas.c.name)))


def test_a_transaction_is_written_whole(database: Database) -> None:
    with database.write() as connection:
        connection.execute(sa.insert(tables.quotas).values(ROW))
    assert names(database) == {"a"}


def test_a_transaction_that_fails_writes_nothing(database: Database) -> None:
    with pytest.raises(KeyError), database.write() as connection:
        connection.execute(sa.insert(tables.quotas).values(ROW))
        raise KeyError
    assert names(database) == set()


def test_writers_in_threads_that_read_first_do_not_fail_each_other(database: Database) -> None:
    with database.write() as connection:
        connection.execute(sa.insert(tables.quotas).values({**ROW, "used": 0}))
    failed: list[Exception] = []

    def count() -> None:
        try:
            for _ in range(10):
                with database.write() as connection:
                    query = sa.select(tables.quotas.c.used).with_for_update()
                    used = connection.scalar(query)
                    connection.execute(sa.update(tables.quotas).values(used=used + 1))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as connection:
        assert (failed, connection.scalar(sa.select(tables.quotas.c.used))) == ([], 40)


def test_a_key_of_no_team_is_refused_by_the_database(database: Database) -> None:
    values = {"id": "a", "team": "none", "name": "n", "digest": "d", "scopes": [], "limits": {}}
    with pytest.raises(StoreError), database.write() as connection:
        connection.execute(sa.insert(tables.keys).values(**values, created=0))


def test_an_error_shows_no_value_of_the_statement(database: Database) -> None:
    row = {**ROW, "name": "hidden"}
    with pytest.raises(StoreError) as caught, database.write() as connection:
        connection.execute(sa.insert(tables.quotas).values(row))
        connection.execute(sa.insert(tables.quotas).values(row))
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


def test_a_fault_of_the_program_shows_no_value_either(database: Database) -> None:
    row = {"at": 0, "actor": "hidden", "act": "a", "subject": "s", "detail": object()}
    with (
        pytest.raises((sa.exc.StatementError, TypeError)) as caught,
        database.write() as connection,
    ):
        connection.execute(sa.insert(tables.audit).values(row))
    assert "hidden" not in str(caught.value)


def test_the_default_is_a_file_in_the_home_that_only_its_owner_reads(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    database = open_database(database_url(home))
    database.upgrade()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()}
    database.close()
    assert "teams.db" in modes
    assert set(modes.values()) == {0o600}


def test_the_variable_names_another_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATABASE_VARIABLE, "postgresql://db/teams")
    assert database_url(tmp_path) == "postgresql://db/teams"


def test_the_password_is_never_shown() -> None:
    urls = (
        "postgresql://u:s3cret@127.0.0.1:1/d",
        "postgresql+psycopg://127.0.0.1:1/d?user=u&password=s3cret",
    )
    for url in urls:
        database = open_database(url)
        with pytest.raises(StoreError, match=r"cannot be used: .*127\.0\.0\.1") as caught:
            database.migration_state()
        told = "".join(traceback.format_exception(caught.value))
        assert "s3cret" not in told + database.shown + repr(database)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3cret", "not a database URL"),
        ("postgresql://u:s3cret@host:port/d", "not a database URL"),
        ("mysql://u:s3cret@host/d", "mysql is not supported"),
        ("postgresql+asyncpg://u:s3cret@host/d", r"postgresql\+asyncpg is not supported"),
        ("postgresql://u:p@s3cret@host/d", "with %40 for an @"),
        ("sqlite://s3cret/d", "a SQLite path lacks a slash"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_showing_it(url: str, problem: str) -> None:
    with pytest.raises(StoreError, match=f"{DATABASE_VARIABLE}: .*{problem}") as caught:
        open_database(url)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_a_url_may_set_how_long_a_connection_may_take(cluster: Cluster) -> None:
    with cluster.database() as empty:
        for url in (empty, f"{empty}&connect_timeout=9"):
            database = open_database(url)
            database.upgrade()
            assert database.migration_state().up_to_date
            database.close()


def test_a_missing_driver_is_told_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"pip install 'psycopg\[binary\]'"):
        open_database("postgresql://host/d")


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    path = tmp_path / "teams.db"
    path.write_text("no database, but long enough to be looked at as one" * 100)
    database = open_database(f"sqlite:///{path}")
    with pytest.raises(StoreError, match="file is not a database"):
        database.migration_state()
    database.close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/teams\.db: cannot be made or written"):
        open_database(f"sqlite:///{tmp_path}/file/teams.db")


@pytest.mark.parametrize("round_", range(4))
def test_a_killed_writer_leaves_a_sound_file_with_all_that_was_committed(
    tmp_path: Path, round_: int
) -> None:
    path = tmp_path / "teams.db"
    url = f"sqlite:///{path}"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOREVER, url],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    with writer:
        assert writer.stdout is not None
        committed = [int(writer.stdout.readline()) for _ in range(5)]
        # Somewhere in the sixth: it takes some 10 ms.
        time.sleep(0.003 * round_)
        writer.send_signal(signal.SIGKILL)
        committed += [int(line) for line in writer.stdout if line.endswith("\n")]
    assert writer.returncode == -signal.SIGKILL
    with contextlib.closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database = open_database(url)
    rows = Counter(name.partition("-")[0] for name in names(database))
    database.close()
    assert set(rows.values()) == {500}
    # The last transaction may have been committed and not told any more.
    told = [str(number) for number in committed]
    assert sorted(rows, key=int) in (told, [*told, str(len(told))])
