"""What is true under a limit, found without budgetdb's prober: run it by `real_limit.run_job`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from real_limit import LimitedModel, Setting, data_bytes, is_out_of_memory, serve
from small_models import PAD_MULTIPLE, mixed_lengths

import budgetdb
from budgetdb.shapes import Shape

_FIRST_GUESS = 64


def overhead(setting: Setting) -> dict[str, Any]:
    """Bytes of the process with a warm model in it: a limit has to leave more than this."""
    limited = LimitedModel(setting)
    limited.warm_up()
    return {"overhead_bytes": data_bytes()}


def frontier(setting: Setting, *, lengths: Sequence[int]) -> dict[str, Any]:
    """The largest batch size at each of `lengths`: it ran, and one row more did not."""
    limited = LimitedModel(setting)
    limited.warm_up()
    limited.cap()
    found: dict[int, int] = {}
    guess = _FIRST_GUESS * max(lengths)
    for length in sorted(lengths, reverse=True):
        found[length] = largest(lambda rows, length=length: limited.fits(Shape(rows, length)), guess // length)
        guess = found[length] * length
    return {
        "frontier": [found[length] for length in lengths],
        "steps": limited.steps,
        "out_of_memory": limited.out_of_memory,
        "data_bytes": data_bytes(),
    }


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest number that `fits`, if every smaller one does too: strides away from `guess`, then bisection."""
    lower, upper, candidate, stride = 0, None, max(guess, 1), max(guess // 16, 1)
    while upper is None or (lower == 0 and upper > 1):
        if fits(candidate):
            lower, candidate = candidate, candidate + stride
        else:
            upper, candidate = candidate, max(candidate - stride, 1)
        stride *= 2
    while upper - lower > 1:
        middle = (lower + upper) // 2
        if fits(middle):
            lower = middle
        else:
            upper = middle
    return lower


def evaluate(setting: Setting, *, database: str, samples: int, seed: int) -> dict[str, Any]:
    """A plain evaluation of texts of mixed length, longest first, in batches from the profile in `database`."""
    limited = LimitedModel(setting)
    limited.cap()
    batches = budgetdb.make_batch_sampler(
        limited.model,
        mixed_lengths(samples, seed=seed),
        pad_multiple=PAD_MULTIPLE,
        memory_limit_bytes=setting.memory_limit_bytes,
        on_miss="error",
        store=budgetdb.ProfileStore(Path(database)),
    )
    shapes = [Shape(*map(int, sides)) for sides in zip(batches.batch_sizes, batches.batch_lengths, strict=True)]
    ended, outputs = 0, None
    try:
        for shape in shapes:
            inputs = limited.workload.inputs(limited.model, shape, torch.device("cpu"))
            # As in a plain loop, the outputs of the batch before are alive until the name is bound anew.
            outputs = limited.workload.step(limited.model, inputs)
            ended += 1
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    del outputs
    return {
        "batches": len(shapes),
        "ended": ended,
        "lengths": len({shape.length for shape in shapes}),
        "failed": str(shapes[ended]) if ended < len(shapes) else None,
        "shapes": [[s.batch_size, s.length, batches.profile.max_batch_size(s.length)] for s in shapes],
        "limit_mib": batches.profile.limit_bytes / 2**20,
        "data_bytes": data_bytes(),
    }


if __name__ == "__main__":
    serve({"overhead": overhead, "frontier": frontier, "evaluate": evaluate})
