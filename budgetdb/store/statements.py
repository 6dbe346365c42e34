"""The statements of the store, apart from the transactions they run in. Names and texts are always bound parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Insert, Select, bindparam, func, select
from sqlalchemy.engine import Connection

from budgetdb.profiles import ProfileKey
from budgetdb.store.tables import probes, profiles


@dataclass(frozen=True)
class Counts:
    """Rows in the tables.

    Attributes:
        unfinished_probes: those of calibrations that have not ended.
    """

    profiles: int = 0
    probes: int = 0
    unfinished_probes: int = 0


def select_profiles(condition: ColumnElement[bool]) -> Select[Any]:
    """Rows that `read_profile` reads, newest first."""
    columns = (profiles.c.key_digest, profiles.c.payload, profiles.c.sha256)
    return select(*columns).where(condition).order_by(profiles.c.created_at.desc(), profiles.c.id.desc())


# Built once: building it takes as long as running it. The parameter is `key_digest`.
SELECT_PROFILE = select_profiles(profiles.c.key_digest == bindparam("key_digest"))


def select_digests() -> Select[Any]:
    """The key digest of every profile, newest first."""
    return select(profiles.c.key_digest).order_by(profiles.c.created_at.desc(), profiles.c.id.desc())


def unfinished(key: ProfileKey) -> ColumnElement[bool]:
    """Which rows of `probes` belong to a calibration of `key` that has not ended."""
    return (probes.c.key_digest == key.digest) & ~probes.c.finished


def upsert_profile(connection: Connection, row: Mapping[str, Any]) -> Insert:
    """Insert `row`, or put it in the place of the profile of the same key."""
    if connection.dialect.name == "sqlite":
        from sqlalchemy.dialects.sqlite import insert
    else:
        from sqlalchemy.dialects.postgresql import insert  # type: ignore[assignment]  # same methods, no common base
    statement = insert(profiles).values(row)
    replaced = {name: statement.excluded[name] for name in row if name != "key_digest"}
    return statement.on_conflict_do_update(index_elements=["key_digest"], set_=replaced)


def count_rows(connection: Connection) -> Counts:
    """How much is stored."""
    all_probes = select(func.count()).select_from(probes)
    return Counts(
        profiles=connection.scalar(select(func.count()).select_from(profiles)) or 0,
        probes=connection.scalar(all_probes) or 0,
        unfinished_probes=connection.scalar(all_probes.where(~probes.c.finished)) or 0,
    )
