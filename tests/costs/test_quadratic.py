from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_probes import probe, probes_of, unsafe

from budgetdb.costs.quadratic import QuadraticCost
from budgetdb.shapes import Shape
from budgetdb.testing.costs import check_cost_model, check_fitted

Parameters = dict[str, float]


@dataclass(frozen=True)
class Step:
    """A step that is the larger of two moments, whose bytes per token cross at a length."""

    c: float
    a: float
    p: float
    b: float
    q: float
    crossing: int

    def rate(self, length: float) -> float:
        return max(self.a + self.p * length, self.b + self.q * length)

    def peak(self, rows: int, length: int) -> float:
        return self.c + rows * length * self.rate(length)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    a, crossing = draw(st.floats(1e3, 1e6)), draw(st.integers(100, 1500))
    b, p = a * draw(st.floats(0, 0.9)), draw(st.sampled_from([0.0, 1.0, 4.0]))
    return Step(draw(st.integers(0, 2**35)), a, p, b, p + (a - b) / crossing, crossing)


def settled(step: Step, lengths: list[int], *, rows: int = 2000) -> list[tuple[int, int]]:
    return [(k, length) for length in lengths for k in (1, rows)]


def test_it_keeps_the_contract() -> None:
    check_cost_model(QuadraticCost)


@given(step=steps())
def test_the_larger_of_two_moments_is_recovered(step: Step) -> None:
    lengths = [8, step.crossing // 2, 2 * step.crossing, 4000]
    model = QuadraticCost.fit(probes_of(step.peak, settled(step, lengths)))
    assert model.parameters()["c"] == pytest.approx(step.c, abs=3)
    for length in (8, 9, step.crossing // 3, step.crossing, step.crossing + 1, 3 * step.crossing, 4000):
        for rows in (1, 100, 2000):
            assert model.peak_bytes(Shape(rows, length)) == pytest.approx(step.peak(rows, length), rel=2e-4, abs=4)


@given(step=steps(), data=st.data())
def test_between_probed_lengths_it_is_on_the_safe_side(step: Step, data: st.DataObject) -> None:
    lengths = sorted(data.draw(st.sets(st.integers(8, 4096), min_size=2, max_size=3)))
    model = QuadraticCost.fit(probes_of(step.peak, settled(step, lengths)))
    for length in (lengths[0] + (lengths[-1] - lengths[0]) * part // 20 for part in range(21)):
        assert model.peak_bytes(Shape(1000, length)) >= step.peak(1000, length) * (1 - 1e-4)


@settings(max_examples=25)
@given(step=steps(), data=st.data(), noise=st.floats(0, 0.05))
def test_noise_is_met_from_above(step: Step, data: st.DataObject, noise: float) -> None:
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 4000), st.integers(8, 4096)), min_size=1, max_size=6))
    off = data.draw(st.lists(st.floats(1 - noise, 1 + noise), min_size=len(shapes), max_size=len(shapes)))
    probes = [
        probe(k, length, step.peak(k, length) * share, baseline_bytes=int(step.c) // 2)
        for (k, length), share in zip(shapes, off, strict=True)
    ]
    model = QuadraticCost.fit(probes)
    assert unsafe(model.peak_bytes, probes) == []
    check_fitted(QuadraticCost, probes)


@given(
    probes=st.lists(
        st.builds(
            probe,
            rows=st.integers(1, 10**5),
            length=st.integers(1, 10**5),
            peak_bytes=st.integers(0, 2**45),
            baseline_bytes=st.integers(0, 2**40),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_anything_that_was_measured_is_met_from_above(probes: list) -> None:  # type: ignore[type-arg]  # of probes
    assert unsafe(QuadraticCost.fit(probes).peak_bytes, probes) == []


def test_one_length_is_extended_as_tokens_that_cost_the_same() -> None:
    model = QuadraticCost.fit(probes_of(lambda k, n: 1000 + 10 * k * n, [(1, 512), (100, 512)]))
    assert model.peak_bytes(Shape(100, 512)) == pytest.approx(513_000, abs=2)
    assert model.peak_bytes(Shape(6400, 8)) == pytest.approx(513_000, rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "low", "high"),
    [(lambda n: 300.0, 299.9, 300.1), (lambda n: 2.0 * n, 0, 2048.1), (lambda n: max(300.0, n), 300, 1000.1)],
)
def test_closeness_between_two_lengths(rate: Callable[[int], float], low: float, high: float) -> None:
    probes = probes_of(lambda k, n: k * n * rate(n), [(2000, 8), (2000, 1000)])
    per_token = QuadraticCost.fit(probes).peak_bytes(Shape(1000, 500)) / 500_000
    assert low <= per_token <= high


@pytest.mark.parametrize("name", ["c", "a", "p", "b", "q"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "many", None])
def test_bad_parameters(name: str, bad: float) -> None:
    good: Parameters = dict.fromkeys(("c", "a", "p", "b", "q"), 1.0)
    assert QuadraticCost.from_parameters(good).parameters() == good
    with pytest.raises(ValueError, match="coefficient"):
        QuadraticCost.from_parameters({**good, name: bad})
    with pytest.raises(ValueError, match="has coefficients c, a, p, b, q"):
        QuadraticCost.from_parameters({other: 1.0 for other in good if other != name})
