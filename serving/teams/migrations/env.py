"""What Alembic runs for every upgrade; the connection comes from `serving.teams.database`."""

from __future__ import annotations

from alembic import context

from serving.teams.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite changes a table by copying it, and does so within the transaction.
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
