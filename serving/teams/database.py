"""The database of teams, keys and usage: opening it, its transactions, its migrations.

SQLite in one file unless a URL names PostgreSQL. Calls block; callers on an event loop use a
thread. Owns what each of the two needs to be safe. Leaves the tables to `tables`, their history
to `migrations`, and what is written to the modules that write it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event, exc

from serving.teams.errors import StoreError

DATABASE_VARIABLE = "MOE_SERVING_DATABASE_URL"
_MIGRATIONS = Path(__file__).parent / "migrations"
_DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
_FORMS = "sqlite:////absolute/path/teams.db or postgresql+psycopg://user:password@host/name"
_PRAGMAS = (
    # How long a writer waits for the other one, ms.
    "busy_timeout = 15000",
    "journal_mode = WAL",
    # NORMAL survives a killed process, too, but after a power cut it may have lost what the
    # ledger's spool has let go of. Writes come in batches: the fsync costs little.
    "synchronous = FULL",
    "foreign_keys = ON",
)
# Any number that nothing else in the database locks.
_MIGRATION_LOCK = 0x6D6F65
# A PostgreSQL that went away without a word is noticed within half a minute; libpq's own
# options, which a URL may set otherwise.
_PATIENCE = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


@dataclass(frozen=True, slots=True)
class MigrationState:
    """How a database's tables stand to those of this program."""

    current: str | None
    """The last migration applied; None in a new database."""
    missing: tuple[str, ...]
    """Migrations to apply, in order."""
    newer: bool
    """Whether a later version of this program has changed the tables."""

    @property
    def up_to_date(self) -> bool:
        """Whether this program can use the tables."""
        return not self.newer and not self.missing


class Database:
    """One database; threads may share it. `shown` is its URL without the password."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        hidden = engine.url.difference_update_query(("password", "sslpassword"))
        self.shown = hidden.render_as_string(hide_password=True)
        self.embedded = engine.dialect.name == "sqlite"

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection that sees one state of the database; raises StoreError."""
        with self._told(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction, committed at the end of the block unless it raises; raises StoreError."""
        with self._told(), self._engine.connect() as connection:
            connection.execution_options(writes=True)
            with connection.begin():
                yield connection

    def migration_state(self) -> MigrationState:
        """Whether the tables are up to date; raises StoreError."""
        with self.read() as connection:
            return _state(connection)

    def upgrade(self) -> tuple[str, ...]:
        """Apply what is missing, all or nothing, and return it.

        Of several processes one works and the others wait for it. Raises StoreError.
        """
        with self.write() as connection:
            # SQLite's write transaction keeps the others out already.
            if not self.embedded:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            state = _state(connection)
            if state.newer:
                raise self._newer(state)
            if state.missing:
                config = _config()
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
            return state.missing

    def prepare(self) -> None:
        """Make the tables of a new SQLite file.

        Raises StoreError where any other database is not up to date: changing what holds data
        is for its owner to start.
        """
        state = self.migration_state()
        if state.newer:
            raise self._newer(state)
        if state.current is None and self.embedded:
            self.upgrade()
        elif state.missing:
            raise StoreError(
                f"the tables in {self.shown} lack {', '.join(state.missing)}; make a backup, "
                "then run `moe-serving db upgrade`"
            )

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._engine.dispose()

    def _newer(self, state: MigrationState) -> StoreError:
        return StoreError(
            f"the tables in {self.shown} are at {state.current}, which a newer moe-serving made; "
            "install that version here, too"
        )

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (exc.DBAPIError, exc.TimeoutError) as error:
            cause = error.orig if isinstance(error, exc.DBAPIError) else error
            said = str(cause).strip().partition("\n")[0]
            raise StoreError(
                f"the database {self.shown} cannot be used: {said}; "
                f"check {DATABASE_VARIABLE} and `moe-serving db status`"
            ) from None


def database_url(home: Path) -> str:
    """The URL in MOE_SERVING_DATABASE_URL, else that of `teams.db` in the folder `home`."""
    return os.environ.get(DATABASE_VARIABLE) or f"sqlite:///{home / 'teams.db'}"


def open_database(url: str) -> Database:
    """The database of this URL, reached at first use; a SQLite file is made where none is.

    Raises StoreError for a URL that is none, another kind of database or a missing driver.
    """
    parsed = _parse(url)
    options: dict[str, Any] = {"hide_parameters": True}
    if parsed.get_backend_name() == "sqlite":
        _make_file(Path(parsed.database or ""))
    else:
        patience = {name: _PATIENCE[name] for name in _PATIENCE.keys() - parsed.query.keys()}
        # Few connections: a cluster's gateways share what PostgreSQL has.
        options |= {
            "pool_pre_ping": True,
            "pool_size": 2,
            "max_overflow": 3,
            "connect_args": patience,
        }
    try:
        engine = sa.create_engine(parsed, **options)
    except ImportError:
        raise StoreError(
            f"{DATABASE_VARIABLE}: PostgreSQL needs psycopg; run pip install 'psycopg[binary]'"
        ) from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return Database(engine)


def _parse(url: str) -> sa.URL:
    """The URL with its driver; no text of an error holds any of it that may be a password."""
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError):
        raise StoreError(f"{DATABASE_VARIABLE}: not a database URL; write {_FORMS}") from None
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise StoreError(
            f"{DATABASE_VARIABLE}: {parsed.drivername} is not supported; write {_FORMS}"
        )
    if parsed.host and ("@" in parsed.host or parsed.get_backend_name() == "sqlite"):
        raise StoreError(
            f"{DATABASE_VARIABLE}: the part before the host holds an @, or a SQLite path lacks a "
            f"slash; write {_FORMS}, with %40 for an @ in the password"
        )
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise StoreError(f"{DATABASE_VARIABLE}: names no file; write {_FORMS}")
    return parsed.set(drivername=driver)


def _make_file(path: Path) -> None:
    """An empty file for its owner only, which SQLite's own beside it take after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be made or written ({(error.strerror or str(error)).lower()}); "
            f"name another file in {DATABASE_VARIABLE}"
        ) from None


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # Transactions begin in `_begin_sqlite`; Python's own module would begin some by itself.
    connection.isolation_level = None
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads first and writes then would fail at once where another one writes.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _config() -> Config:
    config = Config()
    # As it is: in Alembic's options a % begins the name of another.
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    return config


def _state(connection: sa.Connection) -> MigrationState:
    current = MigrationContext.configure(connection).get_current_revision()
    script = ScriptDirectory.from_config(_config())
    known = [revision.revision for revision in script.walk_revisions()][::-1]
    if current is None:
        return MigrationState(None, tuple(known), newer=False)
    if current not in known:
        return MigrationState(current, (), newer=True)
    return MigrationState(current, tuple(known[known.index(current) + 1 :]), newer=False)
