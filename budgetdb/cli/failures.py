"""The one place where an error becomes a line on stderr and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from budgetdb.cli.printable import printable
from budgetdb.errors import BudgetDBError

UNEXPECTED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@contextmanager
def as_one_line(*, debug: bool) -> Iterator[None]:
    """Turn whatever is raised inside the block into `Error: ...` on stderr, and the exit that goes with it.

    With `debug` the traceback comes first. Click's own exceptions, such as those for a wrong option, pass: click shows
    them and exits with 2.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except BaseException as error:
        message, exit_code = _line(error), _exit_code(error)
        if message is None:
            raise
        if debug:
            traceback.print_exception(error, file=sys.stderr)
        sys.stderr.write(f"Error: {printable(message)}\n")
        raise click.exceptions.Exit(exit_code) from None


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, BudgetDBError) else UNEXPECTED


def _line(error: BaseException) -> str | None:
    """What to say of `error`; None for what must pass, such as `SystemExit` and a closed pipe."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, BudgetDBError):
        return str(error)
    if isinstance(error, BrokenPipeError) or not isinstance(error, Exception):
        return None
    first_line = str(error).strip().partition("\n")[0]
    what = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    return f"{what}. Run with --debug for the traceback: budgetdb --debug COMMAND"
