from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_probes import probe, probes_of, unsafe

from budgetdb.costs.linear import LinearCost
from budgetdb.shapes import Shape
from budgetdb.testing.costs import check_cost_model, check_fitted


def test_it_keeps_the_contract() -> None:
    check_cost_model(LinearCost)


@given(
    c=st.integers(0, 2**36),
    a=st.floats(1, 1e6),
    lengths=st.sets(st.integers(1, 5000), min_size=1, max_size=4),
    rows=st.integers(100, 5000),
)
def test_a_linear_function_is_recovered(c: int, a: float, lengths: set[int], rows: int) -> None:
    shapes = [(k, length) for length in lengths for k in (1, rows)]
    model = LinearCost.fit(probes_of(lambda k, length: c + a * k * length, shapes))
    found = model.parameters()
    # Peaks are whole bytes: the two ends of a line may each be off by one.
    assert found["c"] == pytest.approx(c, abs=3)
    assert found["a"] == pytest.approx(a, rel=1e-9, abs=3 / min(length * rows for length in lengths))


@settings(max_examples=25)
@given(data=st.data(), c=st.integers(0, 2**36), a=st.floats(1, 1e6), noise=st.floats(0, 0.05))
def test_noise_is_met_from_above_and_closely(data: st.DataObject, c: int, a: float, noise: float) -> None:
    shapes = data.draw(st.lists(st.tuples(st.integers(50, 4000), st.integers(8, 4096)), min_size=1, max_size=8))
    off = data.draw(st.lists(st.floats(1 - noise, 1 + noise), min_size=len(shapes), max_size=len(shapes)))
    probes = [
        probe(k, length, (c + a * k * length) * share, baseline_bytes=c // 2)
        for (k, length), share in zip(shapes, off, strict=True)
    ]
    model = LinearCost.fit(probes)
    assert unsafe(model.peak_bytes, probes) == []
    check_fitted(LinearCost, probes)


def test_the_length_with_the_dearest_tokens_decides() -> None:
    probes = [probe(100, 8, 8_000), probe(100, 64, 128_000)]
    model = LinearCost.fit(probes)
    assert model.parameters() == {"c": 0, "a": 20}
    assert model.peak_bytes(Shape(100, 64)) == 128_000


def test_models_are_equal_by_kind_and_parameters() -> None:
    assert LinearCost(c=1, a=2) == LinearCost(c=1, a=2)
    assert hash(LinearCost(c=1, a=2)) == hash(LinearCost(c=1.0, a=2.0))
    assert LinearCost(c=1, a=2) != LinearCost(c=1, a=3)
    assert LinearCost(c=1, a=2) != "linear"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"c": 1.0}, "has coefficients c, a; got c"),
        ({"c": 1.0, "a": 1.0, "q": 1.0}, "has coefficients c, a; got a, c, q"),
        ({"c": 1.0, "a": [[1.0]]}, "coefficient a of a linear cost model must be a number"),
        ({"c": 1.0, "a": -1.0}, "must be finite and not negative"),
        ({"c": float("nan"), "a": 1.0}, "must be finite and not negative"),
    ],
)
def test_bad_parameters(parameters: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LinearCost.from_parameters(parameters)
