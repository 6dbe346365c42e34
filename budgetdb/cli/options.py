"""Options that several commands share, and the reading of those that take a size or a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from budgetdb.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])


def database_option(function: Function) -> Function:
    """`--db`, passed on as `db`: a path, a URL, or None."""
    where = "Database: a SQLite file or a PostgreSQL URL.  [default: BUDGETDB_URL, else your own file]"
    return click.option("--db", metavar="PATH", help=where)(function)


def json_option(function: Function) -> Function:
    """`--json`, passed on as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Callback of an option that takes bytes, with or without a unit."""
    from budgetdb.settings import parse_bytes

    try:
        return None if value is None else parse_bytes(value)
    except UsageError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def size_or_nothing(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Callback of an option that takes bytes, none at all too."""
    return 0 if value is not None and re.fullmatch(r"0+\s*[A-Za-z]*", value.strip()) else size(ctx, param, value)


def seconds(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Callback of an option that takes a time."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise click.BadParameter(f"{value} is not a positive number of seconds", ctx, param)
    return value
