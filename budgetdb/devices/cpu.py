"""The processor's memory as a device with a real limit."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import psutil
import torch
from typing_extensions import override

from budgetdb.devices.base import Device, DeviceInfo, Measurement, Room
from budgetdb.errors import DeviceError

_MIB = 2**20
# 2 % of the limit, within reason. Pages, block headers and scratch of the matrix library come on top of what torch's
# allocator counts: at most 0.21 % was seen (TRACING 7), and the profiler's own records take a few MiB.
_HEADROOM_SHARE = 0.02
_HEADROOM_BYTES = (8 * _MIB, 1024 * _MIB)
# The profiler's records of a step, which no evaluation makes: they are let through above the cap.
_RECORDS_BYTES = 4 * _MIB
# Options of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class CpuDevice(Device):
    """Main memory, for people who evaluate in containers, and for tests with a limit that is real.

    The cap is the soft `RLIMIT_DATA` of the process: an allocation beyond it fails as on a full machine, torch raises,
    and the process goes on. In a worker started with `worker_environment`, glibc serves every large block by mmap and
    gives it back at once, so the frontier found is the same each time (8 of 8; with glibc's defaults it wanders by a
    factor of two: TRACING 7). Peaks come from the events of torch's allocator. Where `RLIMIT_DATA` does not exist
    (macOS, Windows) there is no cap, and a step is judged by its measured peak alone.
    """

    name: ClassVar[str] = "cpu"
    worker_environment: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_TRIM_THRESHOLD_": "0",
            "MALLOC_TOP_PAD_": "0",
        }
    )

    def __init__(self, torch_device: torch.device) -> None:
        if torch_device.type != "cpu":
            raise DeviceError(f"{torch_device} is not the CPU", next_step="Use --device cpu")
        super().__init__(torch.device("cpu"))

    @override
    def info(self) -> DeviceInfo:
        return DeviceInfo(name=_processor_name(), total_bytes=_total_bytes())

    @override
    def room(self, memory_limit_bytes: int | None = None) -> Room:
        self.clean()
        used = _data_bytes() - _cached_bytes()
        overhead = max(used - self.allocated_bytes(), 0)
        available = used + _available_bytes()
        limit = available if memory_limit_bytes is None else min(memory_limit_bytes, available)
        return Room(limit_bytes=max(limit - overhead, 0), overhead_bytes=overhead)

    @override
    @contextmanager
    def capped(self, limit_bytes: int) -> Iterator[None]:
        if not sys.platform.startswith("linux"):
            yield
            return
        import resource

        self.clean()
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        cap = max(_data_bytes() - self.allocated_bytes(), 0) + limit_bytes + _RECORDS_BYTES
        with _large_blocks_by_mmap():
            resource.setrlimit(resource.RLIMIT_DATA, (cap if hard == resource.RLIM_INFINITY else min(cap, hard), hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    @override
    @contextmanager
    def measuring(self) -> Iterator[Measurement]:
        # Kineto writes a line to stderr for each start and stop, at its highest level but one, unless it is told not to
        # before its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        measurement = Measurement()
        baseline = self.allocated_bytes()
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        profiler.start()
        try:
            yield measurement
        finally:
            profiler.stop()
            peak = baseline + _peak_of_events(profiler)
            # Its records are in reference cycles, megabytes of them, that would count against the next step.
            del profiler
            self.clean()
            measurement.peak_allocated_bytes = measurement.peak_reserved_bytes = peak

    @override
    def allocated_bytes(self) -> int:
        with _limit_lifted():  # a list of every object of a large program takes memory itself
            return _live_tensor_bytes()

    @override
    def default_headroom_bytes(self, limit_bytes: int) -> int:
        least, most = _HEADROOM_BYTES
        return min(max(int(_HEADROOM_SHARE * limit_bytes), least), most)

    @override
    def clean(self) -> None:
        super().clean()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
        if trim is not None:
            trim(0)


@contextmanager
def _limit_lifted() -> Iterator[None]:
    """A block that the cap does not hold for, for book-keeping beside the steps."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _peak_of_events(profiler: Any) -> int:
    """The most bytes at once, above those at the start, that torch's allocator handed out while `profiler` ran.

    The public tables add allocations up per operator; the sequence is only in the events that kineto recorded.
    """
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def _live_tensor_bytes() -> int:
    """Bytes of the distinct storages of every CPU tensor that Python knows of."""
    objects = gc.get_objects()
    # There are far fewer types than objects, and asking each object is what would take the time.
    tensor_types = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    storages: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # the parameters of lazy modules refuse to be asked
        for tensor in (thing for thing in objects if type(thing) in tensor_types):
            if tensor.device.type == "cpu" and tensor.layout == torch.strided and type(tensor).__name__ != "FakeTensor":
                storage = tensor.untyped_storage()
                try:
                    address = storage.data_ptr()
                except RuntimeError:  # a tensor that only wraps others, as torchao's do; those are found themselves
                    continue
                storages[address] = max(storage.nbytes(), storages.get(address, 0))
    return sum(storages.values())


def _data_bytes() -> int:
    """Private writable memory of this process: what `RLIMIT_DATA` is held against."""
    for line in Path("/proc/self/status").read_text().splitlines() if sys.platform.startswith("linux") else ():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


class _MallocInformation(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer."""

    _fields_: ClassVar[list[tuple[str, type]]] = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


@contextmanager
def _large_blocks_by_mmap() -> Iterator[None]:
    """A block in which glibc serves large requests by mmap, in a process that was not started so.

    Setting a threshold ends its adjustment for good; what is left behind is where glibc's own adjustment ends after a
    first large block was freed (`DEFAULT_MMAP_THRESHOLD_MAX` of malloc.c, and twice that for trimming).
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if set_option is None or os.environ.get("MALLOC_MMAP_THRESHOLD_"):
        yield
        return
    set_option(_M_MMAP_THRESHOLD, 65536)
    set_option(_M_TRIM_THRESHOLD, 0)
    try:
        yield
    finally:
        set_option(_M_MMAP_THRESHOLD, 32 * _MIB)
        set_option(_M_TRIM_THRESHOLD, 64 * _MIB)


def _cached_bytes() -> int:
    """Bytes that glibc holds in free blocks of its heap and will hand out again; 0 where it can't be asked."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform.startswith("linux") else None
    if read is None:
        return 0
    read.restype = _MallocInformation
    return int(read().fordblks)


def _control_group() -> tuple[int, int] | None:
    """Limit and current use of the control group this process is in, where it has a limit."""
    for limit_file, current_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, current = Path(limit_file).read_text().strip(), Path(current_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < psutil.virtual_memory().total:
            return int(limit), int(current)
    return None


def _total_bytes() -> int:
    group = _control_group()
    return group[0] if group else int(psutil.virtual_memory().total)


def _available_bytes() -> int:
    """Bytes that can be had without swapping and without the control group's killer."""
    available = int(psutil.virtual_memory().available)
    group = _control_group()
    return min(available, max(group[0] - group[1], 0)) if group else available


def _processor_name() -> str:
    """The processor's model name, as the kernel reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return f"CPU {line.partition(':')[2].strip()}"
    except OSError:
        pass
    return f"CPU {platform.processor() or platform.machine()}"
