"""The frontier under a limit, and the one number that is safe everywhere below it."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from made_probes import probe

from budgetdb.costs.base import CostModel
from budgetdb.costs.forms import UNLIMITED
from budgetdb.costs.frontier import Solved, max_batch_sizes, solve, solve_profile
from budgetdb.costs.linear import LinearCost
from budgetdb.costs.quadratic import QuadraticCost
from budgetdb.profiles import Bound, Caps, Environment, Profile, ProfileKey, Provenance
from budgetdb.shapes import Shape

COSTS = st.one_of(
    st.builds(LinearCost, c=st.floats(0, 1e6), a=st.floats(0, 1e4)),
    st.builds(
        QuadraticCost,
        c=st.floats(0, 1e6),
        a=st.floats(0, 1e4),
        p=st.floats(0, 10),
        b=st.floats(0, 1e4),
        q=st.floats(0, 100),
    ),
)
NO_CAP = st.none()
CAPS = st.builds(
    Caps,
    rows=NO_CAP | st.integers(1, 1000),
    tokens=NO_CAP | st.integers(1, 10**5),
    squares=NO_CAP | st.integers(1, 10**7),
)


def sizes_one_by_one(cost: CostModel, lengths: range, usable_bytes: int, caps: Caps) -> list[int]:
    return [caps.clip(cost.max_batch_size(length, usable_bytes), length) for length in lengths]


@given(cost=COSTS, usable=st.integers(0, 10**8), longest=st.integers(1, 300), multiple=st.integers(1, 16), caps=CAPS)
def test_the_token_budget_is_safe_at_every_length_and_no_larger_one_is(
    cost: CostModel, usable: int, longest: int, multiple: int, caps: Caps
) -> None:
    lengths = range(multiple, longest + 1, multiple)
    sizes = sizes_one_by_one(cost, lengths, usable, caps)
    solved = solve(cost, usable_bytes=usable, max_length=longest, caps=caps, pad_multiple=multiple)
    fitting = [length for length, size in zip(lengths, sizes, strict=True) if size > 0]
    if solved is None:
        assert fitting == []
        return
    assert solved.max_length == fitting[-1]
    budget = solved.token_budget
    # A cap of rows is kept beside the budget: for short rows it would be all the budget.
    by_tokens = sizes_one_by_one(cost, lengths, usable, caps.model_copy(update={"rows": None}))
    limits = dict(zip(lengths, by_tokens, strict=True))
    assert all(budget // length <= limits[length] for length in fitting)
    # One token more lets a batch through, somewhere, that does not fit.
    assert any((budget + 1) // length > limits[length] for length in fitting)


@given(cost=COSTS, usable=st.integers(0, 10**8), longest=st.integers(8, 3000), caps=CAPS)
def test_points_of_the_frontier_are_the_largest_batches(cost: CostModel, usable: int, longest: int, caps: Caps) -> None:
    ran = [probe(1, 24, 5), probe(1, 100, None)]
    solved = solve(cost, usable_bytes=usable, max_length=longest, caps=caps, probes=ran)
    assume(solved is not None)
    assert isinstance(solved, Solved)
    shown = [point.length for point in solved.frontier]
    assert shown == sorted(set(shown))
    wanted = {8, 16, 32, 64, 128, 256, 512, 1024, 2048, 24, 100, solved.max_length}
    assert set(shown) == {length for length in wanted if length <= solved.max_length}
    for point in solved.frontier:
        assert point.batch_size == caps.clip(cost.max_batch_size(point.length, usable), point.length)
        assert point.batch_size > 0
        assert point.peak_bytes == cost.peak_bytes(Shape(point.batch_size, point.length)) <= usable
        assert point.probed == (point.length == 24)
        memory = cost.max_batch_size(point.length, usable) == point.batch_size
        assert point.bound is (Bound.MEMORY if memory else Bound.KERNEL)


@given(cost=COSTS, usable=st.integers(0, 10**9), caps=CAPS, lengths=st.lists(st.integers(1, 9000), max_size=20))
def test_sizes_of_many_lengths(cost: CostModel, usable: int, caps: Caps, lengths: list[int]) -> None:
    sizes = max_batch_sizes(cost, np.array(lengths, dtype=np.int64), usable_bytes=usable, caps=caps)
    assert sizes.dtype == np.int64
    assert sizes.tolist() == [caps.clip(cost.max_batch_size(length, usable), length) for length in lengths]


def solved(cost: CostModel, usable_bytes: int, max_length: int, **arguments: object) -> Solved:
    found = solve(cost, usable_bytes=usable_bytes, max_length=max_length, **arguments)  # type: ignore[arg-type]  # assembled from parts on purpose
    assert found is not None
    return found


def test_an_example_by_hand() -> None:
    # 10 bytes a token and 100 fixed under 1000: 90 tokens, and one row less than 91/L at each length.
    found = solved(LinearCost(c=100, a=10), 1000, 40)
    assert (found.max_length, found.bound) == (40, Bound.MEMORY)
    assert [(point.length, point.batch_size) for point in found.frontier] == [(8, 11), (16, 5), (32, 2), (40, 2)]
    assert found.token_budget == 90


def test_padding_leaves_lengths_out_and_lets_the_budget_grow() -> None:
    assert solved(LinearCost(c=0, a=1), 100, 64).token_budget == 100
    # Of multiples of 32, three rows of 32 and one of 64 fit; 32 * 4 and 64 * 2 don't.
    assert solved(LinearCost(c=0, a=1), 100, 64, pad_multiple=32).token_budget == 127


@pytest.mark.parametrize(
    ("cost", "usable", "max_length", "multiple"),
    [
        (LinearCost(c=1000, a=0), 999, 512, 1),
        (LinearCost(c=0, a=10), 79, 512, 8),
        (LinearCost(c=0, a=10), 0, 512, 1),
        (LinearCost(c=0, a=1), 10**6, 7, 8),
    ],
)
def test_nothing_fits(cost: CostModel, usable: int, max_length: int, multiple: int) -> None:
    assert solve(cost, usable_bytes=usable, max_length=max_length, pad_multiple=multiple) is None


def test_caps_of_tokens_that_let_nothing_through() -> None:
    assert solve(LinearCost(c=0, a=1), usable_bytes=10**6, max_length=64, caps=Caps(tokens=7), pad_multiple=8) is None


def test_what_ends_the_lengths_is_named() -> None:
    assert solved(LinearCost(c=0, a=1), 100, 512).max_length == 100
    assert solved(LinearCost(c=0, a=1), 100, 512).bound is Bound.MEMORY
    assert solved(LinearCost(c=0, a=1), 100, 512, length_bound=Bound.MAX_LENGTH).bound is Bound.MEMORY
    capped = solved(LinearCost(c=0, a=1), 10**9, 512, caps=Caps(tokens=100, reason=Bound.TIME))
    assert (capped.max_length, capped.bound) == (100, Bound.TIME)
    squared = solved(LinearCost(c=0, a=1), 10**9, 512, caps=Caps(squares=101**2))
    assert (squared.max_length, squared.bound) == (101, Bound.KERNEL)


def test_what_decides_at_the_longest_is_named() -> None:
    cost = LinearCost(c=0, a=1)
    assert solved(cost, 10_000, 512).bound is Bound.MEMORY
    assert solved(cost, 10_000, 512, length_bound=Bound.MAX_LENGTH).bound is Bound.MAX_LENGTH
    assert solved(cost, 10_000, 512, caps=Caps(rows=2, reason=Bound.USER)).bound is Bound.USER
    assert solved(cost, 10_000, 512, caps=Caps(rows=2, reason=Bound.USER), length_bound=Bound.MAX_LENGTH).bound is (
        Bound.MAX_LENGTH
    )


def test_a_cost_of_nothing_is_bounded_by_its_word_for_unlimited() -> None:
    found = solved(LinearCost(c=0, a=0), 0, 16)
    assert found.token_budget == (UNLIMITED + 1) - 1
    assert {point.batch_size for point in found.frontier} == {UNLIMITED}


def test_at_the_sizes_of_real_cards_nothing_overflows() -> None:
    found = solved(LinearCost(c=2**30, a=1e-3), 2**40, 10**6, pad_multiple=8)
    assert found.max_length == 10**6
    assert 0 < found.token_budget <= (UNLIMITED + 1) * 8
    assert all(point.batch_size <= UNLIMITED for point in found.frontier)


def profile_of(cost: CostModel, *, limit_bytes: int, bound: Bound = Bound.MEMORY, max_length: int = 512) -> Profile:
    found = solved(cost, limit_bytes - 1000, max_length, caps=Caps(rows=500), pad_multiple=8)
    return Profile(
        key=ProfileKey(
            model_hash="0",
            device_name="card",
            device_bytes=2**30,
            dtype="float32",
            attention="eager",
            pad_multiple=8,
            workload="forward[hold=previous]",
        ),
        environment=Environment(torch="2.13.0"),
        model_name="model",
        cost=cost.record(),
        caps=Caps(rows=500),
        limit_bytes=limit_bytes,
        headroom_bytes=1000,
        resident_bytes=0,
        max_length=found.max_length,
        bound=bound,
        token_budget=found.token_budget,
        frontier=found.frontier,
        provenance=Provenance.MEASURED,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
    )


@pytest.mark.parametrize("limit_bytes", [50_000, 100_000, 400_000])
def test_a_profile_is_solved_again_for_another_limit(limit_bytes: int) -> None:
    cost = QuadraticCost(c=500, a=10, p=0, b=2, q=0.1)
    again = solve_profile(profile_of(cost, limit_bytes=100_000), limit_bytes)
    assert again == profile_of(cost, limit_bytes=limit_bytes)
    assert again is not None
    assert again.max_batch_size(512) == again.frontier[-1].batch_size


def test_a_profile_solved_again_under_too_small_a_limit_is_none() -> None:
    profile = profile_of(LinearCost(c=5000, a=10), limit_bytes=100_000)
    assert solve_profile(profile, 6000) is None
    assert solve_profile(profile, 500) is None
    assert solve_profile(profile, 6000, headroom_bytes=0) is not None


def test_a_wider_headroom_is_taken_off_the_limit() -> None:
    profile = profile_of(LinearCost(c=5000, a=10), limit_bytes=100_000)
    again = solve_profile(profile, 100_000, headroom_bytes=50_000)
    assert again is not None
    assert (again.limit_bytes, again.headroom_bytes, again.usable_bytes) == (100_000, 50_000, 50_000)
    assert again.max_batch_size(64) == (50_000 - 5000) // 640


def test_a_profile_bounded_by_its_models_positions_stays_so() -> None:
    profile = profile_of(LinearCost(c=5000, a=1), limit_bytes=100_000, bound=Bound.MAX_LENGTH)
    again = solve_profile(profile, 200_000)
    assert again is not None
    assert again.bound is Bound.MAX_LENGTH
    shorter = solve_profile(profile, 6_200)
    assert shorter is not None
    assert (shorter.max_length, shorter.bound) == (200, Bound.MEMORY)
