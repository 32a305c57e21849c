"""Databases for the tests of this room: each test that takes one runs on SQLite and PostgreSQL."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from serving.teams.database import Database, open_database
from tests.unit.teams import postgres

SECRET = b"s" * 32


@dataclass
class Clock:
    at: float = 1_000_000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def cluster() -> Iterator[postgres.Cluster]:
    """The one PostgreSQL cluster of a run."""
    programs = postgres.programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with postgres.running_cluster(programs) as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'teams.db'}"
    else:
        cluster: postgres.Cluster = request.getfixturevalue("cluster")
        with cluster.database() as empty:
            yield empty


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """A database whose tables are up to date."""
    opened = open_database(url)
    opened.upgrade()
    yield opened
    opened.close()


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Serve's log is told; other tests may have given that logger handlers of its own."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", lambda record: messages.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("ray.serve"), "handlers", [handler])
    return messages
