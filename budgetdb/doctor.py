"""What stands in the way of a good answer on this machine: each finding with what to do about it.

Every examination is a generator of findings, and none may end the others: what it raises is a finding too.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from budgetdb.errors import BudgetDBError, StoreError
from budgetdb.file_systems import FileSystem, file_system_of, lock_fault
from budgetdb.settings import format_bytes
from budgetdb.store.profile_store import ProfileStore, StoreStatus
from budgetdb.store.schema import SchemaState

# Below this a publication of a few hundred kB may fail half the time: journal, copy before an upgrade, and the row.
_LITTLE_SPACE = 64 * 2**20
_PERMISSIONS = 0o077
_STORE_EXIT = StoreError.exit_code


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: `store`, `devices`, `torch` or `plugins`.
        subject: what was looked at.
        found: what it is like.
        next_step: what to do; None where nothing has to be done.
        exit_code: of the program, where it is a problem.
    """

    area: str
    subject: str
    level: Level
    found: str
    next_step: str | None = None
    exit_code: int = 0


def examine(store: ProfileStore) -> Iterator[Finding]:
    """All findings, in the order of the areas; the store's first, which need no torch."""
    for area, look in (
        ("store", lambda: _store(store)),
        ("torch", _torch),
        ("devices", _devices),
        ("plugins", _plugins),
    ):
        yield from _whole(area, look)


def exit_code(findings: list[Finding]) -> int:
    """The exit code of the first problem; 0 when there is none."""
    return next((finding.exit_code for finding in findings if finding.level is Level.PROBLEM), 0)


