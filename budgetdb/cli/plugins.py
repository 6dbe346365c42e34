"""`budgetdb plugins`: what can be named, and where it comes from."""

from __future__ import annotations

import click

from budgetdb.cli.options import json_option


@click.command()
@json_option
def plugins(*, as_json: bool) -> None:
    """List what can be named, and where each comes from.

    Cost models, devices, workloads and attention implementations. A plugin that can't be imported is listed with its
    distribution and the reason; the others go on.
    """
    from dataclasses import asdict

    from budgetdb.cli.output import print_json, print_table
    from budgetdb.plugins import REGISTRIES

    found = [info for registry in REGISTRIES for info in registry.describe()]
    if as_json:
        print_json([asdict(info) for info in found])
        return
    rows = [(info.group, info.name, info.origin, info.version or "-", info.error or "") for info in found]
    print_table(("group", "name", "origin", "version", "error"), rows)
