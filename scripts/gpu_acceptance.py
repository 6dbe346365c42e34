"""What budgetdb expects of a device, held against that device: eight sections, at most eight minutes on a card.

Run it by `scripts/gpu_acceptance`; a rehearsal on a CPU is `--device cpu --memory-limit 700MiB --size small`. Weights
are random: memory does not depend on their values. It writes into a directory: `acceptance.json` after every section,
`acceptance.md` with the tables, and `profiles/`. Started again it goes on with what it had no time for and with what
failed. The exit status is 1 when a section failed.

Sections: 1 facts, 2 events, 3 peaks, 4 scaled, 5 decisions, 6 searches, 7 leaks, 8 profiles.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import gpu_acceptance_models as models
import torch
import transformers
from gpu_acceptance_decisions import decisions
from gpu_acceptance_events import events
from gpu_acceptance_facts import facts
from gpu_acceptance_peaks import peaks, scaled
from gpu_acceptance_profiles import profiles
from gpu_acceptance_record import Bench, Clock, DeviceLostError, ResultsFile, Row
from gpu_acceptance_searches import leaks, searches
from gpu_acceptance_tables import markdown

from budgetdb.calibration.outcomes import take
from budgetdb.devices.base import Device
from budgetdb.devices.choose import choose_device
from budgetdb.settings import parse_bytes


class Section(NamedTuple):
    """A section, and its share of the time; what one does not use the others may."""

    run: Callable[[Bench, Clock], Row]
    share: float


SECTIONS: Mapping[str, Section] = {
    "facts": Section(facts, 0.02),
    "events": Section(events, 0.10),
    "peaks": Section(peaks, 0.30),
    "scaled": Section(scaled, 0.02),
    "decisions": Section(decisions, 0.20),
    "searches": Section(searches, 0.14),
    "leaks": Section(leaks, 0.05),
    "profiles": Section(profiles, 0.17),
}
# Seven minutes and a half, so that the start of Python, and a step that has begun, end within eight.
_SECONDS = 450.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections that are asked for and not there yet; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    device = choose_device(options.device)
    size = models.SIZES[options.size]
    is_cpu = device.torch_device.type == "cpu"
    dtype = options.dtype if options.dtype != "auto" else "float32" if is_cpu else "bfloat16"
    names = options.models.split(",") if options.models else models.names_for(dtype)
    if unknown := set(names) - set(models.CLASSES):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(models.CLASSES)}")
    limit = options.memory_limit or parse_bytes(size.memory_limit)
    about = {
        "device": device.info().name,
        "size": options.size,
        "dtype": dtype,
        "memory_limit": limit,
        "models": ",".join(names),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        file = ResultsFile(options.out / "acceptance.json", about, afresh=options.afresh)
    except ValueError as error:
        parser.error(f"{error}: give another --out, or --afresh")
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(
            device=device,
            size=size,
            cases=tuple(models.write_case(name, size, dtype=dtype, directory=Path(directory)) for name in names),
            dtype=dtype,
            room_bytes=_room_bytes(device, size, limit),
            memory_limit_bytes=limit,
            out=options.out,
        )
        _run_all(options.sections, file, bench, seconds=options.seconds)
    text = markdown(file.document)
    (options.out / "acceptance.md").write_text(text, encoding="utf-8")
    print(text)
    return int(any(section["error"] is not None for section in file.sections.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="gpu_acceptance"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory-limit", type=parse_bytes, help="of a calibration (default: by size, 700MiB or 8GiB)")
    parser.add_argument("--dtype", default="auto", help="default: bfloat16 on an accelerator, float32 on a CPU")
    parser.add_argument("--size", choices=models.SIZES, default="large")
    parser.add_argument("--models", metavar="NAME,...", help=f"only these, of {', '.join(models.CLASSES)}")
    parser.add_argument(
        "--sections", type=_sections, default=list(SECTIONS), metavar="1,2,...", help="by number or name"
    )
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for all sections (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("acceptance"), help="directory (default: %(default)s)")
    parser.add_argument("--afresh", action="store_true", help="run again what is there already")
    return parser


def _sections(text: str) -> list[str]:
    names = list(SECTIONS)
    asked = [
        names[int(part) - 1] if part.isdecimal() and 0 < int(part) <= len(names) else part for part in text.split(",")
    ]
    if unknown := [part for part in asked if part not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}")
    return [name for name in names if name in asked]


def _room_bytes(device: Device, size: models.Size, limit: int) -> int:
    """The size's room, or most of what is free where that is less."""
    return min(size.room_bytes, limit, int(0.9 * device.room().limit_bytes))


def _run_all(names: Sequence[str], file: ResultsFile, bench: Bench, *, seconds: float) -> None:
    waiting = [name for name in names if not file.is_done(name)]
    if "peaks" in waiting and "scaled" in names:  # it is made of them
        waiting = [name for name in names if name in waiting or name == "scaled"]
    clock = Clock(seconds)
    for place, name in enumerate(waiting):
        later = sum(SECTIONS[each].share for each in waiting[place:])
        started, result, failure = time.monotonic(), file.results.get(name), None
        print(f"{name}: {clock.left_s:.0f} s left for all", file=sys.stderr, flush=True)
        is_lost = False
        try:
            here = replace(bench, results=file.results, earlier=result or {})
            result = SECTIONS[name].run(here, clock.share(SECTIONS[name].share / later))
        except DeviceLostError as error:
            failure, result, is_lost = f"{error}: the process can't go on, start it again", error.found, True
        except Exception as error:  # recorded, and the other sections run
            failure = str(take(error))
        file.write(name, result=result, error=failure, elapsed_s=time.monotonic() - started)
        if is_lost:
            return


if __name__ == "__main__":
    sys.exit(main())
