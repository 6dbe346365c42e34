import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budgetdb.errors import UnknownNameError, UsageError
from budgetdb.sampling.packing import Histogram, pack_by_waste, pack_exactly, pack_fewest
from budgetdb.sampling.plan import plan_batches
from budgetdb.sampling.strategies import Fastest, total_seconds
from budgetdb.sampling.times import TimeModel

MANY = 10_000
TIMES = st.builds(
    TimeModel, st.integers(0, 400).map(float), st.integers(1, 8).map(float), st.sampled_from([0.0, 0.0625, 1.0])
)


@st.composite
def histograms(draw, most=60):
    """Some lengths, with rows allowed that never rise with the length; at times not even one."""
    lengths = np.array(sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=12))))
    counts = np.array(draw(st.lists(st.integers(1, most // 12), min_size=len(lengths), max_size=len(lengths))))
    rows = sorted(draw(st.lists(st.integers(0, 12), min_size=len(lengths), max_size=len(lengths))), reverse=True)
    return Histogram(lengths, counts, np.array(rows))


def least_cost(histogram, times):
    """The quadratic dynamic program over every contiguous partition."""
    lengths = np.repeat(histogram.lengths, histogram.counts)
    costs, limits = times.row_seconds(lengths), np.repeat(histogram.rows, histogram.counts)
    best = [0.0]
    for end in range(1, len(lengths) + 1):
        first = max(end - int(limits[end - 1]), 0)
        best.append(min(best[start] + times.step_s + (end - start) * costs[end - 1] for start in range(first, end)))
    return best[-1]


def check_sizes(histogram, sizes):
    assert sizes.sum() == histogram.samples
    assert (sizes > 0).all()
    assert (sizes <= histogram.rows[histogram.longest_of(sizes)]).all()


def check_all_packings(histogram, times):
    counts, rows, costs = histogram.counts, histogram.rows, times.row_seconds(histogram.lengths)
    exact = pack_exactly(counts, rows, costs, step_cost=times.step_s)
    fewest = pack_fewest(counts, rows)
    for sizes in (exact, fewest, pack_by_waste(counts, rows, costs, allowed=times.step_s)):
        check_sizes(histogram, sizes)
        assert len(sizes) >= len(fewest)
    assert total_seconds(exact, histogram, times) == pytest.approx(least_cost(histogram, times))


@settings(max_examples=400, deadline=None)
@given(histograms(), TIMES)
def test_the_exact_optimum_is_that_of_a_quadratic_dynamic_program(histogram, times):
    check_all_packings(histogram, times)


@pytest.mark.slow
@settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))
@given(histograms(), TIMES)
def test_ten_thousand_optima(histogram, times):
    check_all_packings(histogram, times)


@settings(max_examples=200, deadline=None)
@given(histograms(), TIMES)
def test_large_sets_are_cut_no_worse_than_by_the_fewest_batches(histogram, times):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("budgetdb.sampling.strategies.EXACT_SAMPLES", 0)
        sizes = Fastest().batch_sizes(histogram, times)
    check_sizes(histogram, sizes)
    fewest = pack_fewest(histogram.counts, histogram.rows)
    assert total_seconds(sizes, histogram, times) <= total_seconds(fewest, histogram, times)


def test_fastest_is_the_default_only_where_seconds_are_known():
    lengths = np.array([100, 2, 2, 2])
    one_batch = plan_batches(lengths, max_rows=lambda padded: 400 // padded)
    split = plan_batches(lengths, max_rows=lambda padded: 400 // padded, times=TimeModel(10, 1))
    assert one_batch.batch_sizes.tolist() == [4]
    assert split.batch_sizes.tolist() == [1, 3]


def test_fastest_without_seconds_says_what_to_do():
    with pytest.raises(UsageError, match="Calibrate on the device itself"):
        plan_batches(np.array([1]), max_rows=lambda padded: 8 // padded, strategy="fastest")


def test_unknown_strategy_offers_the_nearest():
    with pytest.raises(UnknownNameError, match="'fastest'"):
        plan_batches(np.array([1]), max_rows=lambda padded: 8 // padded, strategy="fastets")
