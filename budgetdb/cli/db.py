"""`budgetdb db`: the database itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from budgetdb.cli.options import database_option, json_option

if TYPE_CHECKING:
    from budgetdb.store import StoreStatus

# What to do about a schema that is not the current one, by its state.
_ADVICE = {
    "absent": "it is made by the first `budgetdb calibrate MODEL`, or by `budgetdb db upgrade`",
    "empty": "its tables are made by the first `budgetdb calibrate MODEL`, or by `budgetdb db upgrade`",
    "older": "run `budgetdb db upgrade`",
    "newer": "upgrade budgetdb, or set BUDGETDB_URL to another database",
    "foreign": "it belongs to another program: set BUDGETDB_URL to another database",
}


@click.group()
def db() -> None:
    """Upgrade, inspect or find the database."""


@db.command()
@database_option
@json_option
def upgrade(*, db: str | None, as_json: bool) -> None:
    """Bring the schema up to date, making an absent database.

    One transaction: it is done, or nothing is. A SQLite file with an older schema is copied first.
    """
    from budgetdb.cli.output import print_json
    from budgetdb.cli.printable import printable
    from budgetdb.store import ProfileStore

    store = ProfileStore(db)
    done = store.upgrade()
    backup = None if done.backup is None else str(done.backup)
    if as_json:
        print_json({"location": store.location, "before": done.before, "after": done.after, "backup": backup})
    elif done.changed:
        click.echo(f"{store.location}: schema {done.after} (before: {done.before or 'none'})")
    else:
        click.echo(f"{store.location}: schema {done.after} already, nothing to do")
    if backup is not None and not as_json:
        click.echo(f"as it was it is kept in {printable(backup)}")


@db.command()
@database_option
@json_option
def status(*, db: str | None, as_json: bool) -> None:
    """Say which schema the database has and how much it holds."""
    from dataclasses import asdict

    from budgetdb.cli.output import print_facts, print_json
    from budgetdb.store import ProfileStore

    found = ProfileStore(db).status()
    if as_json:
        print_json(asdict(found))
    else:
        print_facts(_facts(found), indent=0)


@db.command()
@database_option
@json_option
def path(*, db: str | None, as_json: bool) -> None:
    """Print where the database is; it need not exist."""
    from budgetdb.cli.output import print_json
    from budgetdb.store import ProfileStore

    location = ProfileStore(db).location
    if as_json:
        print_json({"location": location})
    else:
        click.echo(location)


def _facts(found: StoreStatus) -> list[tuple[str, object]]:
    advice = _ADVICE.get(found.state)
    shown = {
        "database": found.location,
        "state": f"{found.state}: {advice}" if advice else found.state,
        "schema": f"{found.revision or 'none'} (this budgetdb writes {found.head})",
        "profiles": found.profiles,
        "probes": found.probes,
        "unfinished probes": found.unfinished_probes,
        "journal mode": found.journal_mode,
    }
    return [(name, value) for name, value in shown.items() if value is not None]
