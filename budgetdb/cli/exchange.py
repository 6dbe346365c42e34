"""`budgetdb export` and `budgetdb import`: profiles as a JSON file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from budgetdb.cli.options import database_option, json_option


@click.command("export")
@click.argument("profile_ids", metavar="[ID]...", nargs=-1)
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write to FILE, not to stdout.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it is there.")
@click.option("--contribute", is_flag=True, help="Only what was measured on cards, ready to be sent in.")
@database_option
def export(
    profile_ids: tuple[str, ...], *, output: Path | None, overwrite: bool, contribute: bool, db: str | None
) -> None:
    """Write profiles to a JSON file: those named, or all.

    With --contribute it is the file to send in for a card that has no profiles yet: what was measured on cards, with
    the cards' exact memory and without the texts of errors. It names models and cards; no path, host, user or database
    is in it.
    """
    from importlib.metadata import version

    from budgetdb.store import ProfileStore
    from budgetdb.store.exchange import contribution, write_document, write_file

    store = ProfileStore(db)
    profiles = [store.get(profile_id) for profile_id in profile_ids] if profile_ids else store.list()
    write = contribution if contribute else write_document
    text = write(profiles, exported_by=f"budgetdb {version('budgetdb')}")
    if output is None:
        click.echo(text.replace("\x7f", "\\u007f"), nl=False)
        return
    write_file(output, text, overwrite=overwrite)
    if contribute:
        click.echo("Attach the file to an issue of the project: it becomes a file of `profiles/`.", err=True)


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--replace", is_flag=True, help="Take them in the place of measured ones, too.")
@click.option("--dry-run", is_flag=True, help="Only say what would become of them.")
@database_option
@json_option
def import_(file: Path, *, replace: bool, dry_run: bool, db: str | None, as_json: bool) -> None:
    """Store the profiles of a file that `budgetdb export` wrote.

    All of them or, if anything about the file is wrong, none. They are marked `imported`, and never take the place of
    what was measured here unless --replace is given.
    """
    from budgetdb.cli.output import print_json, print_table
    from budgetdb.store import ProfileStore
    from budgetdb.store.exchange import read_document

    document = read_document(file)
    done = ProfileStore(db).import_profiles(
        (sealed.profile for sealed in document.profiles), replace=replace, dry_run=dry_run
    )
    if as_json:
        print_json([{"id": one.profile.id, "fate": one.fate.value, "before": one.before} for one in done])
        return
    if done:
        rows = [(one.profile.id, one.profile.model_name, one.profile.key.device_name, one.fate.value) for one in done]
        print_table(("id", "model", "device", "fate"), rows)
    counts = Counter(one.fate.value for one in done)
    told = ", ".join(f"{count} {fate}" for fate, count in sorted(counts.items())) or "no profiles in it"
    click.echo(f"{told}{' (dry run: nothing was stored)' if dry_run else ''}")
    if counts["kept"]:
        click.echo("Kept is what was measured here, or more than a prediction: --replace takes the file's.", err=True)
