"""Section 8: profiles as `budgetdb calibrate` makes them, exported; and evaluations of mixed text by each."""

from __future__ import annotations

import json
import math
import re
import time
from functools import partial
from typing import Any

from gpu_acceptance_models import PAD_MULTIPLE, Case
from gpu_acceptance_record import Bench, Clock, Row, for_each
from small_models import mixed_lengths

import budgetdb
from budgetdb.calibration.outcomes import ErrorKind, take
from budgetdb.calibration.prober import Prober
from budgetdb.models.facts import resident_bytes
from budgetdb.models.quiet import quiet_transformers
from budgetdb.profiles import Bound, Profile
from budgetdb.shapes import Shape
from budgetdb.workloads.forward import ForwardWorkload

# Batches of an evaluation, all full but one or two, of texts like those that lengths are drawn from.
_BATCHES, _SAMPLED = 24, 1000


def profiles(bench: Bench, clock: Clock) -> Row:
    """Calibrate each model by name in a worker; those a run before this one has calibrated are found in its database.

    The profiles go to `profiles/DEVICE.json` as a list, after each model.
    """
    return for_each(bench.cases, partial(_calibrate, bench=bench, clock=clock), bench, clock)


def _calibrate(case: Case, bench: Bench, clock: Clock) -> list[Row]:
    started = time.monotonic()
    profile = budgetdb.calibrate(
        case.config,
        max_length=bench.size.lengths[1],
        device=str(bench.device.torch_device),
        dtype=case.dtype,
        attention=case.attention,
        pad_multiple=PAD_MULTIPLE,
        memory_limit_bytes=bench.memory_limit_bytes,
        weights="random",
        timeout_s=max(clock.left_s, 1.0),
        store=budgetdb.ProfileStore(bench.out / "profiles.db"),
    )
    elapsed_s = time.monotonic() - started
    _export(profile, bench)
    batches, failed = _evaluate(case, profile, bench, clock)
    return [
        {
            "model": str(case),
            "id": profile.id,
            "cost": profile.cost.kind,
            "bound": profile.bound.value,
            "limit_bytes": profile.limit_bytes,
            "token_budget": profile.token_budget,
            "probes": len(profile.probes),
            "out_of_memory": sum(not probe.fits for probe in profile.probes),
            "calibration_s": round(elapsed_s, 1),
            "batches": batches,
            "batches_out_of_memory": failed,
        }
    ]


def _export(profile: Profile, bench: Bench) -> None:
    """Put the profile into its device's file, in place of an earlier one with its key; not one that time cut short."""
    if profile.bound is Bound.TIME:
        return
    name = re.sub(r"[^a-z0-9]+", "-", bench.device.info().name.lower()).strip("-")
    path = bench.out / "profiles" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    record = profile.model_dump(mode="json")
    records = [*(each for each in there if each["key"] != record["key"]), record]
    path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def _evaluate(case: Case, profile: Profile, bench: Bench, clock: Clock) -> tuple[int, int]:
    """How many batches of a plain evaluation under the profile's limit ran out of memory, of how many."""
    model = case.load(bench.device.torch_device)
    prober = Prober(device=bench.device, model=model, workload=ForwardWorkload(), resident_bytes=resident_bytes(model))
    prober.start(longest=profile.max_length)
    prober.cap(profile.limit_bytes)
    try:
        with quiet_transformers():
            return _run(model, profile, bench, clock)
    finally:
        prober.close()


def _run(model: Any, profile: Profile, bench: Bench, clock: Clock) -> tuple[int, int]:
    """Longest first, nothing cleaned in between, as many as there is time for."""
    lengths = [min(length, profile.max_length) for length in mixed_lengths(_samples(profile))]
    sampler = budgetdb.ProfileBatchSampler(lengths, profile, pad_multiple=PAD_MULTIPLE)
    workload, batches, failed = ForwardWorkload(), 0, 0
    outputs: object = None
    for rows, length in zip(sampler.batch_sizes.tolist(), sampler.batch_lengths.tolist(), strict=True):
        if not clock.left_s:
            break
        batches += 1
        try:
            inputs = workload.inputs(model, Shape(rows, length), bench.device.torch_device)
            outputs = workload.step(model, inputs)
            bench.device.synchronize()
        except Exception as error:  # whatever a model raises: it is sorted by what it says
            if take(error).kind not in (ErrorKind.OOM, ErrorKind.OOM_IF_MEMORY_LOW):
                raise
            failed += 1
    del outputs
    return batches, failed


def _samples(profile: Profile) -> int:
    """How many texts make up so many full batches."""
    lengths = mixed_lengths(_SAMPLED)
    share = sum(1 / max(profile.max_batch_size(min(length, profile.max_length)), 1) for length in lengths)
    return math.ceil(_BATCHES * _SAMPLED / share)
