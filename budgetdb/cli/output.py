"""Results on stdout: JSON, tables, and lists of facts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from budgetdb.cli.printable import printable

if TYPE_CHECKING:
    from datetime import datetime

    from rich.table import Table

# Cells between the columns of a table.
_GAP = 2


def print_json(value: Any) -> None:
    """Print `value` as indented JSON, in ASCII: no text in it can do anything to a terminal."""
    click.echo(json.dumps(value, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


def print_facts(facts: Iterable[tuple[str, object]], *, indent: int = 2) -> None:
    """Print names and values, one pair a line, the values below one another."""
    pairs = [(name, printable(str(value))) for name, value in facts]
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        click.echo(f"{'':{indent}}{name:{width}}  {value}".rstrip())


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str] = (),
    expendable: Sequence[str] = (),
) -> None:
    """Print a table on stdout, the columns named in `right` flush right.

    On a terminal too narrow for it, `expendable` columns are left out, the first first, and it says so; what is still
    too wide is folded. Elsewhere each row is one line, however long, and nothing is cut.
    """
    from rich.console import Console

    texts = [[printable(str(cell)) for cell in row] for row in rows]
    console = Console(highlight=False)
    if not console.is_terminal:
        width = _width(headings, texts)
        Console(highlight=False, width=width).print(_table(headings, texts, right=right))
        return
    left_out: list[str] = []
    while len(left_out) < len(expendable) and _width(headings, texts, without=left_out) > console.width:
        left_out.append(expendable[len(left_out)])
    console.print(_table(headings, texts, right=right, without=left_out))
    if left_out:
        click.secho(f"Left out for lack of width: {', '.join(left_out)}", dim=True)


def _width(headings: Sequence[str], texts: Sequence[Sequence[str]], *, without: Collection[str] = ()) -> int:
    """Columns of a terminal that the table needs so as not to be folded."""
    from rich.cells import cell_len

    columns = [column for column in zip(headings, *texts, strict=True) if column[0] not in without]
    return sum(max(map(cell_len, column)) for column in columns) + _GAP * (len(columns) - 1)


def _table(
    headings: Sequence[str], texts: Iterable[Sequence[str]], *, right: Collection[str], without: Collection[str] = ()
) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # The line under the headings has a cell of its own between columns, so one cell of padding makes a gap of two.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for heading in headings:
        if heading not in without:
            table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in texts:
        kept = (text for heading, text in zip(headings, row, strict=True) if heading not in without)
        table.add_row(*map(Text, kept))
    return table


def minute(moment: datetime) -> str:
    """A moment to the minute, in UTC."""
    from datetime import UTC

    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M")
