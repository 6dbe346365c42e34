from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from budgetdb.errors import UnknownNameError
from budgetdb.sampling.packing import (
    count_lengths,
    order_longest_first,
    order_shortest_first,
    pack_ascending,
    pack_fewest,
    padded_lengths,
)
from budgetdb.sampling.plan import plan_batches
from budgetdb.shapes import padded_length

LENGTHS = st.lists(st.integers(0, 60), max_size=40).map(lambda lengths: np.array(lengths, dtype=np.int64))
FEW_LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8).map(lambda lengths: np.array(lengths))
LONG = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda lengths: np.array(lengths, dtype=np.int64))


def within(budget):
    return lambda padded: budget // padded


def steps(limits):
    """Some rule that never rises with the length, and allows no row at all at the longest."""
    return lambda padded: np.array([sum(limit >= length for limit in limits) for length in padded.tolist()], dtype=int)


RULES = st.one_of(st.integers(1, 200).map(within), st.lists(st.integers(1, 60), max_size=12).map(steps))


def micm_batches(lengths, budget, multiple, extra):
    """What micm-nlp 0.5.1 yields, for lengths above zero: sorted, closed when the next row would not fit."""
    batches, batch, longest = [], [], 0
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        padded = -(-lengths[index] // multiple) * multiple
        if batch and (len(batch) + 1) * (max(longest, padded) + extra) > budget:
            batches.append(batch)
            batch, longest = [], 0
        batch.append(index)
        longest = max(longest, padded)
    return batches + ([batch] if batch else [])


def fewest_of_any_partition(lengths, max_rows):
    """Exhaustive: the fewest groups, over every partition of the samples."""
    most = {length: max(int(max_rows(np.array([length]))[0]), 1) for length in set(lengths)}

    @cache
    def best(left):
        if not left:
            return 0
        first, rest = left[0], left[1:]
        fewest = len(left)
        for chosen in range(1 << len(rest)):
            group = [length for bit, length in enumerate(rest) if chosen >> bit & 1]
            if len(group) + 1 <= most[max([first, *group])]:
                others = tuple(length for bit, length in enumerate(rest) if not chosen >> bit & 1)
                fewest = min(fewest, 1 + best(others))
        return fewest

    return best(tuple(sorted(lengths)))


def batches_of(plan):
    return [plan.rows.indices[start:end].tolist() for start, end in zip(plan.starts, plan.ends_in_rows, strict=True)]


@given(LENGTHS, st.integers(1, 64), st.integers(0, 20))
def test_padded_lengths_are_those_of_a_single_row(lengths, multiple, extra):
    padded = padded_lengths(lengths, pad_multiple=multiple, extra_tokens=extra)
    assert padded.tolist() == [padded_length(length, multiple) + extra for length in lengths.tolist()]


@given(st.one_of(LENGTHS, LONG))
def test_counts_by_distinct_length(lengths):
    distinct, counts = count_lengths(lengths)
    assert np.repeat(distinct, counts).tolist() == sorted(lengths.tolist())
    assert (counts > 0).all()
    assert len(set(distinct.tolist())) == len(distinct)


@example(np.array([3, 65_536, 65_535, 0, 65_537]))  # about where 16 bits end
@given(st.one_of(LENGTHS, LONG))
def test_orders_are_stable_sorts(lengths):
    values = lengths.tolist()
    longest_first, shortest_first = order_longest_first(lengths), order_shortest_first(lengths)
    assert longest_first.tolist() == sorted(range(len(values)), key=lambda index: -values[index])
    assert shortest_first.tolist() == sorted(range(len(values)), key=lambda index: values[index])
    assert longest_first.dtype == shortest_first.dtype == np.int32


@settings(max_examples=500)
@given(
    lengths=LENGTHS,
    max_rows=RULES,
    multiple=st.integers(1, 70),
    extra=st.integers(0, 20),
    order=st.sampled_from(["descending", "ascending"]),
)
def test_batches_stay_within_the_rule_and_hold_each_sample_once(lengths, max_rows, multiple, extra, order):
    plan = plan_batches(lengths, max_rows=max_rows, pad_multiple=multiple, extra_tokens=extra, order=order)
    batches = batches_of(plan)

    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(batches)
    longest = [max(padded_length(int(lengths[index]), multiple) + extra for index in batch) for batch in batches]
    assert plan.batch_lengths.tolist() == longest
    assert plan.batch_sizes.tolist() == [len(batch) for batch in batches]
    over = [
        batch
        for batch, length in zip(batches, longest, strict=True)
        if len(batch) > int(max_rows(np.array([length]))[0])
    ]
    assert over == [[index] for index in plan.oversize.tolist()]


@given(LENGTHS, RULES)
def test_longest_first_and_shortest_first(lengths, max_rows):
    falling = lengths[plan_batches(lengths, max_rows=max_rows).order]
    rising = lengths[plan_batches(lengths, max_rows=max_rows, order="ascending").order]
    assert (np.diff(falling) <= 0).all()
    assert (np.diff(rising) >= 0).all()


@settings(max_examples=150, deadline=None)
@given(FEW_LENGTHS, RULES)
def test_longest_first_gives_the_fewest_batches_of_any_partition(lengths, max_rows):
    plan = plan_batches(lengths, max_rows=max_rows)
    assert len(plan) == fewest_of_any_partition(lengths.tolist(), max_rows)


@settings(max_examples=500)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    budget=st.integers(1, 300),
    multiple=st.integers(1, 20),
    extra=st.integers(0, 20),
)
def test_ascending_gives_the_batches_of_micm_nlp(lengths, budget, multiple, extra):
    plan = plan_batches(
        np.array(lengths, dtype=np.int64),
        max_rows=within(budget),
        pad_multiple=multiple,
        extra_tokens=extra,
        order="ascending",
    )
    assert batches_of(plan) == micm_batches(lengths, budget, multiple, extra)


