"""Profiles and the probes they rest on.

Revision 0001, the first.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "profiles",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key_digest", sa.String(64), nullable=False),
        sa.Column("model_hash", sa.String(512), nullable=False),
        sa.Column("device_name", sa.String(512), nullable=False),
        sa.Column("device_bytes", sa.BigInteger(), nullable=False),
        sa.Column("dtype", sa.String(512), nullable=False),
        sa.Column("attention", sa.String(512), nullable=False),
        sa.Column("pad_multiple", sa.BigInteger(), nullable=False),
        sa.Column("workload", sa.String(512), nullable=False),
        sa.Column("model_name", sa.String(512), nullable=False),
        sa.Column("provenance", sa.String(32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_profiles"),
        sa.UniqueConstraint("key_digest", name="uq_profiles_key_digest"),
    )
    op.create_index("ix_profiles_model_hash_device_name", "profiles", ["model_hash", "device_name"])
    op.create_table(
        "probes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key_digest", sa.String(64), nullable=False),
        sa.Column("environment_digest", sa.String(64), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_probes"),
    )
    op.create_index("ix_probes_key_digest", "probes", ["key_digest"])
    if op.get_bind().dialect.name == "sqlite":
        op.execute("PRAGMA application_id = 0x62644231")  # "bdB1": the file is budgetdb's
        op.execute("PRAGMA user_version = 1")


def downgrade() -> None:
    op.drop_table("probes")
    op.drop_table("profiles")
    if op.get_bind().dialect.name == "sqlite":
        op.execute("PRAGMA application_id = 0")
        op.execute("PRAGMA user_version = 0")
