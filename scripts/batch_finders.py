"""Other ways to find a batch size, each under the same limit: run it by `real_limit.run_job`.

Each answers with the token budget that it leaves its user with, the length it looked at, and what it ran for that.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from real_limit import LimitedModel, Setting, is_out_of_memory, serve
from small_models import MAX_LENGTH, PAD_MULTIPLE, mixed_lengths

from budgetdb.shapes import Shape

SCRIPT = Path(__file__)
MICM_VERSION = "0.5.1"
_MICM_MODULE = "micm_nlp/training/batching.py"
# Enough samples that the device ends the search and not the data set.
_MICM_SAMPLES = 20_000
# What a user of accelerate might guess for the batches that come first in ascending order; it never goes above.
_ACCELERATE_ROWS, _ACCELERATE_LENGTH = 4096, 8


def micm(setting: Setting, *, path: str) -> dict[str, Any]:
    """micm-nlp's `calibrate_token_budget`, as it stands in the module at `path`."""
    calibrate = _module_at(Path(path)).calibrate_token_budget
    limited = _ready(setting)
    model = _TranslatedModel(limited)
    budget = calibrate(model=model, lengths=mixed_lengths(_MICM_SAMPLES), pad_multiple=PAD_MULTIPLE)
    return _answer(limited, budget=budget, length=model.largest.length)


def accelerate(setting: Setting) -> dict[str, Any]:
    """The `find_executable_batch_size` of accelerate, with its own decrement."""
    from accelerate.utils import find_executable_batch_size

    limited = _ready(setting)

    def run(batch_size: int) -> int:
        limited.run(Shape(batch_size, _ACCELERATE_LENGTH))
        return batch_size

    rows: int = find_executable_batch_size(run, starting_batch_size=_ACCELERATE_ROWS)()
    return _answer(limited, budget=rows * _ACCELERATE_LENGTH, length=_ACCELERATE_LENGTH)


def doubling(setting: Setting) -> dict[str, Any]:
    """Double the batch of the longest length until it fails, then bisect to within 3 %."""
    limited = _ready(setting)
    fits, fails = 0, 1
    while limited.fits(Shape(fails, MAX_LENGTH)):
        fits, fails = fails, 2 * fails
    while fails - fits > max(1, 0.03 * fits):
        middle = (fits + fails) // 2
        if limited.fits(Shape(middle, MAX_LENGTH)):
            fits = middle
        else:
            fails = middle
    return _answer(limited, budget=fits * MAX_LENGTH, length=MAX_LENGTH)


def micm_module() -> Path | None:
    """Where the installed micm-nlp has its batching module, which needs none of the rest; None if it is not there."""
    try:
        files = importlib.metadata.files("micm-nlp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if str(file) == _MICM_MODULE), None)


class _TranslatedModel:
    """A model that micm-nlp's search can use on a CPU: it knows no error but CUDA's, and gives labels to every head.

    Attributes:
        largest: the largest batch that ran.
    """

    def __init__(self, limited: LimitedModel) -> None:
        self._limited = limited
        self._takes_labels = "labels" in inspect.signature(limited.model.forward).parameters
        self.largest = Shape(0, 0)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Where to find the device."""
        return self._limited.model.parameters()

    def __call__(self, labels: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """One forward pass, with the loss where there is a head for it."""
        gc.collect()
        if self._takes_labels:
            inputs["labels"] = labels
        self._limited.steps += 1
        try:
            outputs = self._limited.model(**inputs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            self.largest = max(self.largest, Shape(*labels.shape))
            return outputs
        self._limited.out_of_memory += 1
        raise torch.OutOfMemoryError("CPU out of memory")


def _module_at(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("micm_batching", path)
    if specification is None or specification.loader is None:
        raise FileNotFoundError(f"{path.name} is no Python module")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _ready(setting: Setting) -> LimitedModel:
    limited = LimitedModel(setting)
    limited.warm_up()
    limited.cap()
    return limited


def _answer(limited: LimitedModel, *, budget: int, length: int) -> dict[str, Any]:
    return {"budget": budget, "length": length, "steps": limited.steps, "out_of_memory": limited.out_of_memory}


if __name__ == "__main__":
    serve({"micm": micm, "accelerate": accelerate, "doubling": doubling})