def test_packing_by_hand():
    counts, max_rows = np.array([5, 1, 7]), np.array([6, 4, 3])
    assert pack_fewest(counts, max_rows).tolist() == [3, 3, 3, 4]
    assert pack_ascending(counts, max_rows).tolist() == [5, 3, 3, 2]


def test_nothing_to_pack():
    plan = plan_batches(np.empty(0, dtype=np.int64), max_rows=within(8))
    assert len(plan.order) == len(plan) == len(plan.batch_lengths) == 0
    assert plan.padding_share == 0.0


def test_padding_share_counts_what_the_collator_adds_and_not_the_models_own_tokens():
    plan = plan_batches(np.array([6, 3, 4]), max_rows=within(48), pad_multiple=8, extra_tokens=8)
    assert plan.batch_sizes.tolist() == [3]
    assert plan.padding_share == pytest.approx(1 - 13 / 24)


def test_unknown_order_offers_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown order 'descend'\. Did you mean 'descending'"):
        plan_batches(np.array([1]), max_rows=within(8), order="descend")


@given(LENGTHS, RULES, st.randoms(use_true_random=False))
def test_selected_batches_are_those_batches(lengths, max_rows, random):
    plan = plan_batches(lengths, max_rows=max_rows)
    chosen = random.choices(range(len(plan)), k=random.randint(0, 6)) if len(plan) else []
    part = plan.select(np.array(chosen, dtype=np.int64))
    assert batches_of(part) == [batches_of(plan)[batch] for batch in chosen]
    assert part.batch_lengths.tolist() == [int(plan.batch_lengths[batch]) for batch in chosen]
    assert set(part.oversize.tolist()) == set(plan.oversize.tolist()) & set(part.order.tolist())


def test_a_million_lengths():
    generator = np.random.default_rng(1)
    lengths = np.clip(generator.lognormal(5.0, 0.8, 1_000_000), 4, 4096).astype(np.int64)
    plan = plan_batches(lengths, max_rows=within(16_384), pad_multiple=8)
    assert (np.bincount(plan.order, minlength=len(lengths)) == 1).all()
    assert int((plan.batch_sizes * plan.batch_lengths).max()) <= 16_384
    # The longest-first greedy, row by row, on the same lengths.
    batches, rows, most = 0, 0, 0
    for length in (-(-np.sort(lengths)[::-1] // 8) * 8).tolist():
        if rows == most:
            batches, rows, most = batches + 1, 0, 16_384 // length
        rows += 1
    assert len(plan) == batches
