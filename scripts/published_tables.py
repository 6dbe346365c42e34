"""Published peaks beside predicted ones, as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from published_measurements import BYTES_PER_MB, SOURCES, Comparison, Source, compare

from budgetdb.models.load import outline_model
from budgetdb.models.spec import ModelSpec
from budgetdb.tracing.attention_call import CardRules
from budgetdb.workloads.base import parse_workload


def of_sources() -> Iterator[str]:
    """A table for each column of each published table, and a summary of all."""
    errors = []
    for source in SOURCES:
        yield f"{source.file}\n{source.notes}\n"
        for comparison in compare(source):
            errors += [abs(error) for error in comparison.errors()]
            yield _table(comparison)
    yield f"all {len(errors)}: growth off by {median(errors):.2%} at the median, {max(errors):.2%} at worst"


def of_file(file: Path, *, model: str, attention: str | None, column: str | None, **settings: Any) -> str:
    """The table of a file of the same form, for a model that is named or a directory, as the code installed runs it."""
    major, minor = settings["capability"].split(".")
    spec = ModelSpec(source=model, head=settings["head"], dtype=settings["dtype"], attention=attention)
    columns = file.read_text(encoding="utf-8").partition("\n")[0].strip().split(",")
    source = Source(
        file=str(file.resolve()),
        columns={column or columns[2]: attention or "sdpa"},
        build=lambda _: outline_model(spec),
        workloads=(parse_workload(settings["workload"]),),
        card=CardRules(capability=(int(major), int(minor))),
        notes="",
    )
    return "\n".join(map(_table, compare(source)))


def _table(comparison: Comparison) -> str:
    errors = comparison.errors()
    lines = [
        f"{comparison.name}: {comparison.constant_bytes / BYTES_PER_MB:.1f} MB are added to each prediction",
        f"{'k x L':>12}{'published MB':>14}{'predicted':>11}{'alive':>10}{'off by':>9}{'of growth':>11}{'of peak':>9}",
    ]
    for row, error in zip(comparison.rows, errors, strict=True):
        predicted = row.allocated_bytes + comparison.constant_bytes
        off = predicted - row.published_bytes
        lines.append(
            f"{row.shape!s:>12}{row.published_bytes / BYTES_PER_MB:>14.1f}{predicted / BYTES_PER_MB:>11.1f}"
            f"{row.live_bytes / BYTES_PER_MB:>10.1f}{off / BYTES_PER_MB:>+9.1f}{error:>+11.2%}"
            f"{off / row.published_bytes:>+9.2%}"
        )
    absolute = [abs(error) for error in errors]
    lines.append(f"{'growth off by':>12} {median(absolute):.2%} at the median, {max(absolute):.2%} at worst\n")
    return "\n".join(lines)
