"""What has been found so far, in a file that is whole after every section; and how long a section may take."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from gpu_acceptance_models import Case, Size

from budgetdb.calibration.outcomes import ErrorKind, take
from budgetdb.calibration.prober import PoisonedProcessError
from budgetdb.devices.base import Device

Row = dict[str, Any]
NO_TIME = "no time left"
Item = TypeVar("Item")


class Clock:
    """Time that a section has."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, 0 when it is over."""
        return max(self._end - time.monotonic(), 0.0)

    def share(self, part: float) -> Clock:
        """A clock for a part of what is left."""
        return Clock(part * self.left_s)


class DeviceLostError(Exception):
    """After this error nothing else will run on the device in this process: the next run goes on behind it.

    Attributes:
        found: what the section came to before it.
    """

    def __init__(self, message: str, found: Row) -> None:
        super().__init__(message)
        self.found = found


@dataclass(frozen=True)
class Bench:
    """What is accepted, and with what.

    Attributes:
        device: the device at hand.
        size: how large models and batches are.
        cases: the models, the more telling ones first.
        dtype: of the weights.
        room_bytes: what the allocator may hold in the steps of this process.
        memory_limit_bytes: what a calibration in a worker may use on the device.
        out: where files are written.
        results: of the sections that ended before, by name.
        earlier: what this section came to in a run before this one, where time was too short for all of it.
    """

    device: Device
    size: Size
    cases: tuple[Case, ...]
    dtype: str
    room_bytes: int
    memory_limit_bytes: int
    out: Path
    results: Mapping[str, Any] = field(default_factory=dict)
    earlier: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        """Whether it is a rehearsal without a card."""
        return self.device.torch_device.type == "cpu"


def for_each(items: Iterable[Item], run: Callable[[Item], list[Row]], bench: Bench, clock: Clock) -> Row:
    """`rows` of `run` for each item, and in `left_out` those that failed or that time was too short for.

    What an earlier run has done is not done again: its rows are there already.

    Raises:
        DeviceLostError: the device can't be used any more.
    """
    found: Row = {"rows": [*bench.earlier.get("rows", [])], "left_out": [], "done": [*bench.earlier.get("done", [])]}
    with _quick_collector():
        for item in items:
            name = _name(item)
            if name in found["done"]:
                continue
            if not clock.left_s:
                found["left_out"].append(f"{name}: {NO_TIME}")
                continue
            try:
                found["rows"] += run(item)
                found["done"].append(name)
            except Exception as error:  # one model's failure is not the others'
                failure = take(error)
                found["left_out"].append(f"{name}: {failure}")
                if failure.kind is ErrorKind.STICKY or isinstance(error, PoisonedProcessError):
                    found["done"].append(name)
                    raise DeviceLostError(str(failure), found) from None
            bench.device.clean()
    return found


def _name(item: object) -> str:
    if isinstance(item, tuple):
        return " ".join(map(str, item))
    return f"{item['model']} {item['mask']}" if isinstance(item, dict) else str(item)


@contextmanager
def _quick_collector() -> Iterator[None]:
    """Collections before each step need not look through all of torch."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class ResultsFile:
    """The JSON file: about the run, and each section's result, error and time.

    Args:
        path: of the file.
        about: what the run is about; a file about another one is not continued.
        afresh: whether to forget what is there.

    Raises:
        ValueError: the file is about another run.
    """

    def __init__(self, path: Path, about: Row, *, afresh: bool) -> None:
        self._path = path
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not afresh else {}
        if known and known["about"] != about:
            differ = [name for name in about if known["about"].get(name) != about[name]]
            raise ValueError(f"{path.name} is of a run with another {', '.join(differ)}")
        self.sections: dict[str, Row] = known.get("sections", {})
        self._about = about

    def is_done(self, name: str) -> bool:
        """Whether the section ended without an error, and had time for all of it."""
        if name not in self.sections or self.sections[name]["error"] is not None:
            return False
        left_out = self.sections[name]["result"].get("left_out", [])
        return not any(each.endswith(NO_TIME) for each in left_out)

    def write(self, name: str, *, result: Any, error: str | None, elapsed_s: float) -> None:
        """Keep what a section came to; the file is replaced as a whole."""
        self.sections[name] = {
            "result": result,
            "error": error,
            "elapsed_s": round(elapsed_s, 1),
            "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        text = json.dumps({"about": self._about, "sections": self.sections}, indent=1)
        partial = self._path.with_suffix(".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, self._path)  # noqa: PTH105 (the same in both)

    @property
    def results(self) -> Row:
        """Results by name, of the sections that have one."""
        return {name: section["result"] for name, section in self.sections.items() if section["result"] is not None}

    @property
    def document(self) -> Row:
        """All that is in the file."""
        return {"about": self._about, "sections": self.sections}
