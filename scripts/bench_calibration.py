"""How close budgetdb comes to the true frontier under a real memory limit, and what it ran, beside other ways to do it.

    python scripts/bench_calibration.py [--models bert,llama,t5,albert] [--memory-limit 700MiB] [--quick] [--json FILE]

It needs accelerate (`pip install 'budgetdb[bench]'`) and micm-nlp's code (`pip install --no-deps micm-nlp==0.5.1`); a
way that is not installed is left out. Seconds are those of the processor, the start of each process included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import batch_finders
from calibration_tables import Found, Result, tables
from judged import calibrate, default_limit_bytes, evaluate, shares, true_frontier
from real_limit import ENVIRONMENT, Setting, run_job
from small_models import ATTENTION, CONFIGURATIONS, LENGTHS, write_configuration

from budgetdb.profiles import Profile
from budgetdb.settings import format_bytes, parse_bytes

_EVALUATIONS = 3


@dataclass(frozen=True)
class Way:
    """Another way to find a batch size: its name, and the job of `batch_finders` that runs it."""

    name: str
    job: str
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class Case:
    """A model and an attention implementation under a limit, with its files in `directory`."""

    model: str
    setting: Setting
    directory: Path

    @property
    def database(self) -> Path:
        """Where its profile is stored."""
        return self.directory / f"{self.model}-{self.setting.attention}.db"


def main() -> None:
    """Measure, and print the tables."""
    options = _arguments()
    ways = _other_ways(options.micm)
    os.environ.update(ENVIRONMENT)  # budgetdb's worker inherits it, and so runs with as many threads as the rest
    results = []
    with tempfile.TemporaryDirectory() as directory:
        limit_bytes = options.memory_limit or default_limit_bytes(Path(directory))
        for number, model in enumerate(options.models.split(",")):
            config = write_configuration(model, Path(directory))
            for attention in ATTENTION[number % 2 :][:1] if options.quick else ATTENTION:
                case = Case(model, Setting(str(config), attention, limit_bytes), Path(directory))
                results += [_measure(case, ways, evaluations=1 if options.quick else _EVALUATIONS)]
    print(tables(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(CONFIGURATIONS), help="comma-separated, of: %(default)s")
    parser.add_argument("--memory-limit", type=parse_bytes, help="of each process (default: 224 MiB above its own)")
    parser.add_argument("--quick", action="store_true", help="one attention implementation a model, one evaluation")
    parser.add_argument("--micm", type=Path, help="micm-nlp's batching.py, where micm-nlp is not installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    options = parser.parse_args()
    unknown = set(options.models.split(",")) - set(CONFIGURATIONS)
    if unknown:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(CONFIGURATIONS)}")
    return options


def _other_ways(micm_path: Path | None) -> list[Way]:
    """The other ways that can be run here."""
    ways = []
    path = micm_path or batch_finders.micm_module()
    if path is not None:
        ways.append(Way(f"micm-nlp {batch_finders.MICM_VERSION}", "micm", {"path": str(path)}))
    else:
        _progress(f"left out micm-nlp: pip install --no-deps micm-nlp=={batch_finders.MICM_VERSION}")
    if importlib.util.find_spec("accelerate") is not None:
        ways.append(Way("accelerate", "accelerate", {}))
    else:
        _progress("left out accelerate: pip install 'budgetdb[bench]'")
    return [*ways, Way("double, bisect", "doubling", {})]


def _measure(case: Case, ways: list[Way], *, evaluations: int) -> Result:
    limit_bytes = case.setting.memory_limit_bytes
    _progress(f"{case.model} {case.setting.attention}, limit {format_bytes(limit_bytes)}: calibrating")
    before_s = _processor_s()
    profile = calibrate(case.setting, case.database)
    elapsed_s = _processor_s() - before_s
    _progress(f"  bisecting the true frontier; evaluations: {evaluations}; {', '.join(way.name for way in ways)}")
    with ThreadPoolExecutor(max_workers=2) as pool:
        truth = pool.submit(true_frontier, case.setting)
        evaluated = pool.submit(evaluate, case.setting, case.database, profile, seeds=range(evaluations))
        answers = [pool.submit(run_job, batch_finders.SCRIPT, way.job, case.setting, **way.arguments) for way in ways]
    frontier = dict(zip(LENGTHS, truth.result()["frontier"], strict=True))
    others = [_other(way, answer.result(), case.setting, frontier) for way, answer in zip(ways, answers, strict=True)]
    return Result(
        model=case.model,
        attention=case.setting.attention,
        memory_limit_bytes=limit_bytes,
        frontier=tuple(frontier.values()),
        ran=sum(run["out_of_memory_at"] is None for run in evaluated.result()),
        batches=tuple(run["batches"] for run in evaluated.result()),
        found=(_ours(profile, frontier, elapsed_s=elapsed_s), *others),
    )


def _ours(profile: Profile, frontier: Mapping[int, int], *, elapsed_s: float) -> Found:
    of_truth = tuple(shares(profile, frontier).values())
    return Found(
        way="budgetdb",
        probes=len(profile.probes),
        out_of_memory=sum(not probe.fits for probe in profile.probes),
        elapsed_s=elapsed_s,
        shares=of_truth,
        length=None,
        share=min(of_truth),
    )


def _other(way: Way, answer: Mapping[str, Any], setting: Setting, frontier: Mapping[int, int]) -> Found:
    budget, length = answer["budget"], answer["length"]
    rows = frontier.get(length) or true_frontier(setting, [length])["frontier"][0]
    return Found(
        way=way.name,
        probes=answer["steps"],
        out_of_memory=answer["out_of_memory"],
        elapsed_s=answer["processor_s"],
        shares=tuple(budget // each / true for each, true in frontier.items()),
        length=length,
        share=budget // length / rows,
    )


def _processor_s() -> float:
    """Seconds that this process and those it has ended spent on the processor."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
