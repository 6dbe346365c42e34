"""A moment, its inverse, and the same for many lengths at once."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from budgetdb.costs.forms import (
    UNLIMITED,
    Moment,
    largest_peak_bytes,
    smallest_max_batch_size,
    smallest_max_batch_sizes,
)
from budgetdb.shapes import Shape

BYTES = st.floats(0, 2**45) | st.integers(0, 2**45).map(float)
TOKEN = st.just(0.0) | st.floats(1e-6, 1e9) | st.integers(0, 10**7).map(float)
SQUARE = st.just(0.0) | st.floats(1e-9, 1e5) | st.integers(0, 10**4).map(float)
MOMENTS = st.builds(Moment, constant=BYTES, token=TOKEN, square=SQUARE)
LENGTHS = st.integers(1, 200_000)
ROWS = st.integers(0, UNLIMITED)
LIMITS = st.integers(0, 2**53)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["constant", "token", "square"])
def test_coefficients_are_finite_and_not_negative(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"coefficient {name} must be finite and not negative"):
        Moment(**{"constant": 1.0, "token": 1.0, "square": 1.0, name: bad})


def test_the_formula() -> None:
    moment = Moment(constant=1000, token=10, square=0.5)
    assert moment.peak_bytes(Shape(3, 100)) == 1000 + 3 * (10 * 100 + 0.5 * 100**2)
    assert moment.peak_bytes(Shape(0, 100)) == 1000
    assert Moment(constant=0.25, token=0).peak_bytes(Shape(1, 1)) == 1


@given(moment=MOMENTS, length=LENGTHS, limit=LIMITS)
@example(moment=Moment(2.0**33, 1e-15), length=8, limit=2**33)  # rows cost less than the constant's last digit
@example(moment=Moment(0.0, 5e-324), length=1, limit=2**53)  # the quotient is infinite
@example(moment=Moment(0.0, 0.1), length=3, limit=9)
def test_the_inverse_is_exact(moment: Moment, length: int, limit: int) -> None:
    size = moment.max_batch_size(length, limit)
    assert 0 <= size <= UNLIMITED
    assert size == 0 or moment.peak_bytes(Shape(size, length)) <= limit
    assert size == UNLIMITED or moment.peak_bytes(Shape(size + 1, length)) > limit


@given(moment=MOMENTS, length=LENGTHS, rows=st.integers(1, 10**6))
def test_the_inverse_is_exact_at_a_boundary(moment: Moment, length: int, rows: int) -> None:
    peak = moment.peak_bytes(Shape(rows, length))
    assert moment.max_batch_size(length, peak) >= rows
    assert moment.max_batch_size(length, peak - 1) < rows


@given(
    constant=st.integers(0, 2**50),
    token=st.integers(1, 2**30),
    length=st.integers(1, 2**17),
    limit=st.integers(0, 2**52),
)
def test_whole_coefficients_give_the_whole_number_answer(constant: int, token: int, length: int, limit: int) -> None:
    size = Moment(constant, token).max_batch_size(length, limit)
    assert size == min(max((limit - constant) // (token * length), 0), UNLIMITED)


@given(moment=MOMENTS, length=LENGTHS, rows=st.integers(0, 10**6))
def test_the_peak_is_within_rounding_of_the_true_sum(moment: Moment, length: int, rows: int) -> None:
    exact = Fraction(moment.constant) + rows * length * (Fraction(moment.token) + Fraction(moment.square) * length)
    assert abs(moment.peak_bytes(Shape(rows, length)) - exact) <= 1 + exact / 2**50


@given(moments=st.lists(MOMENTS, min_size=1, max_size=3), length=LENGTHS, rows=ROWS, limit=LIMITS)
def test_the_largest_moment_decides(moments: list[Moment], length: int, rows: int, limit: int) -> None:
    shape = Shape(rows, length)
    assert largest_peak_bytes(moments, shape) == max(moment.peak_bytes(shape) for moment in moments)
    size = smallest_max_batch_size(moments, length, limit)
    assert size == 0 or largest_peak_bytes(moments, Shape(size, length)) <= limit
    assert size == UNLIMITED or largest_peak_bytes(moments, Shape(size + 1, length)) > limit


@given(
    moments=st.lists(MOMENTS, min_size=1, max_size=3), lengths=st.lists(LENGTHS, max_size=20), limit=LIMITS, near=ROWS
)
@example(moments=[Moment(2.0**33, 1e-15)], lengths=[8, 16], limit=2**33, near=0)
@example(moments=[Moment(0.0, 5e-324)], lengths=[1], limit=2**53, near=0)
def test_many_lengths_at_once_give_what_one_by_one_gives(
    moments: list[Moment], lengths: list[int], limit: int, near: int
) -> None:
    boundary = largest_peak_bytes(moments, Shape(near, lengths[0])) if lengths else limit
    for bytes_allowed in (limit, *(b for b in (boundary - 1, boundary) if 0 <= b <= 2**53)):
        expected = [smallest_max_batch_size(moments, length, bytes_allowed) for length in lengths]
        sizes = smallest_max_batch_sizes(moments, lengths, bytes_allowed)
        assert sizes.dtype == np.int64
        assert sizes.tolist() == expected


def test_rows_that_cost_nothing_have_no_limit_but_the_constant_has() -> None:
    free = Moment(constant=100, token=0)
    assert free.max_batch_size(8, 100) == UNLIMITED
    assert free.max_batch_size(8, 99) == 0
    assert smallest_max_batch_sizes([free], [8, 9], 100).tolist() == [UNLIMITED, UNLIMITED]
    assert smallest_max_batch_sizes([free], [8, 9], 99).tolist() == [0, 0]
