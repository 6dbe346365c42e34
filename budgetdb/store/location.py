"""Where the database is: a path or a URL made into one form, and shown without its secrets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from budgetdb.errors import UsageError
from budgetdb.settings import read_settings

_EXAMPLES = "Give the path of a file, or postgresql+psycopg://USER@HOST/NAME with the password in PGPASSFILE"
_CONNINFO = re.compile(r"\b(host|dbname|user|password|passfile)\s*=", re.IGNORECASE)
_POSTGRESQL = "postgresql+psycopg"


@dataclass(frozen=True)
class Location:
    """One database: a SQLite file, or a server.

    Attributes:
        shown: what messages call it; never a password.
        path: absolute path of the SQLite file, None for a server.
        url: URL of the server, None for a file.
        is_default: nobody chose it, so its directory is ours to create.
    """

    shown: str
    path: Path | None = None
    url: URL | None = field(default=None, repr=False)
    is_default: bool = False


def locate(url: str | os.PathLike[str] | None = None) -> Location:
    """The database meant by `url`, else by `BUDGETDB_URL`, else the one in the user's data directory.

    Raises:
        UsageError: `url` is no path and no URL of a database we know.
    """
    if url is None:
        url = read_settings().url or None
    if url is None:
        return _at_path(os.fspath(platformdirs.user_data_path("budgetdb") / "profiles.db"), is_default=True)
    text = os.fspath(url)
    return _at_url(text) if "://" in text else _at_path(text)


def redacted(url: str | URL) -> str:
    """`url` for a message or a log: no password, no query (`?password=` is one too), no control characters.

    A text that can't be parsed may hold a password anywhere, so only its scheme is kept.

    >>> redacted("postgresql+psycopg://ann:secret@db/budget?password=secret")
    'postgresql+psycopg://ann:***@db/budget'
    """
    if isinstance(url, URL):
        return _printable(url.set(query={}).render_as_string(hide_password=True))
    if "://" not in url:
        return _printable(url)
    try:
        return redacted(_parsed(url))
    except UsageError:
        return f"{_printable(url.partition('://')[0])}://..."


def _at_path(text: str, *, is_default: bool = False) -> Location:
    if _CONNINFO.search(text):  # libpq's other way to write a URL; as a path it would be shown, password and all
        raise UsageError("a connection string of names and values is no database URL", next_step=_EXAMPLES)
    if not text or "\0" in text or text == ":memory:":
        raise UsageError(f"'{_printable(text)}' is not the path of a database file", next_step=_EXAMPLES)
    path = Path(text).expanduser().absolute()
    return Location(shown=_printable(os.fspath(path)), path=path, is_default=is_default)


def _at_url(text: str) -> Location:
    url = _parsed(text)
    backend = url.get_backend_name()
    if backend == "sqlite":
        if url.query or not url.database:
            raise UsageError(
                f"{redacted(url)}: a SQLite URL names a file and takes no options", next_step="Give the file's path"
            )
        return _at_path(url.database)
    if backend != "postgresql":
        raise UsageError(f"databases of kind {backend!r} are not supported", next_step=_EXAMPLES)
    return Location(shown=redacted(url), url=url.set(drivername=_POSTGRESQL))


def _parsed(text: str) -> URL:
    scheme = text.partition("://")[0]
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # their messages quote the URL, password included
        raise UsageError(f"the database URL {scheme}://... can't be parsed", next_step=_EXAMPLES) from None
    if "@" in (url.host or "") or "@" in (url.database or ""):
        raise UsageError(
            f"the database URL {scheme}://... has an unescaped character in its password",
            next_step="Write @ as %40, / as %2F and ? as %3F",
        )
    return url


def _printable(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape", "backslashreplace").decode("ascii")
