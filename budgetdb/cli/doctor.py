"""`budgetdb doctor`: what stands in the way, and what to do about it."""

from __future__ import annotations

import click

from budgetdb.cli.options import database_option, json_option

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


@click.command()
@database_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, *, db: str | None, as_json: bool) -> None:
    """Look the database, devices, torch and plugins over.

    The database: where it is and on what file system, its permissions, locks, journal, schema, integrity and the
    checksum of every profile. Nothing is changed. The exit code is that of the first problem, 0 for warnings.
    """
    from dataclasses import asdict

    from budgetdb.cli.output import print_json
    from budgetdb.cli.printable import printable
    from budgetdb.doctor import examine, exit_code
    from budgetdb.store import ProfileStore

    findings = []
    for finding in examine(ProfileStore(db)):
        findings.append(finding)
        if not as_json:  # each as it is found: torch takes seconds
            level = click.style(f"{finding.level.value:7}", fg=_COLOURS[finding.level.value])
            click.echo(f"{level}  {printable(f'{finding.area}, {finding.subject}: {finding.found}')}")
            if finding.next_step:
                click.echo(f"{'':9}{printable(finding.next_step)}")
    if as_json:
        print_json([asdict(finding) for finding in findings])
    ctx.exit(exit_code(findings))
