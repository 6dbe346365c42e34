"""Results on stdout: JSON, tables, and lists of facts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from budgetdb.cli.printable import printable

if TYPE_CHECKING:
    from datetime import datetime

# What a table may take where nothing ends a line: more than any has.
_ENDLESS = 100_000


def print_json(value: Any) -> None:
    """Print `value` as indented JSON, in ASCII: no text in it can do anything to a terminal."""
    click.echo(json.dumps(value, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


def print_facts(facts: Iterable[tuple[str, object]], *, indent: int = 2) -> None:
    """Print names and values, one pair a line, the values below one another."""
    pairs = [(name, printable(str(value))) for name, value in facts]
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        click.echo(f"{'':{indent}}{name:{width}}  {value}".rstrip())


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print a table on stdout, the columns named in `right` flush right.

    On a terminal it is folded to its width; elsewhere each row is one line, however long, and nothing is cut.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    if not console.is_terminal:
        wide = console.options.update(width=_ENDLESS)
        console = Console(highlight=False, width=console.measure(table, options=wide).maximum)
    console.print(table)


def minute(moment: datetime) -> str:
    """A moment to the minute, in UTC."""
    from datetime import UTC

    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M")
