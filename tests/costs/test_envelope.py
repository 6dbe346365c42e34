from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_probes import probe, probes_of

from budgetdb.costs.envelope import fit_envelope
from budgetdb.profiles import Outcome, Probe

ANY_PROBES = st.lists(
    st.builds(
        probe,
        rows=st.integers(1, 5000),
        length=st.sampled_from([8, 128, 512, 4096]),
        peak_bytes=st.none() | st.integers(0, 2**46),
        baseline_bytes=st.integers(0, 2**36),
    ),
    min_size=1,
    max_size=12,
).filter(lambda probes: any(each.fits for each in probes))


@given(probes=ANY_PROBES)
def test_it_lies_on_or_above_every_probe_that_fitted(probes: list[Probe]) -> None:
    constant, rates = fit_envelope(probes)
    assert rates.keys() == {each.length for each in probes if each.fits}
    assert all(rate >= 0 for rate in rates.values())
    for each in probes:
        if each.fits:
            assert constant + rates[each.length] * each.shape.tokens >= each.peak_bytes * (1 - 1e-12)


@given(probes=ANY_PROBES)
def test_it_touches_a_probe_at_each_length(probes: list[Probe]) -> None:
    constant, rates = fit_envelope(probes)
    for length, rate in rates.items():
        gaps = [
            constant + rate * each.shape.tokens - each.peak_bytes
            for each in probes
            if each.fits and each.length == length
        ]
        assert rate == 0 or min(gaps) <= 1e-12 * (constant + 2**46)


def test_a_line_through_two_sizes_is_found() -> None:
    constant, rates = fit_envelope(probes_of(lambda k, n: 5e6 + 300 * k * n, [(1, 64), (100, 64), (20, 512)]))
    assert constant == pytest.approx(5e6)
    assert rates == {64: pytest.approx(300), 512: pytest.approx(300)}


def test_the_largest_intercept_is_the_safe_one() -> None:
    probes = [
        *probes_of(lambda k, n: 5e6 + k * n, [(1, 8), (100, 8)]),
        *probes_of(lambda k, n: 7e6 + k * n, [(1, 64), (90, 64)]),
    ]
    constant, _ = fit_envelope(probes)
    assert constant == pytest.approx(7e6)


def test_the_baseline_is_always_there() -> None:
    constant, rates = fit_envelope([probe(10, 8, 1000, baseline_bytes=400), probe(10, 16, 2000, baseline_bytes=500)])
    assert constant == 400
    assert rates == {8: 600 / 80, 16: 1600 / 160}


def test_two_sizes_that_are_nearly_equal_make_no_line() -> None:
    # The line through them would meet the axis at 3 000, far above the truth.
    constant, rates = fit_envelope([probe(90, 8, 4000), probe(100, 8, 4100)])
    assert constant == 0
    assert rates == {8: 4000 / 720}


def test_a_small_batch_on_large_blocks_lifts_the_constant_and_not_the_rate() -> None:
    block = 20 * 2**20
    constant, rates = fit_envelope([probe(1, 8, block), probe(1000, 8, 1000 * 8 * 10_000)])
    assert rates[8] == pytest.approx(10_000, rel=0.3)
    assert constant + rates[8] * 8 >= block


def test_failures_are_left_out() -> None:
    fitted = [probe(1, 8, 100, baseline_bytes=10), probe(10, 8, 500, baseline_bytes=10)]
    failed = [probe(20, 8, None), probe(1, 512, None)]
    kernel = Probe(batch_size=70_000, length=8, outcome=Outcome.KERNEL_LIMIT)
    assert fit_envelope([*failed, *fitted, kernel]) == fit_envelope(fitted)
    for probes in ([], failed, [kernel]):
        with pytest.raises(ValueError, match="no probe fitted"):
            fit_envelope(probes)
