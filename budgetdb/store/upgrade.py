"""Bringing a database's schema up to date: one process at a time, in one transaction, with a copy kept of the old one.

Alembic's defaults leave a killed migration stuck for good, and of 64 processes that meet a fresh file 56 fail. Here the
write lock is taken first, the schema read again inside it, and Alembic works on that very connection (STORE 3).
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import count
from pathlib import Path

from sqlalchemy.engine import Connection

from budgetdb.errors import StoreCorruptError
from budgetdb.store.engine import Database
from budgetdb.store.schema import Schema, SchemaState, head, read_schema, refuse_unknown

# Alembic keeps the migration that runs in module globals.
_alembic_lock = threading.Lock()
# Any number that no other program is likely to lock: here the digits of "bdB1", as in the SQLite header.
_ADVISORY_LOCK = 0x62644231


@dataclass(frozen=True)
class Upgrade:
    """What an upgrade did.

    Attributes:
        before: the revision found, None for a database that was absent or empty.
        after: the revision it has now.
        backup: copy of the file as it was, None when there was nothing to lose.
    """

    before: str | None
    after: str
    backup: Path | None = None

    @property
    def changed(self) -> bool:
        """Whether anything had to be done."""
        return self.before != self.after


def upgrade(database: Database) -> Upgrade:
    """Bring `database` to the newest revision, making the file if it is absent; nothing happens if it is there already.

    Raises:
        SchemaMismatchError: it is newer, or another program's.
        StoreCorruptError: its header and its version table disagree.
        OSError: the file, or the copy of the old one, can't be made.
    """
    database.create_file()
    with _alembic_lock, database.migrate() as connection:
        _wait_for_others(connection)
        found = read_schema(connection)
        refuse_unknown(found, database.location)
        if found.state is SchemaState.CURRENT:
            return Upgrade(found.revision, head())
        backup = _keep_copy(database, found)
        _run_migrations(connection, shown=database.location.shown)
        return Upgrade(found.revision, head(), backup)


def migrations() -> Traversable:
    """The directory of the migrations, in a checkout or in an installed wheel."""
    return resources.files("budgetdb.migrations")


def _wait_for_others(connection: Connection) -> None:
    """On a server BEGIN takes no lock, so wait for one that lasts until the transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")


def _keep_copy(database: Database, found: Schema) -> Path | None:
    """A copy of an older SQLite file; the write lock is held, and readers, this one too, still get through."""
    path = database.location.path
    if path is None or found.state is not SchemaState.OLDER:
        return None
    copy = _new_file_beside(path, f".bak-r{found.revision}")
    try:
        database.backup(copy)
        _sync(copy)
    except BaseException:
        copy.unlink()
        raise
    return copy


def _new_file_beside(path: Path, suffix: str) -> Path:
    """An empty file, private to the user, of a name not in use."""
    for number in count():
        candidate = path.with_name(f"{path.name}{suffix}{f'.{number}' if number else ''}")
        try:
            os.close(os.open(candidate, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("unreachable: count() has no end")


def _sync(path: Path) -> None:
    """Wait until `path` is on the disk, which VACUUM INTO does not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _run_migrations(connection: Connection, *, shown: str) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    with resources.as_file(migrations()) as directory:
        config = Config()
        config.set_main_option("script_location", os.fspath(directory).replace("%", "%%"))
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise StoreCorruptError(
                f"database {shown} contradicts itself about its schema ({error})",
                next_step="Move it away, or set BUDGETDB_URL to another database",
            ) from None
