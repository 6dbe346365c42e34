"""Log records as lines on stderr: `Warning: ...`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from budgetdb.cli.printable import printable


class _StderrHandler(logging.Handler):
    """Writes to what is stderr at that moment: a progress display puts itself in its place."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(_line(record) + "\n")
        sys.stderr.flush()


@contextmanager
def messages_on_stderr(*, debug: bool) -> Iterator[None]:
    """Show warnings and errors that are logged inside the block; with `debug`, all that budgetdb logs."""
    handler = _StderrHandler()
    root, own = logging.getLogger(), logging.getLogger("budgetdb")
    levels = root.level, own.level
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    own.setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(levels[0])
        own.setLevel(levels[1])


def _line(record: logging.LogRecord) -> str:
    message = printable(record.getMessage())
    if record.levelno >= logging.WARNING:
        return f"{record.levelname.capitalize()}: {message}"
    return f"{record.levelname.capitalize()} ({record.name}): {message}"
