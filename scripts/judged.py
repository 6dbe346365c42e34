"""One small model calibrated under a real limit, and what is true under it: for the benchmark and for the tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ground_truth
from real_limit import Setting, run_job
from small_models import LENGTHS, MAX_LENGTH, PAD_MULTIPLE, mixed_lengths, write_configuration

import budgetdb
from budgetdb.calibration.calibrator import Listener
from budgetdb.profiles import Profile
from budgetdb.shapes import Shape

# Small enough that a step at the limit takes half a second, and large beside the headroom of 8 MiB.
ROOM_BYTES = 224 * 2**20
# Batches of an evaluation, all full but one or two.
_BATCHES = 13
_SAMPLED = 1000


def default_limit_bytes(directory: Path) -> int:
    """A limit for any of the models that leaves `ROOM_BYTES` for tensors, whatever this build of torch takes.

    A configuration is written into `directory`. What the models themselves take differs by a MiB.
    """
    setting = Setting(str(write_configuration("t5", directory)), "eager", 0)
    overhead_bytes: int = run_job(ground_truth.SCRIPT, "overhead", setting)["overhead_bytes"]
    return overhead_bytes + ROOM_BYTES


def calibrate(setting: Setting, database: Path, *, on_event: Listener | None = None) -> Profile:
    """Have budgetdb calibrate the model of `setting` under its limit.

    Its worker inherits this process's environment: set `real_limit.ENVIRONMENT` first.
    """
    return budgetdb.calibrate(
        setting.config,
        attention=setting.attention,
        memory_limit_bytes=setting.memory_limit_bytes,
        pad_multiple=PAD_MULTIPLE,
        max_length=MAX_LENGTH,
        device="cpu",
        store=budgetdb.ProfileStore(database),
        on_event=on_event,
    )


def true_frontier(setting: Setting, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """The true `frontier` at each of `lengths`; see `ground_truth.frontier`."""
    return run_job(ground_truth.SCRIPT, "frontier", setting, lengths=list(lengths))


def which_run(setting: Setting, shapes: Sequence[Shape]) -> list[bool]:
    """For each batch, whether it runs under the limit."""
    sides = [[shape.batch_size, shape.length] for shape in shapes]
    runs: list[bool] = run_job(ground_truth.SCRIPT, "which_run", setting, shapes=sides)["runs"]
    return runs


def evaluate(setting: Setting, database: Path, profile: Profile, *, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Evaluations of texts of mixed length in one fresh process, one for each seed; see `ground_truth.evaluate`."""
    job = {"database": str(database), "samples": _samples(profile), "seeds": list(seeds)}
    runs: list[dict[str, Any]] = run_job(ground_truth.SCRIPT, "evaluate", setting, **job)["runs"]
    return runs


def shares(profile: Profile, rows: Mapping[int, int]) -> dict[int, float]:
    """The profile's batch size over `rows` at each length."""
    return {length: profile.max_batch_size(length) / true for length, true in rows.items()}


def _samples(profile: Profile) -> int:
    """How many texts make up `_BATCHES` full batches."""
    lengths = mixed_lengths(_SAMPLED)
    return math.ceil(_BATCHES * _SAMPLED / sum(1 / profile.max_batch_size(length) for length in lengths))
