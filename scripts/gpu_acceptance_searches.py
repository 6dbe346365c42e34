"""Section 6: budgetdb's search beside others under one cap, and the true frontier; section 7: what searches leave."""

from __future__ import annotations

import importlib.util
import inspect
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from batch_finders import MICM_VERSION, micm_module
from gpu_acceptance_models import PAD_MULTIPLE, Case
from gpu_acceptance_record import Bench, Clock, Row, for_each
from small_models import mixed_lengths

import budgetdb
from budgetdb.calibration.outcomes import ErrorKind, take
from budgetdb.calibration.prober import Prober
from budgetdb.models.facts import resident_bytes
from budgetdb.models.quiet import quiet_transformers
from budgetdb.shapes import Shape
from budgetdb.workloads.forward import ForwardWorkload

_CASES = 2
# Enough samples that the device ends micm-nlp's search and not the data set.
_MICM_SAMPLES = 20_000
_TOLERANCE = 0.03


class Counted:
    """A live model whose batches run as the loop runs them, twice in a row, and are counted.

    Attributes:
        steps: batches tried.
        out_of_memory: how many of them failed.
    """

    def __init__(self, model: Any, bench: Bench) -> None:
        self.model, self.bench = model, bench
        self._workload = ForwardWorkload()
        self.steps = self.out_of_memory = 0

    def fits(self, shape: Shape) -> bool:
        """Whether the batch runs."""
        self.bench.device.clean()
        self.steps += 1
        try:
            self._run(shape)
        except Exception as error:  # whatever a model raises: it is sorted by what it says
            if take(error).kind not in (ErrorKind.OOM, ErrorKind.OOM_IF_MEMORY_LOW):
                raise
            self.out_of_memory += 1
            return False
        return True

    def _run(self, shape: Shape) -> None:
        inputs = self._workload.inputs(self.model, shape, self.bench.device.torch_device)
        outputs: object = None
        for _ in range(2):
            outputs = self._workload.step(self.model, inputs)
        self.bench.device.synchronize()
        del outputs


