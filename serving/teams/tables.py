"""The tables of keys, teams, usage and quotas, as SQLAlchemy and Alembic read them.

Times are Unix seconds, so that SQLite and PostgreSQL compare and group them alike. Leaves opening
a database to `database`, and what may be written to the modules that write it.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
# SQLite gives a key of its own to INTEGER only.
_SERIAL = BigInteger().with_variant(Integer, "sqlite")

teams = Table(
    "teams",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("priority", String(16)),
    Column("limits", JSON, nullable=False),
    Column("created", Double, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    # The key's own readable part, shown as `msk_<id>`.
    Column("id", String(8), primary_key=True),
    Column("team", ForeignKey("teams.name"), nullable=False, index=True),
    Column("name", String(64), nullable=False),
    # HMAC-SHA-256 in hexadecimal; the key itself is nowhere.
    Column("digest", String(64), nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    # NULL: every model.
    Column("models", JSON(none_as_null=True)),
    Column("limits", JSON, nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double),
    Column("revoked_at", Double),
    Column("replaced_by", ForeignKey("keys.id")),
)

usage = Table(
    "usage",
    metadata,
    # The gateway's own, one per request: clients choose `request_id`, and one that sends the
    # same again and again is charged each time.
    Column("id", String(64), primary_key=True),
    Column("request_id", String(128), nullable=False),
    # When the request came in.
    Column("at", Double, nullable=False),
    # No foreign keys: a row must be written whatever became of the team.
    Column("team", String(64), nullable=False),
    Column("key_id", String(8), nullable=False),
    Column("model", String(255), nullable=False),
    Column("variant", String(255), nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    # NULL: the engine did not tell.
    Column("draft_tokens", Integer),
    Column("accepted_tokens", Integer),
    # NULL: no token came.
    Column("ttft_s", Double),
    Column("duration_s", Double, nullable=False),
    # Of HTTP.
    Column("status", Integer, nullable=False),
    # Whether the reply ended by itself; a cut one has what the engine had generated.
    Column("complete", Boolean, nullable=False),
    # NULL: the model had no price.
    Column("cost", Double),
    Index(None, "team", "at"),
    Index(None, "at"),
)

# Per million tokens, in whatever currency is written.
prices = Table(
    "prices",
    metadata,
    Column("model", String(255), primary_key=True),
    Column("input", Double, nullable=False),
    Column("cached", Double, nullable=False),
    Column("output", Double, nullable=False),
)

# What was used of a limit in one of its windows, to go on from after a restart.
quotas = Table(
    "quotas",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("window_start", Double, primary_key=True),
    Column("used", BigInteger, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", _SERIAL, primary_key=True),
    Column("at", Double, nullable=False, index=True),
    # The id of the key that asked, or `local` for a command on the machine.
    Column("actor", String(64), nullable=False),
    Column("act", String(32), nullable=False),
    Column("subject", String(255), nullable=False),
    Column("detail", JSON, nullable=False),
)
