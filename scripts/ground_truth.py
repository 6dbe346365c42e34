"""What is true under a limit, found without budgetdb's prober: run it by `real_limit.run_job`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from real_limit import LimitedModel, Setting, data_bytes, is_out_of_memory, serve
from small_models import PAD_MULTIPLE, mixed_lengths

import budgetdb
from budgetdb.shapes import Shape

SCRIPT = Path(__file__)
_FIRST_GUESS_TOKENS = 64 * 256


def overhead(setting: Setting) -> dict[str, Any]:
    """Bytes of the process with a warm model in it: a limit has to leave more than this."""
    limited = LimitedModel(setting)
    limited.warm_up()
    return {"overhead_bytes": data_bytes()}


def which_run(setting: Setting, *, shapes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Whether each batch runs, in turn."""
    limited = _ready(setting)
    return {"runs": [limited.fits(Shape(rows, length)) for rows, length in shapes]}


def frontier(setting: Setting, *, lengths: Sequence[int]) -> dict[str, Any]:
    """The largest batch size at each of `lengths`: it ran, and one row more did not."""
    limited = _ready(setting)
    found: dict[int, int] = {}
    for length in sorted(lengths, reverse=True):
        found[length] = _largest_batch(limited, length, guess=_guess(found, length))
    return {
        "frontier": [found[length] for length in lengths],
        "steps": limited.steps,
        "out_of_memory": limited.out_of_memory,
    }


def _ready(setting: Setting) -> LimitedModel:
    limited = LimitedModel(setting)
    limited.warm_up()
    limited.cap()
    return limited


def _largest_batch(limited: LimitedModel, length: int, *, guess: int) -> int:
    """Growing strides from `guess` until one batch fits and another fails, then bisection to the last row."""
    fits, fails, rows, stride = 0, None, max(guess, 1), max(guess // 32, 1)
    while fails is None or (fits == 0 and fails > 1):
        if limited.fits(Shape(rows, length)):
            fits, rows = rows, rows + stride
        else:
            fails, rows = rows, max(rows - stride, 1)
        stride *= 2
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if limited.fits(Shape(middle, length)):
            fits = middle
        else:
            fails = middle
    return fits


def _guess(found: Mapping[int, int], length: int) -> int:
    """Where to start: bytes per token drawn as a line through the two shortest lengths that are known."""
    known = [(near, 1 / (near * rows)) for near, rows in sorted(found.items()) if rows][:2]
    if len(known) < 2:
        return int(1 / known[0][1] if known else _FIRST_GUESS_TOKENS) // length
    (near, near_cost), (far, far_cost) = known
    cost = near_cost + (far_cost - near_cost) * (length - near) / (far - near)
    return int(1 / max(cost, near_cost / 4)) // length


def evaluate(setting: Setting, *, database: str, samples: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Plain evaluations of texts of mixed length, longest first, in batches from the profile in `database`."""
    limited = LimitedModel(setting)
    limited.cap()
    return {"runs": [_evaluate_once(limited, setting, database, mixed_lengths(samples, seed=seed)) for seed in seeds]}


def _evaluate_once(limited: LimitedModel, setting: Setting, database: str, lengths: list[int]) -> dict[str, Any]:
    batches = budgetdb.make_batch_sampler(
        limited.model,
        lengths,
        pad_multiple=PAD_MULTIPLE,
        memory_limit_bytes=setting.memory_limit_bytes,
        strategy="fewest",  # full batches: the question is whether they fit
        on_miss="error",
        store=budgetdb.ProfileStore(Path(database)),
    )
    sides = zip(batches.batch_sizes.tolist(), batches.batch_lengths.tolist(), strict=True)
    shapes = [Shape(rows, length) for rows, length in sides]
    full = {shape for shape in shapes if shape.batch_size == batches.profile.max_batch_size(shape.length)}
    ended = _batches_that_run(limited, shapes)
    return {
        "batches": len(shapes),
        "full": sum(shape in full for shape in shapes),
        "full_lengths": len({shape.length for shape in full}),
        "limit_bytes": batches.profile.limit_bytes,
        "out_of_memory_at": str(shapes[ended]) if ended < len(shapes) else None,
    }


def _batches_that_run(limited: LimitedModel, shapes: Sequence[Shape]) -> int:
    """How many batches of a plain loop end before one runs out of memory."""
    outputs = None
    for ended, shape in enumerate(shapes):
        try:
            inputs = limited.workload.inputs(limited.model, shape, torch.device("cpu"))
            # As in any loop, the outputs of the batch before are alive until the name is bound anew.
            outputs = limited.workload.step(limited.model, inputs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return ended
    del outputs
    return len(shapes)


if __name__ == "__main__":
    serve({"overhead": overhead, "which_run": which_run, "frontier": frontier, "evaluate": evaluate})
