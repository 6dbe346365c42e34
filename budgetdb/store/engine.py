"""Opening the database: connections that read, write or migrate, each with the settings that were measured to hold.

A connection lives for one transaction. Opening a SQLite file costs 0.1 ms, and in return no lock, cursor or socket is
ever shared with a forked child, and a file that was moved away or replaced is noticed at once.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import create_engine, event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import NullPool

from budgetdb.errors import UsageError
from budgetdb.store.location import Location

# STORE 5.1: 256 writers of one row each all got through within 60 s, a third of them not within 5 s.
_WRITER_WAITS_S = 60.0
_READER_WAITS_S = 10.0
_CONNECT_TIMEOUT_S = 10

# None of these writes to the file. EXTRA also syncs the directory after the journal is deleted: what was acknowledged
# survives a power cut. `trusted_schema` and `cell_size_check` are for files that others made or damaged.
_PRAGMAS = """
PRAGMA synchronous = EXTRA;
PRAGMA trusted_schema = OFF;
PRAGMA cell_size_check = ON;
PRAGMA mmap_size = 0;
PRAGMA temp_store = MEMORY;
PRAGMA foreign_keys = {foreign_keys};
"""


class Database:
    """Transactions on one database; any thread or forked child may open its own."""

    def __init__(self, location: Location) -> None:
        self.location = location

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file rather than a server."""
        return self.location.path is not None

    def is_absent(self) -> bool:
        """Whether there is no file yet; a server is never absent, only out of reach."""
        if self.location.path is None:
            return False
        try:
            self.location.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # not ours to see: opening it will say why
            return False
        return False

    def create_file(self) -> None:
        """Make the file, empty and private to the user, unless it is there; a default directory too.

        Raises:
            OSError: it can't be made there.
        """
        path = self.location.path
        if path is None:
            return
        if self.location.is_default:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except FileExistsError:  # closing a file that others have open would drop SQLite's locks, so it isn't opened
            return

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database throughout."""
        with self._reader.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that holds the write lock from its start; committed, and on the disk, when the block ends."""
        with self._writer.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def migrate(self) -> Iterator[Connection]:
        """As `write`, without foreign keys: rebuilding a table would delete the rows that refer to it."""
        with self._migrator.connect() as connection, connection.begin():
            yield connection

    def backup(self, target: Path) -> None:
        """Copy a SQLite file, as it is now, to the empty file `target`."""
        with self._autocommit.connect() as connection:
            connection.exec_driver_sql("VACUUM INTO ?", (os.fspath(target),))

    @cached_property
    def _reader(self) -> Engine:
        return self._engine(begin="BEGIN", waits_s=_READER_WAITS_S)

    @cached_property
    def _writer(self) -> Engine:
        return self._engine(begin="BEGIN IMMEDIATE", waits_s=_WRITER_WAITS_S)

    @cached_property
    def _migrator(self) -> Engine:
        return self._engine(begin="BEGIN IMMEDIATE", waits_s=_WRITER_WAITS_S, foreign_keys=False)

    @cached_property
    def _autocommit(self) -> Engine:
        return self._engine(begin=None, waits_s=_READER_WAITS_S)

    def _engine(self, *, begin: str | None, waits_s: float, foreign_keys: bool = True) -> Engine:
        if self.location.path is None:
            return _server_engine(self.location, read_only=begin == "BEGIN")
        return _sqlite_engine(self.location.path, begin=begin, waits_s=waits_s, foreign_keys=foreign_keys)


def _sqlite_engine(path: Path, *, begin: str | None, waits_s: float, foreign_keys: bool) -> Engine:
    # `mode=rw` never creates a file, and falls back to reading where the file may not be written.
    uri = f"file:{quote(os.fsencode(path))}?mode=rw"
    pragmas = _PRAGMAS.format(foreign_keys="ON" if foreign_keys else "OFF")

    def connect() -> sqlite3.Connection:
        # isolation_level=None: the driver begins no transaction of its own, which would be deferred and skip DDL.
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=waits_s, check_same_thread=False)
        try:
            connection.executescript(pragmas)
        except BaseException:
            connection.close()
            raise
        connection.text_factory = _text
        return connection

    engine = create_engine(
        "sqlite://", creator=connect, poolclass=NullPool, pool_reset_on_return=None, hide_parameters=True
    )
    if begin is not None:
        statement = begin

        @event.listens_for(engine, "begin")
        def begin_transaction(connection: Connection) -> None:
            connection.exec_driver_sql(statement)

    return engine


def _text(stored: bytes) -> str:
    """Damaged text as text, so that a row's checksum tells of it and the other rows can still be read."""
    return stored.decode("utf-8", "replace")


def _server_engine(location: Location, *, read_only: bool) -> Engine:
    url = location.url
    if url is None:
        raise UsageError(f"{location.shown} is no server")
    timeout = {} if "connect_timeout" in url.query else {"connect_timeout": _CONNECT_TIMEOUT_S}
    try:
        engine = create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args=timeout)
    except ModuleNotFoundError:
        raise UsageError(
            f"{location.shown} needs a driver that is not installed",
            next_step="Run: pip install 'budgetdb[postgres]'",
        ) from None
    return engine.execution_options(postgresql_readonly=True) if read_only else engine
