"""Teams, keys, usage, prices, quotas and the audit log.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the first tables."""
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("act", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_at"), "audit", ["at"], unique=False)
    op.create_table(
        "prices",
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("input", sa.Double(), nullable=False),
        sa.Column("cached", sa.Double(), nullable=False),
        sa.Column("output", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_prices")),
    )
    op.create_table(
        "quotas",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("window_start", sa.Double(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", "window_start", name=op.f("pk_quotas")),
    )
    op.create_table(
        "teams",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("priority", sa.String(length=16), nullable=True),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_teams")),
    )
    op.create_table(
        "usage",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=8), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("variant", sa.String(length=255), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("draft_tokens", sa.Integer(), nullable=True),
        sa.Column("accepted_tokens", sa.Integer(), nullable=True),
        sa.Column("ttft_s", sa.Double(), nullable=True),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("cost", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage")),
    )
    op.create_index(op.f("ix_usage_at"), "usage", ["at"], unique=False)
    op.create_index(op.f("ix_usage_team_at"), "usage", ["team", "at"], unique=False)
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=8), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("models", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("replaced_by", sa.String(length=8), nullable=True),
        sa.ForeignKeyConstraint(["replaced_by"], ["keys.id"], name=op.f("fk_keys_replaced_by")),
        sa.ForeignKeyConstraint(["team"], ["teams.name"], name=op.f("fk_keys_team")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_keys_digest")),
    )
    op.create_index(op.f("ix_keys_team"), "keys", ["team"], unique=False)
