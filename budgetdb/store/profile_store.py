"""Profiles and probes in the database: find, list, publish, resume."""

from __future__ import annotations

import builtins
import difflib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Row, Select, and_, delete, insert, select, true, update
from sqlalchemy.engine import Connection

from budgetdb.errors import ProfileNotFoundError, SchemaMismatchError, StoreCorruptError, UsageError
from budgetdb.profiles import Environment, Probe, Profile, ProfileKey
from budgetdb.store.engine import Database
from budgetdb.store.faults import told_plainly
from budgetdb.store.imports import Fate, Imported, as_imported, decide
from budgetdb.store.location import locate
from budgetdb.store.rows import DamagedRowError, probe_row, profile_row, read_probe, read_profile
from budgetdb.store.schema import Schema, SchemaState, head, read_schema, refuse_unknown
from budgetdb.store.statements import (
    SELECT_PROFILE,
    Counts,
    count_rows,
    select_digests,
    select_profiles,
    unfinished,
    upsert_profile,
)
from budgetdb.store.tables import probes, profiles
from budgetdb.store.upgrade import Upgrade, upgrade

_log = logging.getLogger(__name__)

Record = TypeVar("Record", Profile, Probe)

# As many digits of the key's digest as `Profile.id` has; and so many ids are offered when none matches.
_ID_DIGITS = 12
_OFFERED = 5


@dataclass(frozen=True)
class StoreStatus:
    """What `budgetdb db status` says.

    Attributes:
        location: path or URL, without a password.
        revision: the schema's revision, None when it has none of ours.
        head: the newest revision this budgetdb knows.
        profiles: how many are stored; None where the tables can't be read, as are the next two.
        probes: how many are stored.
        unfinished_probes: those of calibrations that have not ended.
        journal_mode: SQLite's; None for a server.
    """

    location: str
    state: SchemaState
    revision: str | None
    head: str
    profiles: int | None = None
    probes: int | None = None
    unfinished_probes: int | None = None
    journal_mode: str | None = None


