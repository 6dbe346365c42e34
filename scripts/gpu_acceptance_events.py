"""Section 2: every allocation of a step, as traced and as it was; and the simulated allocator fed with real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from gpu_acceptance_history import History, history_of
from gpu_acceptance_models import Case
from gpu_acceptance_record import Bench, Clock, Row, for_each
from gpu_acceptance_traced import foretold, live_peak

from budgetdb.models.quiet import quiet_transformers
from budgetdb.shapes import Shape
from budgetdb.tracing.allocator import CachingAllocator
from budgetdb.tracing.allocator_settings import AllocatorSettings
from budgetdb.tracing.replay import Event
from budgetdb.workloads.base import Workload
from budgetdb.workloads.forward import ForwardWorkload

_CASES = 4
_ROWS = 3
_LISTED = 8


def events(bench: Bench, clock: Clock) -> Row:
    """For some models one step at the middle length; the allocator is empty when its record begins."""
    return for_each(bench.cases[:_CASES], partial(_compare, bench=bench), bench, clock)


def _compare(case: Case, bench: Bench) -> list[Row]:
    shape = Shape(_ROWS, bench.size.lengths[1])
    workload = ForwardWorkload()
    with foretold(case, workload, bench, longest=bench.size.lengths[-1]) as told:
        traced = told.step(shape)[told.batch_length :]
        beside = told.workspaces
    _empty(bench)
    reserved = torch.cuda.memory_reserved(bench.device.torch_device) if not bench.is_cpu else 0
    history = _recorded(case, bench, workload=workload, shape=shape)
    row = {
        "model": str(case),
        "shape": str(shape),
        **compared(traced, history.step, beside=beside),
        "reserved_at_start_bytes": reserved,
    }
    if not bench.is_cpu:
        row |= simulated(history, AllocatorSettings.from_environment())
    return [row]


def _recorded(case: Case, bench: Bench, *, workload: Workload, shape: Shape) -> History:
    """From the loading of the model on; a tiny step first, so that workspaces are there when the step begins."""
    device = bench.device.torch_device

    def prepare() -> tuple[Any, dict[str, torch.Tensor]]:
        model = case.load(device)
        workload.step(model, workload.inputs(model, Shape(1, 8), device))
        return model, workload.inputs(model, shape, device)

    with quiet_transformers():
        return history_of(bench.device, prepare, lambda prepared: workload.step(*prepared))


def _empty(bench: Bench) -> None:
    """Nothing left in the allocator: cuBLAS's workspaces too are given back (CUDA semantics, torch's notes)."""
    bench.device.clean()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if not bench.is_cpu and clear is not None:
        clear()
        bench.device.clean()


def compared(traced: Sequence[Event], real: Sequence[Event], *, beside: Iterable[int] = ()) -> Row:
    """A traced step, without its batch, against a real one: the sequence, what is only in one of them, and the peak.

    `is_equal` is to the last event; `is_equal_but_for` passes over what is only real, such as what kernels take for
    themselves. Bytes in `beside` may come in the real one, where libraries take workspaces.
    """
    whole = _whole(traced)
    mine, theirs = pattern(whole), pattern(real)
    sizes = {abs(nbytes) for _, nbytes in whole}
    known = pattern(event for event in real if abs(event[1]) in sizes)
    parted = first_difference(mine, without(known, mine))
    return {
        "events_traced": len(mine),
        "events_real": len(theirs),
        "is_equal": mine == theirs,
        "is_equal_but_for": parted is None,
        "first_difference": parted,
        "births_only_real": _largest(Counter(theirs) - Counter(mine) - Counter(beside)),
        "births_only_traced": _largest(Counter(mine) - Counter(theirs)),
        "peak_traced_bytes": live_peak(traced),
        "peak_real_bytes": live_peak(real),
    }


def without(theirs: Sequence[int], mine: Sequence[int]) -> list[int]:
    """`theirs` less what it has too many of, each left out where it first stands in the way."""
    surplus = Counter(theirs) - Counter(mine)
    kept: list[int] = []
    for nbytes in theirs:
        expected = mine[len(kept)] if len(kept) < len(mine) else None
        if nbytes != expected and surplus[nbytes] > 0:
            surplus[nbytes] -= 1
        else:
            kept.append(nbytes)
    return kept


def first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two sequences part, None when they are equal."""
    if mine == theirs:
        return None
    parted = (i for i, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other)
    return next(parted, min(len(mine), len(theirs)))


def pattern(events: Iterable[Event]) -> list[int]:
    """Bytes in order, a run of deaths sorted: which of two tensors goes first is nobody's decision."""
    found: list[int] = []
    deaths: list[int] = []
    for _, nbytes in events:
        if nbytes < 0:
            deaths.append(nbytes)
            continue
        found += sorted(deaths)
        deaths = []
        found.append(nbytes)
    return found + sorted(deaths)


def simulated(history: History, settings: AllocatorSettings) -> Row:
    """The segments that the simulated allocator takes for the very requests that the real one had."""
    mine = segments_for([*history.before, *history.step], settings)
    theirs = [nbytes for nbytes in history.segments if nbytes > 0]
    return {
        "segments_simulated": len(mine),
        "segments_real": len(theirs),
        "segments_equal": mine == theirs,
        "segments_first_difference": first_difference(mine, theirs),
        "segments_given_back": sum(nbytes < 0 for nbytes in history.segments),
        "reserved_simulated_bytes": sum(mine),
        "reserved_real_bytes": sum(history.segments),
    }


def segments_for(events: Iterable[Event], settings: AllocatorSettings) -> list[int]:
    """Bytes taken from the device, in order, as births and deaths are replayed."""
    allocator = CachingAllocator(settings)
    handles: dict[int, int] = {}
    taken = []
    for number, nbytes in events:
        if nbytes < 0:
            allocator.free(handles.pop(number))
            continue
        before = allocator.reserved_bytes
        handles[number] = allocator.allocate(nbytes)
        if allocator.reserved_bytes > before:
            taken.append(allocator.reserved_bytes - before)
    return taken


def _whole(traced: Sequence[Event]) -> list[Event]:
    """With the deaths of what the step leaves alive: its outputs and its batch, which the real run drops."""
    left: dict[int, int] = {}
    for number, nbytes in traced:
        if nbytes > 0:
            left[number] = nbytes
        else:
            left.pop(number, None)
    return [*traced, *((number, -nbytes) for number, nbytes in left.items())]


def _largest(counted: Counter[int]) -> list[list[int]]:
    """The largest births that were counted, as `[bytes, times]`."""
    births = sorted(((size, times) for size, times in counted.items() if size > 0), reverse=True)
    return [list(pair) for pair in births[:_LISTED]]
