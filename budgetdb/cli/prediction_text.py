"""What a prediction says, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from budgetdb.cli.details import limit_text
from budgetdb.cli.output import print_facts
from budgetdb.settings import format_bytes

if TYPE_CHECKING:
    from budgetdb.devices.catalogue import CatalogueCard
    from budgetdb.errors import DoesNotFitError
    from budgetdb.prediction import Prediction

CARD_COLUMNS = ("card", "VRAM", "token budget", "at length", "fits", "bound", "fragmentation")
CARD_NUMBERS = ("VRAM", "token budget", "at length", "fragmentation")
# Less than this is not worth a line of advice.
_WORTH_SAYING = 0.01


def print_prediction(prediction: Prediction, *, stored: bool | None) -> None:
    """Print the profile, what it rests on, and how far it may be off; `stored` is None where nobody asked to."""
    profile = prediction.profile
    click.secho(f"profile {profile.id} is predicted: no step was run", bold=True)
    print_facts(_facts(prediction))
    for line in _notes(prediction, stored=stored):
        click.echo(line)


def prediction_as_json(prediction: Prediction) -> dict[str, Any]:
    """The profile with its id, and what it rests on."""
    profile = prediction.profile
    return {
        "id": profile.id,
        **profile.model_dump(mode="json"),
        "prediction": {
            "exact": prediction.traced.is_exact,
            "reason": prediction.traced.reason,
            "traces": prediction.traced.traces,
            "moments": [str(moment) for _, moment in prediction.traced.moments],
            "fragmentation_bytes": prediction.fragmentation_bytes,
            "fragmentation_bytes_expandable_segments": prediction.expandable_bytes,
            "workspace_bytes": prediction.workspace_bytes,
        },
    }


def card_row(card: CatalogueCard, found: Prediction | DoesNotFitError) -> tuple[object, ...]:
    """One line of the table over the catalogue."""
    if isinstance(found, Exception):
        return (card.name, format_bytes(card.total_bytes), "-", "-", "does not fit", "memory", "-")
    profile = found.profile
    longest = profile.frontier[-1]
    return (
        card.name,
        format_bytes(card.total_bytes),
        profile.token_budget,
        profile.max_length,
        f"{longest.batch_size} x {longest.length}",
        profile.bound.value,
        format_bytes(found.fragmentation_bytes),
    )


def card_as_json(card: CatalogueCard, found: Prediction | DoesNotFitError) -> dict[str, Any]:
    """One card of the catalogue and its prediction, or why nothing fits."""
    if isinstance(found, Exception):
        return {"card": card.name, "total_bytes": card.total_bytes, "error": str(found)}
    return {"card": card.name, "total_bytes": card.total_bytes, **prediction_as_json(found)}


def _facts(prediction: Prediction) -> Iterator[tuple[str, object]]:
    profile, traced = prediction.profile, prediction.traced
    key = profile.key
    yield "model", profile.model_name
    yield "device", f"{key.device_name} ({format_bytes(key.device_bytes)})"
    yield "dtype", key.dtype
    yield "attention", key.attention
    yield "workload", key.workload
    yield "limit", limit_text(profile)
    yield "weights", format_bytes(profile.resident_bytes)
    yield "trace", _trace_text(prediction)
    for form, moment in traced.moments:
        yield "  peak in", f"{moment}{f', from length {form.first:.0f} on' if form.first > 1 else ''}"
    if prediction.fragmentation_bytes:
        yield "fragmentation", f"{format_bytes(prediction.fragmentation_bytes)} in a run of mixed lengths"
    yield "error bound", f"{profile.error_bound:.0%} of what a step adds to the weights; the headroom covers it"
    yield "token budget", profile.token_budget
    yield "max length", f"{profile.max_length} (bound: {profile.bound.value})"
    yield "fits", ", ".join(f"{point.batch_size} x {point.length}" for point in profile.frontier)


def _trace_text(prediction: Prediction) -> str:
    traced = prediction.traced
    if traced.is_exact:
        return f"exact, from {traced.traces} traces"
    return f"fitted to {traced.traces} traces, up to {traced.error:.1%} off, since {traced.reason}"


def _notes(prediction: Prediction, *, stored: bool | None) -> Iterator[str]:
    if prediction.gain_of_expandable > _WORTH_SAYING:
        yield (
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True would make room for "
            f"{prediction.gain_of_expandable:.0%} more"
        )
    if stored is not None:
        yield "It is stored." if stored else "It is not stored: a measured profile is there."