class ForMicm:
    """A model as micm-nlp's search wants it: labels for every head, and no error but CUDA's.

    Attributes:
        largest: the largest batch that ran.
    """

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._takes_labels = "labels" in inspect.signature(counted.model.forward).parameters
        self.largest = Shape(0, 0)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Where to find the device."""
        parameters: Iterator[torch.nn.Parameter] = self._counted.model.parameters()
        return parameters

    def __call__(self, labels: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """One forward pass, with the loss where there is a head for it."""
        if self._takes_labels:
            inputs["labels"] = labels
        self._counted.steps += 1
        try:
            outputs = self._counted.model(**inputs)
        except Exception as error:
            if take(error).kind not in (ErrorKind.OOM, ErrorKind.OOM_IF_MEMORY_LOW):
                raise
        else:
            self.largest = max(self.largest, Shape(*labels.shape))
            return outputs
        self._counted.out_of_memory += 1
        raise torch.OutOfMemoryError("out of memory")


def searches(bench: Bench, clock: Clock) -> Row:
    """For some models what each way found, what it ran for it, and the largest batches that run, by bisection."""
    found = for_each(bench.cases[:_CASES], partial(_search, bench=bench, clock=clock), bench, clock)
    if micm_module() is None:
        found["left_out"].append(f"micm-nlp: not installed (pip install --no-deps micm-nlp=={MICM_VERSION})")
    return found


def _search(case: Case, bench: Bench, clock: Clock) -> list[Row]:
    model = case.load(bench.device.torch_device)
    longest = bench.size.lengths[1]
    beside = warmed_up(model, bench)
    ours, guesses = _ours(model, bench, clock, longest=longest, beside=beside)
    with quiet_transformers(), bench.device.capped(bench.room_bytes + beside):
        counted = Counted(model, bench)
        frontier = {
            length: largest_that_runs(counted, length, guess=guess) for length, guess in guesses.items() if clock.left_s
        }
        others = [_timed(way, search, model, bench, longest) for way, search in _other_ways() if clock.left_s]
    return [{"model": str(case), "frontier": frontier, "found": [ours, *others], "frontier_steps": counted.steps}]


def _other_ways() -> list[tuple[str, Callable[[Counted, int], tuple[int, int]]]]:
    path = micm_module()
    micm = [] if path is None else [(f"micm-nlp {MICM_VERSION}", partial(_micm, path=path))]
    return [*micm, ("double, bisect", _doubling)]


def warmed_up(model: Any, bench: Bench) -> int:
    """Run two small batches, and return the bytes held on the device beside the weights."""
    prober = Prober(device=bench.device, model=model, workload=ForwardWorkload(), resident_bytes=resident_bytes(model))
    prober.start(longest=bench.size.lengths[-1])
    prober.close()
    return max(bench.device.allocated_bytes() - resident_bytes(model), 0)


def _ours(model: Any, bench: Bench, clock: Clock, *, longest: int, beside: int) -> tuple[Row, dict[int, int]]:
    """The live model calibrated under the same cap, and the largest batches by that."""
    with tempfile.TemporaryDirectory() as directory:
        store = budgetdb.ProfileStore(Path(directory) / "searches.db")
        # The first look-up imports what a database needs, which on a CPU is taken from the very memory to measure.
        budgetdb.find_profile(model, pad_multiple=PAD_MULTIPLE, store=store)
        started = time.monotonic()
        profile = budgetdb.calibrate(
            model,
            max_length=longest,
            pad_multiple=PAD_MULTIPLE,
            memory_limit_bytes=bench.room_bytes + beside + bench.device.room().overhead_bytes,
            timeout_s=max(clock.left_s, 1.0),
            store=store,
        )
        elapsed_s = time.monotonic() - started
    rows = {length: profile.max_batch_size(length) for length in bench.size.lengths if length <= longest}
    found = {
        "way": "budgetdb",
        "steps": len(profile.probes),
        "out_of_memory": sum(not probe.fits for probe in profile.probes),
        "elapsed_s": round(elapsed_s, 2),
        "budget": profile.token_budget,
        "length": None,
        "rows": rows,
        "headroom_bytes": profile.headroom_bytes,
        "limit_bytes": profile.limit_bytes,
    }
    return found, rows


def _timed(way: str, search: Callable[[Counted, int], tuple[int, int]], model: Any, bench: Bench, longest: int) -> Row:
    """What another way comes to: one token budget, taken for all lengths."""
    counted = Counted(model, bench)
    started = time.monotonic()
    budget, length = search(counted, longest)
    bench.device.clean()
    return {
        "way": way,
        "steps": counted.steps,
        "out_of_memory": counted.out_of_memory,
        "elapsed_s": round(time.monotonic() - started, 2),
        "budget": budget,
        "length": length,
        "rows": {each: budget // each for each in bench.size.lengths if each <= longest},
    }


def _doubling(counted: Counted, longest: int) -> tuple[int, int]:
    """Double the batch of the longest length until it fails, then bisect to within 3 %."""
    fits, fails = 0, 1
    while counted.fits(Shape(fails, longest)):
        fits, fails = fails, 2 * fails
    while fails - fits > max(1, _TOLERANCE * fits):
        middle = (fits + fails) // 2
        if counted.fits(Shape(middle, longest)):
            fits = middle
        else:
            fails = middle
    return fits * longest, longest


def _micm(counted: Counted, longest: int, *, path: Path) -> tuple[int, int]:
    model = ForMicm(counted)
    lengths = [min(length, longest) for length in mixed_lengths(_MICM_SAMPLES)]
    specification = importlib.util.spec_from_file_location("micm_batching", path)
    if specification is None or specification.loader is None:
        raise FileNotFoundError(f"{path.name} is no Python module")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    budget = module.calibrate_token_budget(model=model, lengths=lengths, pad_multiple=PAD_MULTIPLE)
    return int(budget), model.largest.length


def largest_that_runs(counted: Counted, length: int, *, guess: int) -> int:
    """The largest batch that runs while one row more does not: growing strides from `guess`, then bisection."""
    fits, fails, rows, stride = 0, 0, max(guess, 1), max(guess // 32, 1)
    while not fails or (fits == 0 and fails > 1):
        if counted.fits(Shape(rows, length)):
            fits, rows = rows, rows + stride
        else:
            fails, rows = rows, max(rows - stride, 1)
        stride *= 2
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if counted.fits(Shape(middle, length)):
            fits = middle
        else:
            fails = middle
    return fits


def leaks(bench: Bench, clock: Clock) -> Row:
    """Bytes before and after batches that ran out of memory, after `clean()`, and after the model is gone."""
    return for_each(bench.cases[:_CASES], partial(_leak, bench=bench), bench, clock)


def _leak(case: Case, bench: Bench) -> list[Row]:
    bench.device.clean()
    readings: dict[str, Mapping[str, int]] = {"empty": _held(bench)}
    model = case.load(bench.device.torch_device)
    beside = warmed_up(model, bench)
    readings["warm"] = _held(bench)
    counted = Counted(model, bench)
    with quiet_transformers(), bench.device.capped(bench.room_bytes + beside):
        for length in bench.size.lengths[:2]:
            _doubling(counted, length)
        readings["searched"] = _held(bench)
    bench.device.clean()
    readings["cleaned"] = _held(bench)
    steps, failed = counted.steps, counted.out_of_memory
    del model, counted
    bench.device.clean()
    readings["dropped"] = _held(bench)
    leaked = readings["cleaned"]["allocated_bytes"] - readings["warm"]["allocated_bytes"]
    return [{"model": str(case), "steps": steps, "out_of_memory": failed, "leaked_bytes": leaked, "readings": readings}]


def _held(bench: Bench) -> Mapping[str, int]:
    allocated = bench.device.allocated_bytes()
    if bench.is_cpu:
        return {"allocated_bytes": allocated}
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": torch.cuda.memory_reserved(bench.device.torch_device),
        "outside_bytes": bench.device.room().overhead_bytes,
    }
