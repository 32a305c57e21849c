"""Migrations: from nothing to this program's tables, once, on both databases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from serving.teams import database as databases
from serving.teams.database import Database, open_database
from serving.teams.errors import StoreError
from serving.teams.tables import metadata
from tests.unit.teams.postgres import Cluster

UPGRADE = """
import sys
from serving.teams.database import open_database
print("ready", flush=True)
sys.stdin.readline()
print(",".join(open_database(sys.argv[1]).upgrade()))
"""


def test_migrations_make_the_tables_that_the_program_uses(database: Database) -> None:
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, metadata) == []


def test_a_table_that_no_migration_makes_is_noticed(database: Database) -> None:
    with database.write() as connection:
        connection.execute(sa.text("DROP TABLE prices"))
    with database.read() as connection:
        found = compare_metadata(MigrationContext.configure(connection), metadata)
    assert [change[0] for change in found] == ["add_table"]


def test_a_new_database_lacks_every_migration_until_it_is_upgraded(url: str) -> None:
    database = open_database(url)
    before = database.migration_state()
    applied = database.upgrade()
    after = database.migration_state()
    again = database.upgrade()
    database.close()
    assert (before.current, before.missing, before.newer) == (None, applied, False)
    assert not before.up_to_date
    assert after.up_to_date and after.current == applied[-1]
    assert again == ()


def test_a_database_of_a_newer_program_is_left_alone(database: Database) -> None:
    with database.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    assert database.migration_state().newer
    for act in (database.upgrade, database.prepare):
        with pytest.raises(StoreError, match=r"are at 9999, which a newer moe-serving made"):
            act()


def test_a_new_sqlite_file_is_prepared_unasked(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'teams.db'}")
    database.prepare()
    assert database.migration_state().up_to_date
    database.prepare()
    database.close()


def test_an_empty_postgresql_is_left_to_its_owner(cluster: Cluster) -> None:
    with cluster.database() as empty:
        database = open_database(empty)
        with pytest.raises(StoreError, match=r"lack 0001; .*run `moe-serving db upgrade`"):
            database.prepare()
        assert database.migration_state().current is None
        database.close()


def test_a_migration_that_fails_leaves_nothing_behind(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database(url)

    def fail_after(config: object, revision: str) -> None:
        upgrade(config, revision)  # type: ignore[arg-type]
        raise RuntimeError("half-way")

    upgrade = databases.command.upgrade
    monkeypatch.setattr(databases.command, "upgrade", fail_after)
    with pytest.raises(RuntimeError, match="half-way"):
        database.upgrade()
    with database.read() as connection:
        assert sa.inspect(connection).get_table_names() == []
    database.close()


def test_of_processes_that_upgrade_at_once_one_does_the_work(url: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", UPGRADE, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ended = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], ended
    applied = [output.strip() for output, _ in ended]
    assert sorted(applied)[:2] == ["", ""]
    assert max(applied).startswith("0001")
