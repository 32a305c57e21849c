"""The bank's state in the database of teams: one row for each limit that something is used of.

Leaves what the figures mean to `lending`.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from serving.teams.database import Database
from serving.teams.quota import Charge
from serving.teams.tables import quotas


class SqlQuotaStore:
    """A `QuotaStore` whose tables are up to date; calls raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self) -> Mapping[str, Charge]:
        """See `QuotaStore`."""
        wanted = sa.select(quotas.c.name, quotas.c.window_start, quotas.c.used)
        with self._database.read() as connection:
            rows = connection.execute(wanted.order_by(quotas.c.window_start)).all()
        return {name: Charge(start, used) for name, start, used in rows}

    def save(self, charges: Mapping[str, Charge]) -> None:
        """See `QuotaStore`; earlier windows of these names are dropped, as is what is unused."""
        rows = [
            {"name": name, "window_start": charge.window, "used": charge.used}
            for name, charge in charges.items()
            if charge.used
        ]
        old = sa.delete(quotas).where(quotas.c.name == sa.bindparam("old"))
        with self._database.write() as connection:
            if charges:
                connection.execute(old, [{"old": name} for name in charges])
            if rows:
                connection.execute(sa.insert(quotas), rows)
