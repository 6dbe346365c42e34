"""All of one profile, for people."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from budgetdb.cli.output import minute, print_facts, print_table
from budgetdb.errors import PluginError, UnknownNameError
from budgetdb.plugins import COSTS
from budgetdb.profiles import Caps, Profile
from budgetdb.settings import format_bytes

if TYPE_CHECKING:
    from budgetdb.profiles import FrontierPoint, Probe

_NUMBERS = ("length", "batch size", "tokens", "expected peak", "allocated", "reserved", "retries", "seconds", "cap")


def print_details(profile: Profile) -> None:
    """Print the profile: what it says, its key, environment, cost model, frontier and probes."""
    _heading(f"profile {profile.id}")
    print_facts(_facts(profile))
    _heading("key")
    print_facts(profile.key.model_dump().items())
    _heading("environment")
    print_facts(
        (name, "-" if value in (None, "") else value) for name, value in profile.environment.model_dump().items()
    )
    _heading("cost model")
    print_facts(_cost_facts(profile))
    _heading("largest batch size by length")
    print_table(
        ("length", "batch size", "tokens", "expected peak", "bound", "probed"),
        map(_frontier_row, profile.frontier),
        right=_NUMBERS,
    )
    _heading(f"probes ({probe_counts(profile)})")
    if profile.probes:
        print_table(
            (
                "batch size",
                "length",
                "outcome",
                "allocated",
                "reserved",
                "retries",
                "seconds",
                "cap",
                "purpose",
                "message",
            ),
            map(_probe_row, profile.probes),
            right=_NUMBERS,
            expendable=("purpose", "retries", "cap"),
        )


def probe_counts(profile: Profile) -> str:
    """How many probes a profile rests on, and how many of them ran out of memory."""
    out_of_memory = sum(not probe.fits for probe in profile.probes)
    return f"{len(profile.probes)}, {out_of_memory or 'none'} of them out of memory"


def limit_text(profile: Profile) -> str:
    """The limit and what was taken off it."""
    text = f"{format_bytes(profile.limit_bytes)}, less {format_bytes(profile.headroom_bytes)} of headroom"
    if profile.overhead_bytes:
        text += f"; {format_bytes(profile.overhead_bytes)} more are used outside the allocator"
    return text


def _heading(text: str) -> None:
    click.echo()
    click.secho(text, bold=True)


def _facts(profile: Profile) -> Iterator[tuple[str, object]]:
    yield "model", profile.model_name
    yield "token budget", profile.token_budget
    yield "max length", f"{profile.max_length} (bound: {profile.bound.value})"
    yield "limit", limit_text(profile)
    yield "weights", format_bytes(profile.resident_bytes)
    if profile.caps != Caps():
        limits = profile.caps.model_dump(exclude_none=True, exclude={"reason"})
        listed = ", ".join(f"{name} {value}" for name, value in limits.items())
        yield "caps", f"{listed or 'none'} ({profile.caps.reason.value})"
    if profile.flags:
        yield "flags", ", ".join(profile.flags)
    yield "provenance", profile.provenance.value
    if profile.error_bound:
        yield "error bound", f"{profile.error_bound:.0%} of what a step adds to the weights"
    yield "created", f"{minute(profile.created_at)} UTC"


def _cost_facts(profile: Profile) -> Iterator[tuple[str, object]]:
    yield "kind", profile.cost.kind
    yield "formula", _formula(profile.cost.kind)
    for name, value in profile.cost.parameters.items():
        yield name, f"{value:.6g}" if isinstance(value, float) else value


def _formula(kind: str) -> str:
    """What the kind says of itself: the first sentence of its documentation."""
    try:
        documentation = inspect.getdoc(COSTS.get(kind)) or "-"
    except (UnknownNameError, PluginError) as error:
        return f"not known here ({error})"
    return documentation.partition("\n")[0].replace("`", "")


def _frontier_row(point: FrontierPoint) -> tuple[object, ...]:
    return (
        point.length,
        point.batch_size,
        point.batch_size * point.length,
        format_bytes(point.peak_bytes),
        point.bound.value,
        "yes" if point.probed else "",
    )


def _probe_row(probe: Probe) -> tuple[object, ...]:
    return (
        probe.batch_size,
        probe.length,
        probe.outcome.value,
        format_bytes(probe.peak_allocated_bytes),
        format_bytes(probe.peak_reserved_bytes),
        probe.alloc_retries,
        f"{probe.elapsed_s:.3f}",
        format_bytes(probe.cap_bytes),
        probe.purpose,
        probe.message or "",
    )
