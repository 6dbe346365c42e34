"""Section 5: whether batches just under and just over the simulated limit run, under a cap that is real.

Three ways to come to a batch: alone after the cache was emptied (cold), a second time in a row (second), and after
batches of other lengths (mixed). The last two meet a fragmented allocator. With expandable segments all of it runs once
more, in a process that is started with them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from gpu_acceptance_models import PAD_MULTIPLE, SIZES, Case
from gpu_acceptance_record import NO_TIME, Bench, Clock, Row, for_each
from gpu_acceptance_traced import Foretold, foretold

from budgetdb.calibration.outcomes import ErrorKind, take
from budgetdb.calibration.prober import Prober
from budgetdb.devices.choose import choose_device
from budgetdb.models.quiet import quiet_transformers
from budgetdb.shapes import Shape, padded_length
from budgetdb.workloads.forward import ForwardWorkload

SCRIPT = Path(__file__)
# What a CPU's cap lets through for the records of a profiler (devices/cpu.py), which does not run here.
_CPU_SLACK_BYTES = 4 * 2**20
SHARES = (0.9, 0.97, 1.03, 1.1)
_CASES = 3
# The batches of other lengths that come before, in a mixed run: shares of the longest length, and of their frontier.
_OTHER_LENGTHS, _OTHER_FILLED = (0.75, 0.375), 0.9
_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def decisions(bench: Bench, clock: Clock) -> Row:
    """Predicted and real outcomes; a card with both kinds of segments."""
    cases = bench.cases[:_CASES]
    if bench.is_cpu:
        return _decide_all(cases, bench, clock, allocator="none")
    found = _decide_all(cases, bench, clock.share(0.55), allocator="native")
    expandable = _in_process_with_expandable([c for c in cases if f"{c} expandable" not in found["done"]], bench, clock)
    return {name: found[name] + expandable.get(name, []) for name in found}


def _decide_all(cases: Sequence[Case], bench: Bench, clock: Clock, *, allocator: str) -> Row:
    def decide(item: tuple[Case, str]) -> list[Row]:
        return _decide(item[0], bench, clock, allocator=allocator)

    return for_each([(case, allocator) for case in cases], decide, bench, clock)


def _in_process_with_expandable(cases: Sequence[Case], bench: Bench, clock: Clock) -> Row:
    if not cases:
        return {}
    bench.device.clean()
    request = {
        "device": str(bench.device.torch_device),
        "size": next(name for name, size in SIZES.items() if size == bench.size),
        "cases": [dataclasses.asdict(case) for case in cases],
        "room_bytes": bench.room_bytes,
        "memory_limit_bytes": bench.memory_limit_bytes,
        "seconds": 0.85 * clock.left_s,  # the rest is for its start
    }
    root = str(SCRIPT.parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    try:
        ended = subprocess.run(
            [sys.executable, str(SCRIPT)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=clock.left_s + 1,
            env={**os.environ, **_EXPANDABLE, "PYTHONPATH": path},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"left_out": [f"expandable segments: {NO_TIME}"]}
    if ended.returncode != 0:
        said = ended.stderr.strip().splitlines() or ["no word on stderr"]
        return {"left_out": [f"expandable segments: exit status {ended.returncode}: {said[-1]}"]}
    answer: Row = json.loads(ended.stdout.splitlines()[-1])
    return answer


def _answer(request: Mapping[str, Any]) -> Row:
    """What the process with expandable segments finds."""
    cases = tuple(Case(**case) for case in request["cases"])
    bench = Bench(
        device=choose_device(request["device"]),
        size=SIZES[request["size"]],
        cases=cases,
        dtype=cases[0].dtype,
        room_bytes=request["room_bytes"],
        memory_limit_bytes=request["memory_limit_bytes"],
        out=Path(),
    )
    return _decide_all(cases, bench, Clock(request["seconds"]), allocator="expandable")


def _decide(case: Case, bench: Bench, clock: Clock, *, allocator: str) -> list[Row]:
    longest = bench.size.lengths[-1]
    workload = ForwardWorkload()
    with foretold(case, workload, bench, longest=longest) as told:
        model = case.load(bench.device.torch_device)
        warm = Prober(device=bench.device, model=model, workload=workload, resident_bytes=told.traced.resident_bytes)
        warm.start(longest=longest)
        loop = Loop(model, bench)
        with quiet_transformers():
            about = {"model": str(case), "allocator": allocator}
            attempts = _attempts(told, bench)
            return [{**about, **_decision(told, loop, each, bench)} for each in attempts if clock.left_s]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A batch to come to in some way.

    Attributes:
        scenario: `cold`, `second` or `mixed`.
        shapes: the batches up to it.
        frontier: the largest batch at its length that the simulation runs so.
    """

    scenario: str
    shapes: tuple[Shape, ...]
    frontier: int


