"""How close budgetdb comes to the true frontier under a real memory limit, and what it ran, beside other ways to do it.

    python scripts/bench_calibration.py [--models bert,llama,t5,albert] [--memory-limit 700MiB] [--quick] [--json FILE]

It needs accelerate (`pip install 'budgetdb[bench]'`) and micm-nlp's code (`pip install --no-deps micm-nlp==0.5.1`); a
way that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import batch_finders
import ground_truth
from real_limit import ENVIRONMENT, Setting, run_job
from small_models import ATTENTION, CONFIGURATIONS, LENGTHS, MAX_LENGTH, PAD_MULTIPLE, write_configuration

import budgetdb
from budgetdb.profiles import Profile
from budgetdb.settings import format_bytes, parse_bytes

# Beyond what the process takes with the model in it, where no limit is given.
ROOM_BYTES = 256 * 2**20
SAMPLES = 15_000
_EVALUATIONS = 3
_OURS = "budgetdb"


@dataclass(frozen=True)
class Found:
    """What one way of finding a batch size came to.

    Attributes:
        probes: batches tried.
        out_of_memory: how many of them failed.
        elapsed_s: with the start of its process.
        shares: batch size over the true one at each of `LENGTHS`.
        length: the length that was looked at, or None for all.
        share: batch size over the true one at that length, or the smallest of all.
    """

    way: str
    probes: int
    out_of_memory: int
    elapsed_s: float
    shares: tuple[float, ...]
    length: int | None
    share: float


@dataclass(frozen=True)
class Result:
    """One model with one attention implementation under one limit."""

    model: str
    attention: str
    memory_limit_bytes: int
    frontier: tuple[int, ...]
    ran: int
    batches: tuple[int, ...]
    found: tuple[Found, ...]

    @property
    def ours(self) -> Found:
        """What budgetdb found."""
        return self.found[0]


@dataclass(frozen=True)
class Plan:
    """What is asked for on the command line."""

    models: tuple[str, ...]
    quick: bool
    memory_limit_bytes: int | None
    ways: Mapping[str, tuple[str, dict[str, str]]]


def main() -> None:
    """Measure, and print the tables."""
    options = _arguments()
    plan = Plan(
        models=tuple(options.models.split(",")),
        quick=options.quick,
        memory_limit_bytes=parse_bytes(options.memory_limit) if options.memory_limit else None,
        ways=_other_ways(options.micm),
    )
    os.environ.update(ENVIRONMENT)  # budgetdb's worker inherits it, and so runs with as many threads as the rest
    started, results = time.monotonic(), []
    with tempfile.TemporaryDirectory() as directory:
        for number, model in enumerate(plan.models):
            for attention in (ATTENTION[number % 2],) if plan.quick else ATTENTION:
                results.append(_measure(model, attention, plan=plan, directory=Path(directory)))
    _progress(f"{time.monotonic() - started:.0f} s in all")
    print(tables(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(CONFIGURATIONS), help="comma-separated, of: %(default)s")
    parser.add_argument("--memory-limit", help="of the whole process, as in 700MiB (default: 256 MiB above its own)")
    parser.add_argument("--quick", action="store_true", help="one attention implementation a model, one evaluation")
    parser.add_argument("--micm", type=Path, help="micm-nlp's batching.py, where micm-nlp is not installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    options = parser.parse_args()
    unknown = set(options.models.split(",")) - set(CONFIGURATIONS)
    if unknown:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(CONFIGURATIONS)}")
    return options


def _other_ways(micm_path: Path | None) -> dict[str, tuple[str, dict[str, str]]]:
    """Name, job and arguments of each other way that can be run here."""
    ways: dict[str, tuple[str, dict[str, str]]] = {}
    path = micm_path or batch_finders.micm_module()
    if path is not None:
        ways[f"micm-nlp {batch_finders.MICM_VERSION}"] = ("micm", {"path": str(path)})
    else:
        _progress(f"left out micm-nlp: pip install --no-deps micm-nlp=={batch_finders.MICM_VERSION}")
    if importlib.util.find_spec("accelerate") is not None:
        ways["accelerate"] = ("accelerate", {})
    else:
        _progress("left out accelerate: pip install accelerate")
    ways["double, bisect"] = ("doubling", {})
    return ways


def _measure(model: str, attention: str, *, plan: Plan, directory: Path) -> Result:
    config = write_configuration(model, directory)
    setting = limited_setting(config, attention, memory_limit_bytes=plan.memory_limit_bytes)
    _progress(f"{model} {attention}, limit {format_bytes(setting.memory_limit_bytes)}: calibrating")
    database, started = directory / f"{model}-{attention}.db", time.monotonic()
    profile = calibrate(setting, database)
    elapsed_s = time.monotonic() - started
    _progress("  true frontier")
    truth = run_job(ground_truth.SCRIPT, "frontier", setting, lengths=LENGTHS)
    frontier = dict(zip(LENGTHS, truth["fits"], strict=True))
    runs = []
    for seed in range(1 if plan.quick else _EVALUATIONS):
        _progress(f"  evaluation {seed + 1}")
        job = {"database": str(database), "samples": SAMPLES, "seeds": [seed]}
        runs += run_job(ground_truth.SCRIPT, "evaluate", setting, **job)["runs"]
    found = [_ours(profile, frontier, elapsed_s)]
    for way, (job_name, arguments) in plan.ways.items():
        _progress(f"  {way}")
        found.append(_other(way, job_name, arguments, setting=setting, frontier=frontier))
    return Result(
        model=model,
        attention=attention,
        memory_limit_bytes=setting.memory_limit_bytes,
        frontier=tuple(frontier.values()),
        ran=sum(run["out_of_memory_at"] is None for run in runs),
        batches=tuple(run["batches"] for run in runs),
        found=tuple(found),
    )


def limited_setting(config: Path, attention: str, *, memory_limit_bytes: int | None = None) -> Setting:
    """A setting with this limit, or one that leaves `ROOM_BYTES` for tensors on whatever build of torch this is."""
    if memory_limit_bytes is None:
        bare = run_job(ground_truth.SCRIPT, "overhead", Setting(str(config), attention, 0))
        memory_limit_bytes = bare["overhead_bytes"] + ROOM_BYTES
    return Setting(str(config), attention, memory_limit_bytes)


def calibrate(setting: Setting, database: Path) -> Profile:
    """Have budgetdb calibrate the model of `setting` under its limit."""
    return budgetdb.calibrate(
        setting.config,
        attention=setting.attention,
        memory_limit_bytes=setting.memory_limit_bytes,
        pad_multiple=PAD_MULTIPLE,
        max_length=MAX_LENGTH,
        device="cpu",
        store=budgetdb.ProfileStore(database),
    )


def _ours(profile: Profile, frontier: Mapping[int, int], elapsed_s: float) -> Found:
    shares = tuple(profile.max_batch_size(length) / rows for length, rows in frontier.items())
    return Found(
        way=_OURS,
        probes=len(profile.probes),
        out_of_memory=sum(not probe.fits for probe in profile.probes),
        elapsed_s=elapsed_s,
        shares=shares,
        length=None,
        share=min(shares),
    )


def _other(way: str, job: str, arguments: Mapping[str, str], *, setting: Setting, frontier: Mapping[int, int]) -> Found:
    started = time.monotonic()
    answer = run_job(batch_finders.SCRIPT, job, setting, **arguments)
    elapsed_s = time.monotonic() - started
    budget, length = answer["budget"], answer["length"]
    rows = frontier.get(length) or run_job(ground_truth.SCRIPT, "frontier", setting, lengths=[length])["fits"][0]
    return Found(
        way=way,
        probes=answer["steps"],
        out_of_memory=answer["out_of_memory"],
        elapsed_s=elapsed_s,
        shares=tuple(budget // each / rows for each, rows in frontier.items()),
        length=length,
        share=budget // length / rows,
    )


def tables(results: Sequence[Result]) -> str:
    """All that was measured, as plain text."""
    return "\n".join([*_frontier_table(results), "", *_ways_table(results), "", *_medians_table(results)])


def _frontier_table(results: Sequence[Result]) -> list[str]:
    lengths = "".join(f"{f'L {length}':>14}" for length in LENGTHS)
    lines = [
        "budgetdb's batch size / the largest that runs, by exhaustive bisection under the same limit",
        f"{'model':8}{'attention':11}{'limit':>11}{lengths}  evaluations that fit",
    ]
    for result in results:
        sizes = "".join(
            f"{f'{share:.3f} x {rows}':>14}" for share, rows in zip(result.ours.shares, result.frontier, strict=True)
        )
        limit = format_bytes(result.memory_limit_bytes)
        ran = f"{result.ran} of {len(result.batches)}, {min(result.batches)} batches each"
        lines.append(f"{result.model:8}{result.attention:11}{limit:>11}{sizes}  {ran}")
    return lines


_WAYS_HEADER = (
    f"{'way':16}{'probes':>8}{'OOM':>6}{'seconds':>9}{'at length':>11}{'share there':>13}"
    f"{'least share':>13}{'worst overflow':>16}"
)


def _ways_table(results: Sequence[Result]) -> list[str]:
    lines = [
        "each way on the same limit; its one token budget, taken for all lengths, over the largest batch that runs",
        f"{'model':8}{'attention':11}{_WAYS_HEADER}",
    ]
    for result in results:
        for found in result.found:
            first = f"{result.model:8}{result.attention:11}" if found is result.ours else " " * 19
            length = "all" if found.length is None else found.length
            lines.append(
                f"{first}{found.way:16}{found.probes:8}{found.out_of_memory:6}{found.elapsed_s:9.0f}{length:>11}"
                f"{found.share:13.2f}{min(found.shares):13.2f}{max(found.shares):15.2f}x"
            )
    return lines


def _medians_table(results: Sequence[Result]) -> list[str]:
    lines = [
        f"medians of the {len(results)}, and the worst overflow of any",
        f"{'way':16}{'probes':>8}{'OOM':>6}{'seconds':>9}{'share there':>13}{'least share':>13}{'worst overflow':>16}",
    ]
    for way in dict.fromkeys(found.way for result in results for found in result.found):
        of_way = [found for result in results for found in result.found if found.way == way]
        lines.append(
            f"{way:16}{_median(of_way, 'probes'):8.1f}{_median(of_way, 'out_of_memory'):6.1f}"
            f"{_median(of_way, 'elapsed_s'):9.0f}{_median(of_way, 'share'):13.2f}"
            f"{median(min(found.shares) for found in of_way):13.2f}{max(max(f.shares) for f in of_way):15.2f}x"
        )
    return lines


def _median(found: Sequence[Found], name: str) -> Any:
    return median(getattr(each, name) for each in found)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