class ProfileStore:
    """The profiles in one database, a SQLite file or a PostgreSQL server.

    Reading creates nothing and migrates nothing; an absent database holds no profiles. The first write makes the file,
    and brings an older file's schema up to date. Each method is one transaction on a connection of its own, so a store
    may be used from any thread, and after a fork.

    Every method raises:
        StoreUnavailableError: the database can't be opened, or stayed locked.
        StoreReadOnlyError: a write was refused.
        StoreCorruptError: the file is damaged or no database.
        SchemaMismatchError: the schema is newer, another program's, or must be upgraded first.

    Args:
        url: path of a SQLite file, or a SQLAlchemy URL; None for `BUDGETDB_URL`, else the user's own file.

    Raises:
        UsageError: `url` is neither.
    """

    def __init__(self, url: str | os.PathLike[str] | None = None) -> None:
        self._database = Database(locate(url))
        self._warned: set[str] = set()

    @property
    def location(self) -> str:
        """Path or URL of the database for a message; never a password."""
        return self._database.location.shown

    @property
    def path(self) -> Path | None:
        """Path of the SQLite file; None for a server."""
        return self._database.location.path

    def find(self, key: ProfileKey) -> Profile | None:
        """The profile stored under exactly `key`, or None; a damaged one is reported once and counts as none."""
        found = self._intact_profiles(self._rows(SELECT_PROFILE, key_digest=key.digest))
        return found[0] if found else None

    def find_candidates(self, *, model_hash: str, device_name: str | None = None) -> builtins.list[Profile]:
        """Profiles of the same model, newest first: of one device's name, or of any."""
        condition = profiles.c.model_hash == model_hash
        if device_name is not None:
            condition = and_(condition, profiles.c.device_name == device_name)
        return self._intact_profiles(self._rows(select_profiles(condition)))

    def list(self) -> builtins.list[Profile]:
        """Every profile, newest first."""
        return self._intact_profiles(self._rows(select_profiles(true())))

    def get(self, id_prefix: str) -> Profile:
        """The profile whose id begins with `id_prefix`.

        Raises:
            ProfileNotFoundError: there is none; the message has the nearest ids.
            UsageError: there are several; the message has their ids.
            StoreCorruptError: its row is damaged.
        """
        row = self._one_row(id_prefix)
        try:
            return read_profile(row)
        except DamagedRowError as error:
            raise StoreCorruptError(
                f"profile {_ids([row.key_digest])} in {self.location} can't be read: {error}",
                next_step="Calibrate that model again to replace it",
            ) from None

    def _one_row(self, id_prefix: str) -> Row[Any]:
        wanted = id_prefix.strip().lower()
        rows = self._rows(select_profiles(profiles.c.key_digest.startswith(wanted, autoescape=True))) if wanted else []
        if not rows:
            raise self._not_found(id_prefix)
        if len(rows) > 1:
            raise UsageError(
                f"{len(rows)} profiles have ids that begin with {wanted!r}: {_ids(row.key_digest for row in rows)}",
                next_step="Give more digits",
            )
        return rows[0]

    def publish(self, profile: Profile) -> None:
        """Store `profile` in the place of any other of its key, and count that key's probes as finished.

        Durable when it returns.
        """
        row = profile_row(profile)
        with self._writing() as connection:
            connection.execute(upsert_profile(connection, row))
            connection.execute(update(probes).where(unfinished(profile.key)).values(finished=True))

    def import_profiles(
        self, imported: Iterable[Profile], *, replace: bool = False, dry_run: bool = False
    ) -> builtins.list[Imported]:
        """Store profiles that were made elsewhere, all or none; durable when it returns.

        Measurements of others become `imported`. What was measured here is never replaced unless `replace` says so, nor
        anything by less: an import by a prediction.

        Args:
            imported: the profiles; of several with one key the last counts.
            replace: take them in any case.
            dry_run: only say what would become of them.
        """
        wanted = {profile.key.digest: as_imported(profile) for profile in imported}
        if dry_run:
            return [decide(profile, self.find(profile.key), replace=replace) for profile in wanted.values()]
        with self._writing() as connection:
            done = []
            for digest, profile in wanted.items():
                rows = list(connection.execute(SELECT_PROFILE, {"key_digest": digest}))
                before = self._intact_profiles(rows)
                outcome = decide(profile, before[0] if before else None, replace=replace)
                if outcome.fate in (Fate.ADDED, Fate.REPLACED):
                    connection.execute(upsert_profile(connection, profile_row(profile)))
                done.append(outcome)
            return done

    def remove(self, id_prefix: str) -> str:
        """Remove the profile whose id begins with `id_prefix`, a damaged one too; returns its whole id.

        Raises:
            ProfileNotFoundError: there is none; the message has the nearest ids.
            UsageError: there are several; the message has their ids.
        """
        digest = str(self._one_row(id_prefix).key_digest)
        with self._writing() as connection:
            connection.execute(delete(profiles).where(profiles.c.key_digest == digest))
        return digest[:_ID_DIGITS]

    def prune(self, older_than: timedelta, *, dry_run: bool = False) -> builtins.list[str]:
        """Remove every profile made longer ago than `older_than`, and the unfinished probes as old; returns the ids."""
        before = datetime.now(UTC) - older_than
        old = profiles.c.created_at < before
        if dry_run or not self._schema().holds_profiles:
            rows: Iterable[Any] = self._rows(select_digests().where(old))
            return [str(row.key_digest)[:_ID_DIGITS] for row in rows]
        with self._writing() as connection:
            gone = [str(row.key_digest)[:_ID_DIGITS] for row in connection.execute(select_digests().where(old))]
            connection.execute(delete(profiles).where(old))
            connection.execute(delete(probes).where(probes.c.created_at < before))
        return gone

    def damaged(self) -> builtins.list[str]:
        """Ids of the profiles whose checksum does not hold, or that another budgetdb wrote."""
        found = []
        for row in self._rows(select_profiles(true())):
            try:
                read_profile(row)
            except DamagedRowError as error:
                found.append(f"{_ids([row.key_digest])}: {error}")
        return found

    def integrity(self) -> builtins.list[str]:
        """What SQLite's own check of the whole file finds wrong; nothing for a server, which checks itself."""
        if not self._database.is_sqlite or self._database.is_absent():
            return []
        with self._reading() as connection:
            found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check(20)")]
        return [] if found == ["ok"] else found

    def add_probe(self, key: ProfileKey, environment: Environment, probe: Probe) -> None:
        """Store one probe of a calibration that has not ended; durable when it returns."""
        row = probe_row(key, environment, probe)
        with self._writing() as connection:
            connection.execute(insert(probes).values(row))

    def unfinished_probes(self, key: ProfileKey, environment: Environment) -> builtins.list[Probe]:
        """The probes that a calibration of `key` left when it ended early, in the order they ran.

        Only those made in an equal `environment`, and whose checksum holds.
        """
        made_here = probes.c.environment_digest == environment.digest
        statement = select(probes.c.id, probes.c.payload, probes.c.sha256).where(unfinished(key), made_here)
        rows = self._rows(statement.order_by(probes.c.id))
        return self._intact(rows, read_probe, name=lambda row: f"probe {row.id}")

    def discard_probes(self, key: ProfileKey) -> None:
        """Forget the unfinished probes of `key`, of every environment, so that a calibration starts afresh."""
        if self._schema().holds_profiles:
            with self._writing() as connection:
                connection.execute(delete(probes).where(unfinished(key)))

    def status(self) -> StoreStatus:
        """Where the database is, which schema it has, and how much it holds; newer and foreign ones are told too."""
        if self._database.is_absent():
            return self._status(Schema(SchemaState.ABSENT), Counts())
        with self._reading() as connection:
            schema = read_schema(connection)
            journal = connection.exec_driver_sql("PRAGMA journal_mode").scalar() if self._database.is_sqlite else None
            empty = Counts() if schema.state is SchemaState.EMPTY else None
            counts = count_rows(connection) if schema.holds_profiles else empty
            return self._status(schema, counts, journal_mode=journal)

    def upgrade(self) -> Upgrade:
        """Bring the schema up to date, making the database if it is absent; an older file is copied first."""
        with told_plainly(self._database.location):
            return upgrade(self._database)

    def _status(self, schema: Schema, counts: Counts | None, *, journal_mode: str | None = None) -> StoreStatus:
        return StoreStatus(
            location=self.location,
            state=schema.state,
            revision=schema.revision,
            head=head(),
            profiles=counts.profiles if counts else None,
            probes=counts.probes if counts else None,
            unfinished_probes=counts.unfinished_probes if counts else None,
            journal_mode=journal_mode,
        )

    def _intact_profiles(self, rows: Iterable[Row[Any]]) -> builtins.list[Profile]:
        return self._intact(rows, read_profile, name=lambda row: f"profile {_ids([row.key_digest])}")

    def _rows(self, statement: Select[Any], **parameters: str) -> builtins.list[Row[Any]]:
        """What `statement` finds; nothing in a database that is absent or has no tables yet."""
        if self._database.is_absent():
            return []
        with self._reading() as connection:
            schema = read_schema(connection)
            refuse_unknown(schema, self._database.location)
            return list(connection.execute(statement, parameters)) if schema.holds_profiles else []

    def _schema(self) -> Schema:
        if self._database.is_absent():
            return Schema(SchemaState.ABSENT)
        with self._reading() as connection:
            schema = read_schema(connection)
        refuse_unknown(schema, self._database.location)
        return schema

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with told_plainly(self._database.location), self._database.read() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A write transaction on a database whose schema is up to date."""
        self._bring_up_to_date()
        with told_plainly(self._database.location), self._database.write() as connection:
            refuse_unknown(read_schema(connection), self._database.location)
            yield connection

    def _bring_up_to_date(self) -> None:
        schema = self._schema()
        if schema.state is SchemaState.CURRENT:
            return
        if schema.state is SchemaState.OLDER and not self._database.is_sqlite:  # others use the server too
            raise SchemaMismatchError(
                f"database {self.location} has schema {schema.revision}, this budgetdb writes {head()}",
                next_step="Run `budgetdb db upgrade`",
            )
        done = self.upgrade()
        if done.backup is not None:
            _log.warning("upgraded %s to schema %s; as it was it is kept in %s", self.location, done.after, done.backup)

    def _intact(
        self, rows: Iterable[Row[Any]], read: Callable[[Row[Any]], Record], *, name: Callable[[Row[Any]], str]
    ) -> builtins.list[Record]:
        """The records whose checksum holds; each of the others is reported once."""
        records = []
        for row in rows:
            try:
                records.append(read(row))
            except DamagedRowError as error:
                self._warn_once(f"{name(row)} in {self.location} is ignored: {error}")
        return records

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _log.warning("%s", message)

    def _not_found(self, id_prefix: str) -> ProfileNotFoundError:
        known = [str(row.key_digest)[:_ID_DIGITS] for row in self._rows(select_digests())]
        if not known:
            return ProfileNotFoundError(
                f"no profile {id_prefix!r}: {self.location} holds none yet", next_step="Run `budgetdb calibrate MODEL`"
            )
        near = difflib.get_close_matches(id_prefix, known, n=_OFFERED, cutoff=0.5)
        hint = f"Nearest: {_ids(near)}" if near else f"Known: {_ids(known)}"
        return ProfileNotFoundError(f"no profile {id_prefix!r} in {self.location}", next_step=hint)


def _ids(digests: Iterable[object]) -> str:
    """Ids for a message, the first few of them; a damaged digest may be no text."""
    ids = [str(digest)[:_ID_DIGITS] for digest in digests]
    return ", ".join(ids[:_OFFERED]) + (f" and {len(ids) - _OFFERED} more" if len(ids) > _OFFERED else "")
