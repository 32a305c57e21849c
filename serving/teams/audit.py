"""Who changed what of teams, keys and prices; never a key, a secret or a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from serving.teams import tables
from serving.teams.database import Database

LOCAL = "local"
"""The actor where a command on the machine asked."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One administrative act."""

    at: float
    """Unix time."""
    actor: str
    """Id of the key that asked, or `local`."""
    act: str
    subject: str
    detail: Mapping[str, Any]


def record(connection: sa.Connection, entry: AuditEntry) -> None:
    """Write an entry in the transaction that makes the change."""
    connection.execute(
        sa.insert(tables.audit).values(
            at=entry.at,
            actor=entry.actor,
            act=entry.act,
            subject=entry.subject,
            detail=dict(entry.detail),
        )
    )


def last_entries(database: Database, count: int = 100) -> tuple[AuditEntry, ...]:
    """The last `count` entries, newest first; raises StoreError."""
    table = tables.audit
    columns = (table.c.at, table.c.actor, table.c.act, table.c.subject, table.c.detail)
    query = sa.select(*columns).order_by(table.c.id.desc()).limit(count)
    with database.read() as connection:
        return tuple(AuditEntry(*row) for row in connection.execute(query))
