"""The tables as the current program reads and writes them.

Core tables, not mapped classes: a row is a few columns to search by and one JSON text that pydantic reads, so there is
no object graph to track, and SQLAlchemy's ORM would add 0.1 s to the start of `budgetdb show`. Databases are made by
the migrations; a test holds that they end in exactly this.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, DateTime, Index, Integer, MetaData, String, Table, Text

metadata = MetaData(
    naming_convention={  # batch migrations find constraints by their name
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

# `payload` is the canonical JSON of a Profile, `sha256` its digest. The columns between repeat parts of it for queries;
# what is served is always the payload.
profiles = Table(
    "profiles",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("key_digest", String(64), nullable=False, unique=True),
    Column("model_hash", String(512), nullable=False),
    Column("device_name", String(512), nullable=False),
    Column("device_bytes", BigInteger, nullable=False),
    Column("dtype", String(512), nullable=False),
    Column("attention", String(512), nullable=False),
    Column("pad_multiple", BigInteger, nullable=False),
    Column("workload", String(512), nullable=False),
    Column("model_name", String(512), nullable=False),
    Column("provenance", String(32), nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("payload", Text, nullable=False),
    Column("sha256", String(64), nullable=False),
    Index(None, "model_hash", "device_name"),
)

# One row for each probe, written when it ends; `finished` once a profile of its key has been published.
probes = Table(
    "probes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("key_digest", String(64), nullable=False, index=True),
    Column("environment_digest", String(64), nullable=False),
    Column("finished", Boolean, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("payload", Text, nullable=False),
    Column("sha256", String(64), nullable=False),
)
