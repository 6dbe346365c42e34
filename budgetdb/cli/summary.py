"""What a calibration found, for people, with the Python that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from budgetdb.cli.details import limit_text, probe_counts
from budgetdb.cli.output import minute, print_facts
from budgetdb.settings import format_bytes

if TYPE_CHECKING:
    from budgetdb.profiles import FrontierPoint, Profile

# Lengths to show; all are in `budgetdb show ID`.
_SHOWN = 5
_DEFAULT_WORKLOAD, _DEFAULT_OPTIONS = "forward", "[hold=previous]"


def print_summary(profile: Profile, *, is_known: bool) -> None:
    """Print the profile in some twenty lines; `is_known` says that it was there before."""
    if is_known:
        heading = f"profile {profile.id} is known since {minute(profile.created_at)} UTC: no forward pass was made"
    else:
        heading = f"profile {profile.id} is stored"
    click.secho(heading, bold=True)
    print_facts(_facts(profile))
    click.echo()
    click.echo("Use it:")
    for line in python_lines(profile):
        click.echo(f"  {line}")


def python_lines(profile: Profile) -> tuple[str, str]:
    """The two lines of Python that batch an evaluation by the profile."""
    options = f", pad_multiple={profile.key.pad_multiple}" if profile.key.pad_multiple != 1 else ""
    workload = profile.key.workload.removesuffix(_DEFAULT_OPTIONS)
    if workload != _DEFAULT_WORKLOAD:
        options += f', workload="{workload}"'
    return (
        f"batches = budgetdb.make_batch_sampler(model, lengths{options})",
        "loader = DataLoader(dataset, batch_sampler=batches, collate_fn=collator)",
    )


def _facts(profile: Profile) -> Iterator[tuple[str, object]]:
    key = profile.key
    yield "model", profile.model_name
    yield "device", f"{key.device_name} ({format_bytes(key.device_bytes)})"
    yield "dtype", key.dtype
    yield "attention", key.attention
    yield "workload", key.workload
    yield "pad multiple", key.pad_multiple
    yield "limit", limit_text(profile)
    yield "token budget", profile.token_budget
    yield "max length", f"{profile.max_length} (bound: {profile.bound.value})"
    yield "probes", probe_counts(profile)
    yield "fits", ", ".join(f"{point.batch_size} x {point.length}" for point in _few(profile.frontier))


def _few(points: tuple[FrontierPoint, ...]) -> list[FrontierPoint]:
    """The first, the last, and some evenly between."""
    last = len(points) - 1
    if last < _SHOWN:
        return list(points)
    return [points[round(i * last / (_SHOWN - 1))] for i in range(_SHOWN)]
