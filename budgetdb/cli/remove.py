"""`budgetdb rm` and `budgetdb prune`: profiles that are no longer wanted."""

from __future__ import annotations

import re
from datetime import timedelta

import click

from budgetdb.cli.options import database_option, json_option

_UNITS = {"h": 1, "d": 24, "w": 24 * 7, "y": 24 * 365}
_AGE = re.compile(r"([1-9]\d{0,4})([hdwy])")


def age(ctx: click.Context, param: click.Parameter, value: str) -> timedelta:
    """Callback of an option that takes an age."""
    found = _AGE.fullmatch(value.strip())
    if found is None:
        raise click.BadParameter(f"{value!r} is no age: write it like 12h, 30d, 8w or 1y", ctx, param)
    return timedelta(hours=int(found[1]) * _UNITS[found[2]])


@click.command()
@click.argument("profile_ids", metavar="ID...", nargs=-1, required=True)
@database_option
@json_option
def rm(profile_ids: tuple[str, ...], *, db: str | None, as_json: bool) -> None:
    """Remove profiles by their ids, or how these begin.

    A damaged one is removed like any other. If one id leads nowhere, those before it are gone.
    """
    from budgetdb.cli.output import print_json
    from budgetdb.store import ProfileStore

    store = ProfileStore(db)
    gone = [store.remove(profile_id) for profile_id in profile_ids]
    if as_json:
        print_json(gone)
    else:
        click.echo(f"removed {', '.join(gone)}")


@click.command()
@click.option("--older-than", metavar="AGE", required=True, callback=age, help="Made so long ago: 12h, 30d, 8w, 1y.")
@click.option("--dry-run", is_flag=True, help="Only say which they are.")
@database_option
@json_option
def prune(*, older_than: timedelta, dry_run: bool, db: str | None, as_json: bool) -> None:
    """Remove profiles, and what is left of calibrations, by age."""
    from budgetdb.cli.output import print_json
    from budgetdb.store import ProfileStore

    gone = ProfileStore(db).prune(older_than, dry_run=dry_run)
    if as_json:
        print_json(gone)
    elif gone:
        click.echo(f"{'would remove' if dry_run else 'removed'} {len(gone)}: {', '.join(gone)}")
    else:
        click.echo("none is so old")
