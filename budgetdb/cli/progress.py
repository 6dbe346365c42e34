"""A calibration as it goes, on stderr: a line for each thing that happened, and a clock for the one that runs."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import progress
from rich.console import Console
from rich.text import Text

from budgetdb.cli.printable import printable
from budgetdb.settings import format_bytes

if TYPE_CHECKING:
    from budgetdb.calibration.calibrator import CalibrationEvent
    from budgetdb.profiles import Probe

# What runs after an event of a stage, for the line beside the clock.
_NEXT = {"loading": "loading the model", "ready": "probing", "probe": "probing", "check": "checking"}


class Progress:
    """Shows the events of a calibration while it is a context.

    On a terminal, lines scroll above a spinner with the seconds that the current step takes. Elsewhere nothing is
    shown, or with `verbose` the lines alone.

    Attributes:
        is_known: whether a stored profile answered, so that nothing was run.
    """

    def __init__(self, *, verbose: bool) -> None:
        self.is_known = False
        self._probes = 0
        console = Console(stderr=True, highlight=False)
        self._display: progress.Progress | None = None
        self._shows_lines = verbose or console.is_terminal
        if console.is_terminal:
            columns = (
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.TimeElapsedColumn(),
            )
            self._display = progress.Progress(*columns, console=console, transient=True)
            self._task = self._display.add_task("starting", total=None)

    def __enter__(self) -> Self:
        if self._display is not None:
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.stop()
        if isinstance(error, KeyboardInterrupt) and self._probes:
            self._write(f"probes kept: {self._probes}; the same command goes on from there", style="")

    def report(self, event: CalibrationEvent) -> None:
        """Show one event."""
        self.is_known = self.is_known or event.stage == "known"
        if event.probe is not None:
            self._probes += 1
            line = probe_line(self._probes, event.probe, limit_bytes=event.limit_bytes, stage=event.stage)
            style = "" if event.probe.fits else "red"
        else:
            line, style = event.message, "dim"
        if self._shows_lines:
            self._write(line, style=style)
        if self._display is not None:
            self._display.reset(self._task, total=None, description=_NEXT.get(event.stage, "working"))

    def _write(self, line: str, *, style: str) -> None:
        line = printable(line)
        if self._display is not None:
            self._display.console.print(Text(line, style=style), soft_wrap=True)
        else:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def probe_line(number: int, probe: Probe, *, limit_bytes: int | None, stage: str) -> str:
    """Shape, outcome, peak, share of the limit and seconds of one probe."""
    line = f"{stage} {number:2}  {probe.shape!s:>12}  {probe.outcome.value:12}"
    if probe.fits:
        share = f"  {100 * probe.peak_bytes / limit_bytes:3.0f} % of the limit" if limit_bytes else ""
        line += f"  {format_bytes(probe.peak_bytes):>9}{share}  {probe.elapsed_s:.2f} s"
    return line.rstrip()
