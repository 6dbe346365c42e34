"""The results file as Markdown: one table a section, every figure computed from the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from budgetdb.settings import format_bytes

Row = Mapping[str, Any]


def markdown(document: Row) -> str:
    """All sections that have run, in order."""
    about, sections = document["about"], document["sections"]
    lines = ["# Acceptance", "", ", ".join(f"{name} {value}" for name, value in about.items())]
    for number, (name, (title, table)) in enumerate(TABLES.items(), start=1):
        section = sections.get(name)
        if section is None:
            continue
        lines += ["", f"## {number}. {title} ({section['elapsed_s']:.0f} s)", ""]
        if section["error"] is not None:
            lines += [f"failed: {section['error']}"]
        if section["result"] is not None:
            lines += table(section["result"])
            left_out = section["result"].get("left_out", [])
            lines += ["", *(f"- left out: {each}" for each in left_out)] if left_out else []
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines]


def _facts(result: Row) -> list[str]:
    figures = {**result["device"], **result["versions"], **result["allocator"]["environment"]}
    sizes = {name: _bytes(value) for name, value in result["memory"].items()}
    shown = {**figures, "total_bytes": _bytes(result["device"]["total_bytes"]), **sizes}
    return _table(["fact", "value"], [(name, value) for name, value in shown.items() if value not in (None, "")])


def _events(result: Row) -> list[str]:
    head = ["model", "shape", "traced", "real", "equal", "only real (bytes x times)", "only traced", "peak"]
    rows = [
        (
            row["model"],
            row["shape"],
            row["events_traced"],
            row["events_real"],
            _equality(row),
            _births(row["births_only_real"]),
            _births(row["births_only_traced"]),
            _percent(row["peak_traced_bytes"] / max(row["peak_real_bytes"], 1) - 1),
        )
        for row in result["rows"]
    ]
    lines = _table(head, rows)
    with_segments = [row for row in result["rows"] if "segments_equal" in row]
    if not with_segments:
        return [*lines, "", "Segments: none on a CPU."]
    head = ["model", "segments simulated", "real", "equal", "reserved simulated", "real", "reserved at the start"]
    segments = [
        (
            row["model"],
            row["segments_simulated"],
            row["segments_real"],
            "yes" if row["segments_equal"] else f"from {row['segments_first_difference']} on not",
            _bytes(row["reserved_simulated_bytes"]),
            _bytes(row["reserved_real_bytes"]),
            _bytes(row["reserved_at_start_bytes"]),
        )
        for row in with_segments
    ]
    return [*lines, "", *_table(head, segments)]


def _peaks(result: Row) -> list[str]:
    head = ["model", "mask", "hold", "exact", "shapes", "ran", "peak", "growth", "allocated (simulated)", "reserved"]
    rows = []
    for row in result["rows"]:
        for hold in dict.fromkeys(probe["hold"] for probe in row["probes"]):
            probes = [probe for probe in row["probes"] if probe["hold"] == hold]
            ran = [probe for probe in probes if probe["measured_allocated_bytes"]]
            pairs = [(p["traced_bytes"], p["measured_allocated_bytes"], p["baseline_bytes"]) for p in ran]
            allocated = [p["simulated_allocated_bytes"] / p["measured_allocated_bytes"] - 1 for p in ran]
            reserved = [p["simulated_reserved_bytes"] / p["measured_reserved_bytes"] - 1 for p in ran]
            rows.append(
                (
                    row["model"],
                    row["mask"],
                    hold,
                    "yes" if row["is_exact"] else "no",
                    len(probes),
                    sum(probe["outcome"] == "fits" for probe in probes),
                    _span(traced / real - 1 for traced, real, _ in pairs),
                    _span((traced - real) / max(real - base, 1) for traced, real, base in pairs),
                    _span(allocated),
                    _span(reserved),
                )
            )
    return [*_table(head, rows), "", "Errors of what was expected over what was measured, least to largest."]


def _scaled(result: Row) -> list[str]:
    head = ["model", "mask", "probes", "beyond weights", "factor", "B/token", "held out", "peak", "growth"]
    rows = [
        (
            row["model"],
            row["mask"],
            ", ".join(row["probes"]),
            _bytes(row["beyond_weights_bytes"]),
            f"{row['factor']:.4f}",
            f"{row['bytes_per_token']:.1f}",
            row["held_out"],
            _span(row["peak_errors"]),
            _span(row["growth_errors"]),
        )
        for row in result["rows"]
    ]
    return _table(head, rows)


def _decisions(result: Row) -> list[str]:
    head = ["allocator", "scenario", "fits, ran", "fits, failed", "fails, failed", "fails, ran", "right"]
    kinds = list(dict.fromkeys((row["allocator"], row["scenario"]) for row in result["rows"]))
    rows = []
    for kind in kinds:
        counted = Counter(
            (row["expected"], row["ran"]) for row in result["rows"] if (row["allocator"], row["scenario"]) == kind
        )
        cells = [counted[pair] for pair in ((True, True), (True, False), (False, False), (False, True))]
        rows.append((*kind, *cells, f"{(cells[0] + cells[2]) / sum(cells):.0%}"))
    wrong = [
        f"- {row['allocator']} {row['scenario']}, {row['model']} at {row['batch_size']} x {row['length']} "
        f"({row['share']:.3f} of the frontier): expected to {'fit' if row['expected'] else 'fail'}"
        for row in result["rows"]
        if row["expected"] != row["ran"]
    ]
    return [*_table(head, rows), *(["", *wrong] if wrong else [])]


def _searches(result: Row) -> list[str]:
    head = ["model", "way", "steps", "OOM", "seconds", "token budget", "at length", "rows / true rows at each length"]
    rows = []
    for row in result["rows"]:
        frontier = row["frontier"]
        for found in row["found"]:
            shares = [
                f"{length}: {found['rows'][length]} / {true} = {found['rows'][length] / true:.2f}"
                for length, true in frontier.items()
                if true
            ]
            cells = (found["steps"], found["out_of_memory"], found["elapsed_s"], found["budget"])
            rows.append((row["model"], found["way"], *cells, found["length"] or "all", ", ".join(shares)))
    return _table(head, rows)


def _leaks(result: Row) -> list[str]:
    head = ["model", "steps", "OOM", "leaked", "allocated: warm", "searched", "cleaned", "dropped", "reserved cleaned"]
    rows = []
    for row in result["rows"]:
        readings = row["readings"]
        allocated = [readings[name]["allocated_bytes"] for name in ("warm", "searched", "cleaned", "dropped")]
        reserved = readings["cleaned"].get("reserved_bytes", "-")
        rows.append((row["model"], row["steps"], row["out_of_memory"], row["leaked_bytes"], *allocated, reserved))
    return _table(head, rows)


def _profiles(result: Row) -> list[str]:
    head = ["model", "profile", "cost", "bound", "limit", "token budget", "probes", "OOM", "seconds", "batches", "OOM"]
    names = ["model", "id", "cost", "bound", "limit_bytes", "token_budget", "probes", "out_of_memory"]
    names += ["calibration_s", "batches", "batches_out_of_memory"]
    rows = [[_bytes(row[name]) if name == "limit_bytes" else row[name] for name in names] for row in result["rows"]]
    return _table(head, rows)


def _span(errors: Iterable[float]) -> str:
    seen = list(errors)
    if not seen:
        return "-"
    return _percent(seen[0]) if min(seen) == max(seen) else f"{_percent(min(seen))} … {_percent(max(seen))}"


def _percent(error: float) -> str:
    return f"{error:+.2%}"


def _equality(row: Row) -> str:
    if row["is_equal"]:
        return "yes"
    return "but for what is only real" if row["is_equal_but_for"] else f"from {row['first_difference']} on not"


def _births(pairs: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{size} x {times}" for size, times in pairs) or "-"


def _bytes(value: object) -> object:
    return format_bytes(value) if isinstance(value, int) and value >= 0 else value


TABLES: Mapping[str, tuple[str, Callable[[Row], list[str]]]] = {
    "facts": ("The device", _facts),
    "events": ("A step's allocations", _events),
    "peaks": ("Peaks", _peaks),
    "scaled": ("The trace scaled by three probes, at shapes held out", _scaled),
    "decisions": ("Out of memory, expected and real", _decisions),
    "searches": ("Searches beside each other", _searches),
    "leaks": ("What searches leave on the device", _leaks),
    "profiles": ("Profiles", _profiles),
}
