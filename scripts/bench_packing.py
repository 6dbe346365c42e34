"""Packing beside other batchers, in one interleaved run: time, padding, batches, distance to the optimum, ranks.

    python scripts/bench_packing.py                  # all but the hundred million
    python scripts/bench_packing.py --only huge      # 10^8 samples, in 12 GiB

Others are compared where they are installed (`pip install --no-deps micm-nlp==0.5.1 fairseq`); the rules of
sentence-transformers and lhotse are not timed here.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import product
from statistics import mean, median
from typing import Any

import numpy as np

from budgetdb.sampling import TokenBudgetBatchSampler
from budgetdb.sampling.packing import Histogram, count_lengths, pack_by_waste, pack_exactly, pack_fewest, padded_lengths
from budgetdb.sampling.plan import plan_batches
from budgetdb.sampling.sharding import assign, batch_costs, even_plan
from budgetdb.sampling.strategies import Fastest, total_seconds
from budgetdb.sampling.times import TimeModel

BUDGET, MULTIPLE, ROUNDS = 16_384, 8, 5
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "lognormal": lambda random, n: np.clip(random.lognormal(5.0, 0.8, n), 4, 4096),
    "uniform": lambda random, n: random.integers(4, 1024, n),
    "two-humped": lambda random, n: np.where(
        random.random(n) < 0.9, random.integers(4, 64, n), random.integers(1024, 4096, n)
    ),
}


def lengths_of(name: str, n: int, *, seed: int = 1) -> Any:
    """`n` lengths of a distribution, shape `(n,)`, two bytes each."""
    return DISTRIBUTIONS[name](np.random.default_rng(seed), n).astype(np.uint16)


def histogram_of(lengths: Any, budget: int) -> Histogram:
    """Samples of each padded length, and the rows of it within `budget` tokens."""
    padded, counts = count_lengths(padded_lengths(lengths, pad_multiple=MULTIPLE))
    return Histogram(padded, counts, budget // padded)


def contenders() -> dict[str, Callable[[Any, list[int]], Iterable[list[int]]]]:
    """Whoever is installed: from lengths, as an array and as a list, to batches of indices."""
    found: dict[str, Callable[[Any, list[int]], Iterable[list[int]]]] = {
        "budgetdb fewest": lambda array, _: TokenBudgetBatchSampler(array, BUDGET, MULTIPLE),
        "budgetdb fastest": lambda array, _: TokenBudgetBatchSampler(array, BUDGET, MULTIPLE, times=TimeModel(1024, 1)),
    }
    try:
        Micm = import_module("micm_nlp.training.batching").TokenBudgetBatchSampler  # noqa: N806

        found["micm-nlp 0.5.1"] = lambda _, items: Micm(items, BUDGET, MULTIPLE)
    except ImportError as error:
        print(f"left out: micm-nlp ({error})", file=sys.stderr)
    try:
        batch_by_size_vec = import_module("fairseq.data.data_utils_fast").batch_by_size_vec

        def fairseq(array: Any, _: list[int]) -> Iterable[list[int]]:
            order = np.argsort(array, kind="stable").astype(np.int64)
            sizes = padded_lengths(array, pad_multiple=MULTIPLE)[order]
            return (batch.tolist() for batch in batch_by_size_vec(order, sizes, BUDGET, -1, 1))

        found["fairseq"] = fairseq
    except ImportError as error:
        print(f"left out: fairseq ({error})", file=sys.stderr)
    try:
        from transformers.trainer_pt_utils import get_length_grouped_indices

        def grouped(array: Any, items: list[int]) -> Iterable[list[int]]:
            rows = max(1, BUDGET // int(array.max()))  # fixed rows that fit at the longest
            order = get_length_grouped_indices(items, rows)
            return (order[start : start + rows] for start in range(0, len(order), rows))

        found["transformers group_by_length"] = grouped
    except ImportError as error:
        print(f"left out: transformers ({error})", file=sys.stderr)
    return found


def compare(samples: int) -> dict[str, Any]:
    """CPU seconds of constructing and iterating, the median of rounds in which all take turns."""
    array = lengths_of("lognormal", samples)
    items, padded = array.tolist(), padded_lengths(array, pad_multiple=MULTIPLE)
    methods = contenders()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    facts: dict[str, tuple[int, float]] = {}
    for name, method in methods.items():
        batches = list(method(array, items))
        tokens = sum(len(batch) * int(padded[batch].max()) for batch in batches)
        facts[name] = len(batches), 1 - int(array.sum(dtype=np.int64)) / tokens
        del batches  # or the next to be timed would free them
    for _ in range(ROUNDS):
        for name, method in methods.items():
            gc.collect()
            start = time.process_time()
            deque(method(array, items), maxlen=0)  # as a loader does, that keeps no batch
            seconds[name].append(time.process_time() - start)
    ours = seconds["budgetdb fewest"]
    return {
        name: {
            "seconds": median(seconds[name]),
            "times_ours": median(theirs / own for theirs, own in zip(seconds[name], ours, strict=True)),
            "batches": facts[name][0],
            "padded_share": facts[name][1],
        }
        for name in methods
    }


def before_sorting(samples: int) -> dict[str, float]:
    """Milliseconds until `len` and the padded share are known, and whether anything was sorted for that."""
    array, found = lengths_of("lognormal", samples), []
    for _ in range(7):
        start = time.process_time()
        sampler = TokenBudgetBatchSampler(array, BUDGET, MULTIPLE)
        len(sampler), sampler.padding_share
        found.append(1000 * (time.process_time() - start))
        assert "indices" not in vars(sampler._plan.rows), "sorted too early"
    return {"median_ms": median(found), "worst_ms": max(found)}


def distance_to_optimum() -> dict[str, Any]:
    """Seconds of the plan over those of the exact optimum, as shipped and by the rule for large sets everywhere."""
    shipped, rule, greedy = [], [], []
    grid = product(DISTRIBUTIONS, (1_000, 10_000, 100_000), (4_096, 16_384, 65_536, 262_144), (256, 1024, 4096))
    for name, samples, budget, t0 in grid:
        histogram, times = histogram_of(lengths_of(name, samples), budget), TimeModel(t0, 1)
        counts, rows, costs = histogram.counts, histogram.rows, times.row_seconds(histogram.lengths)
        best = total_seconds(pack_exactly(counts, rows, costs, step_cost=t0), histogram, times)
        shipped.append(total_seconds(Fastest().batch_sizes(histogram, times), histogram, times) / best - 1)
        rule.append(total_seconds(pack_by_waste(counts, rows, costs, allowed=t0), histogram, times) / best - 1)
        greedy.append(total_seconds(pack_fewest(counts, rows), histogram, times) / best - 1)
    return {
        label: {"mean": mean(values), "worst": max(values), "settings": len(values)}
        for label, values in (("as shipped", shipped), ("waste rule at t0", rule), ("fewest", greedy))
    }


def ranks() -> dict[str, Any]:
    """The slowest rank's cost over a bound that no plan can beat."""
    found: dict[str, list[float]] = {}
    grid = product((10_000, 100_000, 1_000_000), DISTRIBUTIONS, (16_384, 131_072), (8, 64, 1024))
    for samples, name, budget, world in grid:
        lengths = lengths_of(name, samples)
        for label, times in (("tokens", None), ("seconds, t0 = 1024 tokens", TimeModel(1024, 1))):
            plan = plan_batches(lengths, max_rows=lambda padded: budget // padded, pad_multiple=MULTIPLE, times=times)  # noqa: B023
            even = even_plan(plan, world_size=world)
            assigned, costs = assign(even, world_size=world), batch_costs(even)
            real = np.delete(even.order, even.duplicates)
            assert (np.bincount(real, minlength=samples) == 1).all(), "lost or doubled"
            assert (np.bincount(assigned, minlength=world) == len(even) // world).all(), "uneven"
            histogram, t0 = histogram_of(lengths, budget), 0 if times is None else 1024
            steps = max(len(pack_fewest(histogram.counts, histogram.rows)), world)
            every_row = int((histogram.counts * histogram.lengths).sum())
            bound = max((every_row + steps * t0) / world, t0 + int(histogram.lengths[-1]))
            found.setdefault(label, []).append(np.bincount(assigned, weights=costs).max() / bound)
    return {
        label: {"within_1.08": sum(v <= 1.08 for v in values), "settings": len(values), "worst": max(values)}
        for label, values in found.items()
    }


def huge(samples: int) -> dict[str, float]:
    """CPU seconds and bytes a sample, beside the lengths, of constructing and iterating."""
    array = np.empty(samples, dtype=np.uint16)
    for start in range(0, samples, 1 << 22):
        part = array[start : start + (1 << 22)]
        part[:] = lengths_of("lognormal", len(part), seed=start)
    before, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    sampler = TokenBudgetBatchSampler(array, BUDGET, MULTIPLE)
    constructed = time.process_time()
    emitted = sum(map(len, sampler))
    done = time.process_time()
    assert emitted == samples
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "samples": samples,
        "batches": len(sampler),
        "construct_s": constructed - start_s,
        "iterate_s": done - constructed,
        "cpu_s": done - start_s,
        "bytes_per_sample": grown * 1024 / samples,
    }


def main() -> None:
    """Run the parts asked for, and print each as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["compare", "before", "optimum", "ranks", "huge"], action="append")
    parser.add_argument("--samples", type=int, default=1_000_000, help="of `compare` and `before`")
    parser.add_argument("--huge-samples", type=int, default=100_000_000)
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {
        "compare": lambda: compare(arguments.samples),
        "before": lambda: before_sorting(arguments.samples),
        "optimum": distance_to_optimum,
        "ranks": ranks,
        "huge": lambda: huge(arguments.huge_samples),
    }
    for name in arguments.only or ["compare", "before", "optimum", "ranks"]:
        print(json.dumps({name: parts[name]()}, indent=2, default=lambda scalar: scalar.item()), flush=True)


if __name__ == "__main__":
    main()
