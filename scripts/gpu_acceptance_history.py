"""What torch's allocators really hand out and take back, in order: a card's own history, or the profiler's on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from budgetdb.devices.base import Device
from budgetdb.tracing.replay import Event

# Of a trace entry (torch.cuda.memory._snapshot). What a free block is asked back for counts once, when it is done.
_ALLOCATED, _FREED = "alloc", "free_completed"
_TAKEN = ("segment_alloc", "segment_map")
_GIVEN_BACK = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class History:
    """What the allocator did.

    Attributes:
        before: births and deaths from the first record to the step, as `replay` takes them.
        step: those of the step itself; None as number for a death on a CPU, which is not told whose it is.
        segments: bytes taken from the device, in order, below zero where they were given back; empty on a CPU.
    """

    before: Sequence[Event]
    step: Sequence[Event]
    segments: Sequence[int]


def history_of(device: Device, prepare: Callable[[], Any], step: Callable[[Any], object]) -> History:
    """What the allocator does while `prepare()` makes a model and `step(model)` runs; `prepare` is in it on a card."""
    if device.torch_device.type == "cuda":
        return _cuda_history(device.torch_device, prepare, step)
    return History(before=(), step=_profiled(prepare(), step), segments=())


def read_entries(entries: Iterable[Mapping[str, Any]]) -> tuple[list[Event], list[int]]:
    """The births and deaths, and the segments, of a device's trace entries.

    >>> entry = {"action": "alloc", "addr": 512, "size": 100}
    >>> read_entries([{"action": "segment_alloc", "addr": 0, "size": 2097152}, entry])
    ([(0, 100)], [2097152])
    """
    events: list[Event] = []
    segments: list[int] = []
    alive: dict[int, Event] = {}
    births = 0
    for entry in entries:
        action, size = entry["action"], int(entry["size"])
        if action == _ALLOCATED:
            alive[entry["addr"]] = births, size
            events.append((births, size))
            births += 1
        elif action == _FREED and entry["addr"] in alive:  # else it was born before the record
            number, nbytes = alive.pop(entry["addr"])
            events.append((number, -nbytes))
        elif action in _TAKEN:
            segments.append(size)
        elif action in _GIVEN_BACK:
            segments.append(-size)
    return events, segments


def _cuda_history(device: torch.device, prepare: Callable[[], Any], step: Callable[[Any], object]) -> History:
    memory: Any = torch.cuda.memory  # its functions have no annotations

    def entries() -> list[Mapping[str, Any]]:
        torch.cuda.synchronize(device)
        index = device.index if device.index is not None else torch.cuda.current_device()
        return list(memory._snapshot(device)["device_traces"][index])

    memory._record_memory_history(enabled="all", context=None)
    try:
        model = prepare()
        first = len(entries())
        step(model)
        seen = entries()
    finally:
        memory._record_memory_history(enabled=None)
    before, _ = read_entries(seen[:first])
    everything, segments = read_entries(seen)
    return History(before=before, step=everything[len(before) :], segments=segments)


def _profiled(model: Any, step: Callable[[Any], object]) -> list[Event]:
    """The profiler's memory events while `step(model)` runs: the sequence is only in what kineto recorded."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    try:
        step(model)
    finally:
        profiler.stop()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [(-1, event.nbytes()) for event in sorted(events, key=lambda event: event.start_ns()) if event.nbytes()]
