"""What the driver says when a database fails, told in budgetdb's words.

The codes are those seen on real broken files (STORE 2.5). Neither the statement nor the driver's own text is repeated
where they could hold a password, and the original exception is not chained for the same reason.
"""

from __future__ import annotations

import errno
import os
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from budgetdb.errors import (
    SchemaMismatchError,
    StoreCorruptError,
    StoreError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from budgetdb.store.location import Location

_ANOTHER = "set BUDGETDB_URL to another database"
_WRITE_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MISSING = ("no such table", "no such column", "has no column named")


@dataclass(frozen=True)
class _Fault:
    """What is told for SQLite's result codes that begin with one of `codes`."""

    codes: tuple[str, ...]
    kind: type[StoreError]
    what: str
    next_step: str


_SQLITE_FAULTS = (
    _Fault(
        ("SQLITE_CANTOPEN",),
        StoreUnavailableError,
        "cannot open database {path}: {why}",
        f"Correct that, or {_ANOTHER}",
    ),
    _Fault(
        ("SQLITE_NOTADB",),
        StoreCorruptError,
        "{path} is not a SQLite database, or of a newer format",
        "{move}",
    ),
    _Fault(
        ("SQLITE_CORRUPT",),
        StoreCorruptError,
        "database {path} is damaged",
        "{move}",
    ),
    _Fault(
        ("SQLITE_BUSY", "SQLITE_LOCKED"),
        StoreUnavailableError,
        "database {path} is locked by another process, or its file system's lock service is down",
        f"Wait for it to end (fuser {{quoted}} names it), or {_ANOTHER}",
    ),
    _Fault(
        ("SQLITE_READONLY",),
        StoreReadOnlyError,
        "database {path} is read-only here: what it holds is used, nothing can be added",
        f"Make the file and its directory writable, or {_ANOTHER}",
    ),
    _Fault(
        ("SQLITE_FULL", "SQLITE_IOERR_WRITE"),
        StoreReadOnlyError,
        "database {path} took no more: the disk is full, or a quota or file size limit is reached",
        f"Free some space, or {_ANOTHER}",
    ),
    _Fault(
        ("SQLITE_IOERR_LOCK",),
        StoreUnavailableError,
        "database {path} is on a file system without POSIX locks",
        "Set BUDGETDB_URL to a file on a local disk, or to a PostgreSQL server",
    ),
)
_OTHER = _Fault(
    (),
    StoreUnavailableError,
    "database {path} failed with {code} ({text})",
    f"Run `budgetdb db status`, or {_ANOTHER}",
)


@contextmanager
def told_plainly(location: Location) -> Iterator[None]:
    """Turn whatever the driver, or the file system, raises inside the block into a `StoreError`."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise store_error(error, location) from None
    except UnicodeDecodeError:  # sqlite3 can't even quote a schema whose text is damaged
        raise _damaged(location) from None
    except OSError as error:
        raise _file_error(error, location) from None


def store_error(error: BaseException, location: Location) -> StoreError:
    """The `StoreError` that says what `error`, raised by SQLAlchemy or a driver, means."""
    original = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    if location.path is not None:
        return _sqlite_error(original, location, location.path)
    return _server_error(original, location)


def _sqlite_error(error: BaseException, location: Location, path: Path) -> StoreError:
    code = getattr(error, "sqlite_errorname", "") or ""
    text = _first_line(error)
    if code == "SQLITE_ERROR" and any(missing in text for missing in _MISSING):
        return _lacks_something(f"database {location.shown}")
    if "unsupported file format" in text:
        return _damaged(location)
    fault = next((fault for fault in _SQLITE_FAULTS if code.startswith(fault.codes)), _OTHER)
    words = {
        "path": location.shown,
        "quoted": shlex.quote(location.shown),
        "why": _why_not_opened(path),
        "move": _move_away(path),
        "code": code or type(error).__name__,
        "text": text,
    }
    return fault.kind(fault.what.format_map(words), next_step=fault.next_step.format_map(words))


def _server_error(error: BaseException, location: Location) -> StoreError:
    """By SQLSTATE; the driver's text is left out, since it may repeat connection parameters."""
    state = getattr(error, "sqlstate", None) or ""
    database = f"database {location.shown}"
    if state in ("42P01", "42703"):  # undefined table, undefined column
        return _lacks_something(database)
    if state in ("25006", "42501") or state.startswith("53"):  # read-only transaction, no privilege, no space
        return StoreReadOnlyError(
            f"{database} refused the write (SQLSTATE {state})", next_step=f"Ask its owner, or {_ANOTHER}"
        )
    detail = f"SQLSTATE {state}" if state else type(error).__name__
    return StoreUnavailableError(
        f"{database} can't be used ({detail})",
        next_step=f"See that the server runs and lets you in (psql shows its reason), or {_ANOTHER}",
    )


def _file_error(error: OSError, location: Location) -> StoreError:
    kind = StoreReadOnlyError if error.errno in _WRITE_REFUSED else StoreUnavailableError
    reason = _why_not_opened(location.path) if location.path and error.errno == errno.ENOENT else error.strerror
    return kind(f"cannot create database {location.shown}: {reason}", next_step=f"Correct that, or {_ANOTHER}")


def _lacks_something(database: str) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"{database} has an older schema, or a damaged one: a table or column is not there",
        next_step=f"Run `budgetdb db upgrade`; if that finds nothing to do, {_ANOTHER}",
    )


def _damaged(location: Location) -> StoreCorruptError:
    next_step = _move_away(location.path) if location.path else _capitalised(_ANOTHER)
    return StoreCorruptError(f"database {location.shown} is damaged", next_step=next_step)


def _why_not_opened(path: Path) -> str:
    """What SQLite's CANTOPEN and the system's ENOENT don't say."""
    parent = path.parent
    try:
        if not parent.exists():
            return f"directory {parent} is missing"
        if not parent.is_dir():
            return f"{parent} is not a directory"
        if path.is_dir():
            return "it is a directory"
        found = path.stat()
    except OSError as error:
        return f"{(error.strerror or 'no access').lower()} (uid {os.geteuid()})"
    return f"permission denied (uid {os.geteuid()}, mode {found.st_mode & 0o7777:04o}, owner {found.st_uid})"


def _move_away(path: Path) -> str:
    shown = shlex.quote(os.fspath(path))
    return f"Move it away (mv {shown} {shlex.quote(os.fspath(path) + '.damaged')}), or {_ANOTHER}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