def _attempts(told: Foretold, bench: Bench) -> Iterator[Attempt]:
    """Batches about the frontier of each scenario, at the two shorter lengths."""
    before = _others(told, bench)
    for length, (scenario, shapes_to) in product(bench.size.lengths[:2], _scenarios(before).items()):
        frontier = largest_batch(told, length, bench.room_bytes, shapes_to)
        for batch_size in sorted({max(round(share * frontier), 1) for share in SHARES if frontier}):
            yield Attempt(scenario, tuple(shapes_to(Shape(batch_size, length))), frontier)


def _decision(told: Foretold, loop: Loop, attempt: Attempt, bench: Bench) -> Row:
    last = attempt.shapes[-1]
    streams = [told.step(shape) for shape in attempt.shapes]
    expected = told.sequence(streams, limit_bytes=bench.room_bytes)
    # Anew for each: what libraries have come to hold is no tensor's.
    beside = _beside(told, bench)
    with bench.device.capped(bench.room_bytes + beside):
        ran = loop.runs(attempt.shapes)
    return {
        "scenario": attempt.scenario,
        "share": round(last.batch_size / attempt.frontier, 3),
        "frontier": attempt.frontier,
        "batch_size": last.batch_size,
        "length": last.length,
        "beside_bytes": beside,
        "live_bytes": expected.live_bytes,
        "expected": expected.fits,
        "ran": ran,
    }


class Loop:
    """A plain evaluation loop over a few batches: the outputs of the batch before are alive while the next one runs."""

    def __init__(self, model: Any, bench: Bench) -> None:
        self._model, self._bench = model, bench
        self._workload = ForwardWorkload()

    def runs(self, shapes: Sequence[Shape]) -> bool:
        """Whether all of them run, from an emptied cache on."""
        self._bench.device.clean()
        failure = None
        try:
            self._run(shapes)
        except Exception as error:  # whatever a model raises: it is sorted by what it says
            failure = take(error)
            if failure.kind not in (ErrorKind.OOM, ErrorKind.OOM_IF_MEMORY_LOW):
                raise
        self._bench.device.clean()
        return failure is None

    def _run(self, shapes: Sequence[Shape]) -> None:
        kept: object = None
        for shape in shapes:
            kept = self._one(shape)
        self._bench.device.synchronize()
        del kept

    def _one(self, shape: Shape) -> object:
        inputs = self._workload.inputs(self._model, shape, self._bench.device.torch_device)
        return inputs, self._workload.step(self._model, inputs)


ShapesTo = Callable[[Shape], Sequence[Shape]]


def largest_batch(told: Foretold, length: int, room_bytes: int, shapes_to: ShapesTo) -> int:
    """The largest batch that the simulation runs after those before it, by bisection; 0 when none."""
    fits, fails = 0, told.rows(length, 2 * room_bytes) + 1  # more is alive in a probe than in one step, if not twice
    while fails - fits > 1:
        middle = (fits + fails) // 2
        streams = [told.step(shape) for shape in shapes_to(Shape(middle, length))]
        if told.sequence(streams, limit_bytes=room_bytes).fits:
            fits = middle
        else:
            fails = middle
    return fits


def _others(told: Foretold, bench: Bench) -> list[Shape]:
    """Batches of other lengths that the simulation runs, nearly as large as it would."""
    others: list[Shape] = []
    for share in _OTHER_LENGTHS:
        length = padded_length(int(share * bench.size.lengths[1]), PAD_MULTIPLE)
        largest = largest_batch(told, length, bench.room_bytes, partial(_after, tuple(others)))
        others += [Shape(rows, length)] if (rows := int(_OTHER_FILLED * largest)) else []
    return others


def _scenarios(others: Sequence[Shape]) -> Mapping[str, ShapesTo]:
    return {"cold": partial(_after, ()), "second": lambda shape: [shape, shape], "mixed": partial(_after, others)}


def _after(others: Sequence[Shape], shape: Shape) -> list[Shape]:
    return [*others, shape]


def _beside(told: Foretold, bench: Bench) -> int:
    """What the cap has to leave beside the weights and the room: what is held beyond the weights when nothing runs."""
    bench.device.clean()
    if bench.is_cpu:
        held = bench.device.allocated_bytes() - _CPU_SLACK_BYTES
    else:
        import torch

        held = torch.cuda.memory_reserved(bench.device.torch_device)
    return held - told.traced.resident_bytes


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.stdin.read()))))