def _whole(area: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What `look` finds, and what stopped it as one finding more."""
    try:
        yield from look()
    except BudgetDBError as error:
        text = str(error).removesuffix(f". {error.next_step}") if error.next_step else str(error)
        yield Finding(area, area, Level.PROBLEM, text, error.next_step, error.exit_code)
    except Exception as error:  # a driver or a build of torch that breaks must not hide the rest
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield Finding(area, area, Level.PROBLEM, what, "See `budgetdb --debug doctor`", BudgetDBError.exit_code)


def _store(store: ProfileStore) -> Iterator[Finding]:
    yield Finding("store", "location", Level.OK, store.location)
    path = store.path
    if path is not None:
        yield from _place(path)
    status = store.status()
    yield _schema(status)
    if status.journal_mode is not None:
        yield _journal(status, file_system_of(path) if path is not None else None)
    if status.state not in (SchemaState.CURRENT, SchemaState.OLDER):
        return
    faults = store.integrity()
    if faults:
        yield Finding(
            "store",
            "integrity",
            Level.PROBLEM,
            f"{len(faults)} faults, the first: {faults[0]}",
            "Save what can be read with `budgetdb export -o FILE`, move the file away, and `budgetdb import FILE`",
            _STORE_EXIT,
        )
    elif path is not None:
        yield Finding("store", "integrity", Level.OK, "SQLite finds the file sound")
    damaged = store.damaged()
    for one in damaged:
        yield Finding(
            "store",
            "checksums",
            Level.PROBLEM,
            f"profile {one}",
            f"Run `budgetdb rm {one.partition(':')[0]}`, and calibrate that model again",
            _STORE_EXIT,
        )
    if not damaged:
        yield Finding("store", "checksums", Level.OK, f"{status.profiles} profiles, all as they were written")
    if status.unfinished_probes:
        yield Finding(
            "store",
            "unfinished",
            Level.NOTE,
            f"{status.unfinished_probes} probes of calibrations that did not end",
            "Run the same calibration again: it goes on from them",
        )


def _place(path: Path) -> Iterator[Finding]:
    """The file, its directory and the file system under them."""
    directory = path.parent
    system = file_system_of(path)
    if system.is_network:
        yield Finding(
            "store",
            "file system",
            Level.WARNING,
            f"{system.kind}, shared with others: locks may not hold there",
            "Set BUDGETDB_URL to a PostgreSQL server for a cluster, or to a file on a local disk",
        )
    else:
        yield Finding("store", "file system", Level.OK, system.kind)
    if not directory.is_dir():
        return
    for place in (directory, path):
        yield from _privacy(place)
    try:
        fault = lock_fault(directory)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        yield Finding(
            "store",
            "writing",
            Level.WARNING,
            f"no file can be made in {directory}: {error.strerror}",
            "Stored profiles are used and nothing is added; make it writable, or set BUDGETDB_URL",
        )
        return
    if fault is not None:
        yield Finding(
            "store",
            "locks",
            Level.PROBLEM,
            f"POSIX locks fail in {directory} ({fault})",
            "Set BUDGETDB_URL to a file on a local disk, or to a PostgreSQL server",
            _STORE_EXIT,
        )
    else:
        yield Finding("store", "locks", Level.OK, "POSIX locks work")
    if free < _LITTLE_SPACE:
        yield Finding("store", "space", Level.WARNING, f"{format_bytes(free)} free", "Free some space")
    else:
        yield Finding("store", "space", Level.OK, f"{format_bytes(free)} free")


def _privacy(place: Path) -> Iterator[Finding]:
    try:
        found = place.stat()
    except OSError:  # absent: told elsewhere
        return
    mode = stat.S_IMODE(found.st_mode)
    is_file = stat.S_ISREG(found.st_mode)
    if found.st_uid not in (os.geteuid(), 0):
        yield Finding(
            "store",
            "owner",
            Level.WARNING,
            f"{place} belongs to uid {found.st_uid}: its owner decides what is served",
            "Set BUDGETDB_URL to a file of your own, unless you trust the owner",
        )
    if mode & stat.S_IWOTH and not (mode & stat.S_ISVTX and not is_file):
        yield Finding(
            "store",
            "permissions",
            Level.WARNING,
            f"anyone may write to {place} (mode {mode:04o})",
            f"Run: chmod o-w {place}",
        )
    elif is_file and mode & _PERMISSIONS:
        yield Finding(
            "store",
            "permissions",
            Level.NOTE,
            f"{place} is shared (mode {mode:04o})",
            f"If that is not on purpose: chmod 600 {place}",
        )
    elif is_file:
        yield Finding("store", "permissions", Level.OK, "private to you")


def _schema(status: StoreStatus) -> Finding:
    known = f"schema {status.revision or 'none'}, this budgetdb writes {status.head}"
    match status.state:
        case SchemaState.CURRENT:
            return Finding("store", "schema", Level.OK, known)
        case SchemaState.ABSENT | SchemaState.EMPTY:
            return Finding(
                "store",
                "schema",
                Level.NOTE,
                f"the database is {status.state}",
                "Run `budgetdb calibrate MODEL`",
            )
        case SchemaState.OLDER:
            return Finding("store", "schema", Level.WARNING, known, "Run `budgetdb db upgrade`")
        case SchemaState.NEWER:
            step = "Upgrade budgetdb, or set BUDGETDB_URL to another database"
            return Finding("store", "schema", Level.PROBLEM, known, step, _STORE_EXIT)
        case _:
            step = "Set BUDGETDB_URL to another database"
            return Finding("store", "schema", Level.PROBLEM, "it belongs to another program", step, _STORE_EXIT)


def _journal(status: StoreStatus, system: FileSystem | None) -> Finding:
    mode = status.journal_mode or "unknown"
    if mode == "wal":  # FIELD 7: not on network file systems, and another user's read locks the owner out
        level = Level.PROBLEM if system is not None and system.is_network else Level.WARNING
        return Finding(
            "store",
            "journal",
            level,
            "write-ahead log: it fails on network file systems and in shared directories",
            f"Run: sqlite3 {status.location} 'PRAGMA journal_mode = DELETE'",
            _STORE_EXIT if level is Level.PROBLEM else 0,
        )
    return Finding("store", "journal", Level.OK, mode)


def _torch() -> Iterator[Finding]:
    import torch

    built = torch.version.cuda or torch.version.hip
    kind = f"{'CUDA' if torch.version.cuda else 'HIP'} {built}" if built else "for the CPU only"
    yield Finding("torch", "build", Level.OK, f"{torch.__version__}, {kind}")
    if not built and Path("/proc/driver/nvidia/version").exists():
        yield Finding(
            "torch",
            "driver",
            Level.WARNING,
            "this machine has an NVIDIA driver, and torch is built without CUDA",
            "Install a build of torch with CUDA",
        )


def _devices() -> Iterator[Finding]:
    import torch

    from budgetdb.devices.choose import choose_device

    names = ["cpu"]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        names = [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())] + names
    for name in names:
        yield from _whole("devices", lambda name=name: _device(name, choose_device(name)))  # type: ignore[misc]


def _device(name: str, device: object) -> Iterator[Finding]:
    from budgetdb.devices.base import Device
    from budgetdb.devices.nvml import other_processes_bytes

    if not isinstance(device, Device):
        return
    info, room = device.info(), device.room()
    yield Finding(
        "devices",
        name,
        Level.OK,
        f"{info.name}, {format_bytes(room.limit_bytes)} of {format_bytes(info.total_bytes)} free"
        + (f", driver {info.driver}" if info.driver else ""),
    )
    if device.torch_device.type != "cuda":
        return
    others = other_processes_bytes(device.torch_device)
    if others is None:
        yield Finding("devices", name, Level.NOTE, "who else uses it can't be told (a container, or a MIG slice)")
    elif others:
        yield Finding(
            "devices",
            name,
            Level.WARNING,
            f"other processes hold {format_bytes(others)}",
            "Batches shrink to what is free; end them (nvidia-smi lists them) to have all of it",
        )


def _plugins() -> Iterator[Finding]:
    from budgetdb.plugins import REGISTRIES

    sound = 0
    for registry in REGISTRIES:
        for info in registry.describe():
            if info.error is None:
                sound += 1
                continue
            yield Finding(
                "plugins",
                f"{info.group} {info.name}",
                Level.WARNING,
                info.error,
                f"Upgrade or uninstall {info.origin}, or set BUDGETDB_PLUGINS=none",
            )
    yield Finding("plugins", "registered", Level.OK, f"{sound} that work")
