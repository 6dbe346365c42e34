"""Sections 3 and 4: the peak of a step, traced, simulated and measured; and the trace scaled by three probes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product

from gpu_acceptance_models import WORKLOADS, Case
from gpu_acceptance_record import Bench, Clock, Row, for_each
from gpu_acceptance_traced import Foretold, foretold

from budgetdb.calibration.prober import Prober
from budgetdb.costs.calibrated import ScaledTrace
from budgetdb.costs.exact import ExactCost
from budgetdb.profiles import CostRecord, Outcome, Probe
from budgetdb.shapes import Shape

# Of the room, as the trace sees it: batches between a single row and nearly all.
_FILLED = (0.2, 0.5, 0.85)
_FILLED_WITHOUT_HOLD = (0.5,)


def peaks(bench: Bench, clock: Clock) -> Row:
    """Every model at its lengths and several batch sizes: rows that end in padding, and full ones.

    Padded rows of all models come first, then the others.
    """
    pairs = [(case, mask) for mask, case in product(WORKLOADS, bench.cases)]
    return for_each(pairs, partial(_measure, bench=bench, clock=clock), bench, clock)


def _measure(pair: tuple[Case, str], bench: Bench, clock: Clock) -> list[Row]:
    case, mask = pair
    with foretold(case, WORKLOADS[mask](), bench, longest=bench.size.lengths[-1]) as told:
        model = case.load(bench.device.torch_device)
        rows: list[Row] = []
        for hold in ("previous", "none"):
            prober = Prober(
                device=bench.device,
                model=model,
                workload=WORKLOADS[mask](hold=hold),
                resident_bytes=told.traced.resident_bytes,
            )
            prober.start(longest=bench.size.lengths[-1])
            shapes = _shapes(told, bench, hold=hold)
            rows += [_row(told, prober, shape, hold=hold) for shape in shapes if clock.left_s]
            prober.close()
    known = {
        "model": str(case),
        "mask": mask,
        "resident_bytes": told.traced.resident_bytes,
        "is_exact": told.traced.is_exact,
        "cost": told.traced.cost.record().model_dump(mode="json"),
    }
    return [{**known, "probes": rows}]


def _shapes(told: Foretold, bench: Bench, *, hold: str) -> Iterator[Shape]:
    for length in bench.size.lengths:
        largest = told.rows(length, bench.room_bytes)
        if hold == "previous" and largest:
            yield Shape(1, length)
        shares = _FILLED if hold == "previous" else _FILLED_WITHOUT_HOLD
        for rows in sorted({told.rows(length, share * bench.room_bytes) for share in shares}):
            if rows > 1:
                yield Shape(rows, length)


def _row(told: Foretold, prober: Prober, shape: Shape, *, hold: str) -> Row:
    """One probe beside what was expected of it; for `previous` the traced peak is the cost model's, else a replay's."""
    expected = told.probe(shape, hold=hold)
    formula = told.traced.cost.peak_bytes(shape) if hold == "previous" else expected.live_bytes
    probe = prober.probe(shape)
    return {
        "hold": hold,
        "batch_size": shape.batch_size,
        "length": shape.length,
        "outcome": probe.outcome.value,
        "traced_bytes": formula,
        "replayed_bytes": expected.live_bytes,
        "simulated_allocated_bytes": expected.allocated_bytes,
        "simulated_reserved_bytes": expected.reserved_bytes,
        "measured_allocated_bytes": probe.peak_allocated_bytes,
        "measured_reserved_bytes": probe.peak_reserved_bytes,
        "baseline_bytes": probe.baseline_bytes,
        "alloc_retries": probe.alloc_retries,
        "elapsed_s": round(probe.elapsed_s, 4),
        "message": probe.message,
    }


def scaled(bench: Bench, clock: Clock) -> Row:
    """For each model and mask of section 3: a calibrated cost model of three of its probes, held to the others.

    Raises:
        KeyError: section 3 has not run.
    """
    if "peaks" not in bench.results:
        raise KeyError("section 3 has no result to work with: run it first")
    return for_each(bench.results["peaks"]["rows"], _fit, replace(bench, earlier={}), clock)


def _fit(measured: Row) -> list[Row]:
    if not measured["is_exact"]:
        return []
    probes = [_as_probe(row) for row in measured["probes"] if row["hold"] == "previous" and row["outcome"] == "fits"]
    chosen = three_of(probes)
    held_out = [probe for probe in probes if probe not in chosen]
    if len(chosen) < 3 or not held_out:
        return []
    exact = CostRecord.model_validate(measured["cost"]).model
    if not isinstance(exact, ExactCost):
        raise TypeError(f"an exact trace has a cost model of kind {exact.kind}")
    scaled_trace = ScaledTrace.of(exact, measured["resident_bytes"])
    model = scaled_trace.fit(chosen)
    parameters = model.parameters()
    peak = [model.peak_bytes(probe.shape) / probe.peak_bytes - 1 for probe in held_out]
    growth = [
        (model.peak_bytes(probe.shape) - probe.peak_bytes) / max(probe.peak_bytes - probe.baseline_bytes, 1)
        for probe in held_out
    ]
    return [
        {
            "model": measured["model"],
            "mask": measured["mask"],
            "probes": [str(probe.shape) for probe in chosen],
            "beyond_weights_bytes": int(float(str(parameters["c"])) - measured["resident_bytes"]),
            "factor": parameters["s"],
            "bytes_per_token": parameters["d"],
            "held_out": len(held_out),
            "peak_errors": [round(error, 6) for error in peak],
            "growth_errors": [round(error, 6) for error in growth],
            "leave_one_out": scaled_trace.leave_one_out(chosen),
        }
    ]


def three_of(probes: Sequence[Probe]) -> list[Probe]:
    """The largest batch of the longest length, that of the shortest, and a middling one between."""
    by_length = [list(group) for _, group in groupby(sorted(probes, key=lambda p: p.length), key=lambda p: p.length)]
    if not by_length:
        return []
    middle = sorted(by_length[len(by_length) // 2], key=lambda probe: probe.batch_size)
    picked = [_largest(by_length[-1]), _largest(by_length[0]), middle[len(middle) // 2]]
    return [probe for i, probe in enumerate(picked) if probe not in picked[:i]]


def _largest(probes: Sequence[Probe]) -> Probe:
    return max(probes, key=lambda probe: probe.batch_size)


def _as_probe(row: Row) -> Probe:
    return Probe(
        batch_size=row["batch_size"],
        length=row["length"],
        outcome=Outcome.FITS,
        peak_allocated_bytes=row["measured_allocated_bytes"],
        peak_reserved_bytes=row["measured_reserved_bytes"],
        baseline_bytes=row["baseline_bytes"],
        alloc_retries=row["alloc_retries"],
    )
