"""Packing faults reported against other projects, each run as it was reported (tests/cases/packing.json)."""

import json
from pathlib import Path

import pytest

from budgetdb.errors import LengthsError
from budgetdb.sampling import TokenBudgetBatchSampler
from budgetdb.shapes import padded_length

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "cases" / "packing.json").read_text(encoding="utf-8"))
}
ORDERS = ("descending", "ascending")
REFUSED = {"all-zero-lengths", "negative-length"}


def make_sampler(case, order="descending"):
    return TokenBudgetBatchSampler(
        case["lengths"], case["token_budget"], case["pad_multiple"], case.get("extra_tokens_per_sample", 0), order=order
    )


def tokens_of(case, batch):
    longest = max(padded_length(case["lengths"][index], case["pad_multiple"]) for index in batch)
    return len(batch) * (longest + case.get("extra_tokens_per_sample", 0))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", sorted(CASES.keys() - REFUSED))
def test_each_index_once_and_only_declared_batches_over_the_budget(name, order):
    case = CASES[name]
    sampler = make_sampler(case, order)
    batches = list(sampler)

    assert sorted(index for batch in batches for index in batch) == list(range(len(case["lengths"])))
    assert len(sampler) == len(batches)
    assert all(batches)
    over = [batch for batch in batches if tokens_of(case, batch) > case["token_budget"]]
    assert over == [[index] for index in sampler.oversize.tolist()]


def test_cases_that_declare_oversize_samples():
    declared = {name: make_sampler(CASES[name]).oversize.tolist() for name in sorted(CASES.keys() - REFUSED)}
    assert {name: indices for name, indices in declared.items() if indices} == {
        "first-longer-than-budget": [0],
        "longer-than-budget": [0],
        "pad-multiple-wider-than-budget": [0, 1, 2],
    }


def test_virtual_tokens_leave_two_rows_a_batch():
    assert list(make_sampler(CASES["virtual-tokens"])) == [[0, 1], [2, 3]]


def test_remainder_is_kept():
    assert make_sampler(CASES["remainder-kept"]).batch_sizes.tolist() == [109] * 8


def test_all_zero_lengths_are_refused_with_where_they_come_from():
    with pytest.raises(LengthsError, match=r"all zero \(4 of 4\).*column that was never filled.*before tokenising"):
        make_sampler(CASES["all-zero-lengths"])


def test_negative_length_is_named_with_its_index():
    with pytest.raises(LengthsError, match=r"lengths\[1\] is -1, which is negative"):
        make_sampler(CASES["negative-length"])


def test_ranks_share_a_case_evenly():
    case = CASES["ranks"]
    whole = make_sampler(case)
    shards = [whole.shard(rank, case["world_size"]) for rank in range(case["world_size"])]

    assert len({len(shard) for shard in shards}) == 1
    rows = [(index, row) for shard in shards for row, index in enumerate(shard.order.tolist())]
    marked = sum(len(shard.duplicates) for shard in shards)
    assert len(rows) - marked == len(case["lengths"])
    outputs = [index * 10 for index, _ in rows]
    assert shards[0].restore_order(outputs) == [index * 10 for index in range(len(case["lengths"]))]
