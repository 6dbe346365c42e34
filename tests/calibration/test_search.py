"""The search against thousands of memory functions: safe, few probes, little given away."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cache

import pytest
from memory_functions import SHORTEST, Oracle, random_case

from budgetdb.calibration.search import SearchResult, search
from budgetdb.costs.quadratic import QuadraticCost
from budgetdb.errors import CalibrationTimeoutError, DoesNotFitError, UsageError
from budgetdb.profiles import Bound, Caps, Outcome, Probe
from budgetdb.shapes import Shape

CASES = 2000


@dataclass(frozen=True)
class Report:
    """How one search went; shares are of the true limit and of the true frontier after headroom."""

    noisy: bool
    probes: int
    ooms: int
    utilisation: float
    worst_peak: float


def run(seed: int) -> Report:
    case, lengths = random_case(seed), None
    oracle = Oracle(case, seed)
    lengths = [SHORTEST, case.longest // 2, case.longest]
    result = search(
        oracle,
        lengths=lengths,
        cost="quadratic",
        limit_bytes=case.limit_bytes,
        headroom_bytes=case.headroom_bytes,
    )
    shares, peaks = [], []
    for length in sorted({SHORTEST, 16, 64, *(case.longest * eighth // 8 for eighth in range(1, 9))}):
        if length <= result.solved.max_length:
            rows = result.cost.max_batch_size(length, case.usable_bytes)
            shares.append(rows / max(case.frontier(length, case.usable_bytes), 1))
            peaks.append(case.peak(rows, length) / case.limit_bytes)
    return Report(case.noise > 0, len(oracle.shapes), oracle.ooms, statistics.mean(shares), max(peaks))


@cache
def reports() -> list[Report]:
    return [run(seed) for seed in range(CASES)]


def test_no_frontier_is_above_the_truth() -> None:
    assert [seed for seed, report in enumerate(reports()) if report.worst_peak > 1] == []


def test_a_search_takes_few_probes_and_hardly_an_oom() -> None:
    assert statistics.median(report.probes for report in reports()) <= 6
    assert statistics.median(report.ooms for report in reports()) <= 1
    assert statistics.mean(report.ooms for report in reports() if not report.noisy) < 0.3


def test_little_of_the_memory_is_given_away() -> None:
    assert statistics.median(report.utilisation for report in reports()) >= 0.93
    assert statistics.median(report.utilisation for report in reports() if not report.noisy) >= 0.97


def linear_probe(limit_bytes: int, *, per_token: int = 1000, resident: int = 10**6) -> tuple[list[Shape], object]:
    ran: list[Shape] = []

    def probe(shape: Shape) -> Probe:
        ran.append(shape)
        peak = resident + per_token * shape.tokens
        fits = peak <= limit_bytes
        return Probe(
            batch_size=shape.batch_size,
            length=shape.length,
            outcome=Outcome.FITS if fits else Outcome.OOM,
            peak_allocated_bytes=peak if fits else None,
            baseline_bytes=resident,
            elapsed_s=shape.tokens * 1e-3,
        )

    return ran, probe


def find(probe: object, **arguments: object) -> SearchResult:
    defaults = {"lengths": [8, 256, 512], "cost": QuadraticCost, "limit_bytes": 10**9}
    return search(probe, **{**defaults, **arguments})  # type: ignore[arg-type] # assembled from parts on purpose


def test_a_linear_function_is_known_after_four_probes() -> None:
    ran, probe = linear_probe(10**9)
    result = find(probe)
    assert len(ran) == 4
    assert result.cost.max_batch_size(512, 10**9) == (10**9 - 10**6) // 512_000
    assert result.solved.token_budget >= 0.999 * (10**9 - 10**6) / 1000
    assert result.solved.bound is Bound.MEMORY


def test_a_longest_length_that_does_not_fit_is_shortened() -> None:
    ran, probe = linear_probe(301_000 + 10**6)
    result = find(probe, limit_bytes=301_000 + 10**6)
    assert 290 <= result.solved.max_length <= 301
    assert result.solved.bound is Bound.MEMORY
    assert all(shape.batch_size * shape.length <= 301 for shape in ran if shape.length == result.solved.max_length)


def test_lengths_stay_multiples_when_they_are_shortened() -> None:
    ran, probe = linear_probe(301_000 + 10**6)
    result = find(probe, limit_bytes=301_000 + 10**6, pad_multiple=8)
    assert result.solved.max_length % 8 == 0
    assert all(shape.length % 8 == 0 for shape in ran)


def test_nothing_fits() -> None:
    ran, probe = linear_probe(10**6)
    with pytest.raises(DoesNotFitError, match="not even one row of 8 tokens") as caught:
        find(probe, limit_bytes=10**6)
    assert caught.value.limit_bytes == 10**6
    assert {shape.batch_size for shape in ran} == {1}
    assert len(ran) <= 3


def test_known_probes_are_not_run_again() -> None:
    ran, probe = linear_probe(10**9)
    first = find(probe)
    ran.clear()
    second = find(probe, known=first.probes)
    assert ran == []
    assert second.solved == first.solved


def test_an_interrupted_search_goes_on() -> None:
    ran, probe = linear_probe(10**9)
    whole = find(probe)
    ran.clear()
    find(probe, known=whole.probes[:2])
    assert ran == [p.shape for p in whole.probes[2:]]


def test_caps_are_never_passed() -> None:
    ran, probe = linear_probe(10**9)
    result = find(probe, caps=Caps(rows=100))
    assert max(shape.batch_size for shape in ran) == 100
    assert {point.batch_size for point in result.solved.frontier if point.bound is Bound.KERNEL} == {100}


def test_a_step_may_not_take_longer_than_allowed() -> None:
    ran, probe = linear_probe(10**9)
    result = find(probe, max_step_s=100.0)
    assert max(shape.tokens for shape in ran) <= 100_000 * 1.01
    assert result.caps.reason is Bound.TIME
    assert result.solved.frontier[-1].bound is Bound.TIME


def test_time_that_runs_out_leaves_the_best_so_far() -> None:
    ran, probe = linear_probe(10**9)

    def slow(shape: Shape) -> Probe:
        if len(ran) == 2:
            raise CalibrationTimeoutError("no answer within 1 s")
        return probe(shape)  # type: ignore[operator] # a function, as linear_probe made it

    result = find(slow)
    assert result.expired
    largest = max(shape.tokens for shape in ran)
    assert all(point.batch_size * point.length <= largest for point in result.solved.frontier)


def test_time_that_runs_out_at_once_is_an_error() -> None:
    def never(shape: Shape) -> Probe:
        raise CalibrationTimeoutError(f"no answer for {shape}")

    with pytest.raises(CalibrationTimeoutError, match="before any probe ended"):
        find(never)


def test_a_kernel_limit_becomes_a_cap() -> None:
    _, probe = linear_probe(10**9)

    def limited(shape: Shape) -> Probe:
        done = probe(shape)  # type: ignore[operator] # a function, as linear_probe made it
        return done.model_copy(update={"outcome": Outcome.KERNEL_LIMIT}) if shape.batch_size > 5000 else done

    result = find(limited)
    assert result.caps.rows is not None
    assert result.caps.rows <= 5000 * 1.05
    assert max(point.batch_size for point in result.solved.frontier) <= result.caps.rows


def test_a_first_guess_saves_probes() -> None:
    ran, probe = linear_probe(10**9)
    guess = find(probe).cost
    ran.clear()
    find(probe, first_guess=guess)
    assert len(ran) == 3


@pytest.mark.parametrize(("lengths", "words"), [([], "no lengths"), ([0], "length 0"), ([12], "length 12")])
def test_lengths_that_can_not_be(lengths: list[int], words: str) -> None:
    _, probe = linear_probe(10**9)
    with pytest.raises(UsageError, match=words):
        find(probe, lengths=lengths, pad_multiple=8)
