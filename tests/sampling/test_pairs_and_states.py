import json
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetdb.errors import LengthsError, UsageError
from budgetdb.sampling import TokenBudgetBatchSampler

PAIRS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=60)
MIXED = np.random.default_rng(3).integers(1, 250, 2_000)


@settings(max_examples=300, deadline=None)
@given(PAIRS, st.integers(2, 400), st.integers(1, 20), st.integers(0, 9), st.integers(1, 4))
def test_pairs_stay_within_the_budget_and_come_once(pairs, budget, multiple, extra, world_size):
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    sampler = TokenBudgetBatchSampler(sources, budget, multiple, extra, target_lengths=targets)

    def padded(length):
        return -(-length // multiple) * multiple

    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(len(pairs)))
    assert all(batches)
    tokens = [
        len(batch) * (padded(max(sources[i] for i in batch)) + extra + padded(max(targets[i] for i in batch)))
        for batch in batches
    ]
    assert (sampler.batch_sizes * sampler.batch_lengths).tolist() == tokens
    over = [batch for batch, count in zip(batches, tokens, strict=True) if count > budget]
    assert over == [[index] for index in sampler.oversize.tolist()]
    shards = [sampler.shard(rank, world_size) for rank in range(world_size)]
    assert len({len(shard) for shard in shards}) == 1
    outputs = [index for shard in shards for index in shard.order.tolist()]
    assert shards[0].restore_order(outputs) == list(range(len(pairs)))


def test_pairs_are_padded_far_less_than_sorted_by_source_alone():
    generator = np.random.default_rng(0)
    sources = np.clip(generator.lognormal(3.3, 0.7, 20_000), 1, 512).astype(int)
    targets = np.clip(sources * generator.lognormal(0, 0.5, 20_000), 1, 512).astype(int)

    def efficiency(sampler):
        return (sources + targets).sum() / (sampler.batch_sizes * sampler.batch_lengths).sum()

    snake = TokenBudgetBatchSampler(sources, 8192, target_lengths=targets)
    by_source = TokenBudgetBatchSampler(sources, 4096)
    padded = sum(len(batch) * (sources[batch].max() + targets[batch].max()) for batch in by_source)
    assert efficiency(snake) > 0.88
    assert (sources + targets).sum() / padded < 0.7


def test_as_many_targets_as_sources():
    with pytest.raises(LengthsError, match="2 lengths for 3 samples"):
        TokenBudgetBatchSampler([1, 2, 3], 8, target_lengths=[1, 2])


def test_a_seed_shuffles_batches_anew_in_each_epoch_and_outputs_come_back():
    plain, sampler = TokenBudgetBatchSampler(MIXED, 4096), TokenBudgetBatchSampler(MIXED, 4096, seed=7)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second != list(plain)
    assert sorted(first) == sorted(second) == sorted(plain)
    assert second == list(sampler)
    assert sampler.restore_order([MIXED[batch] for batch in sampler]).tolist() == MIXED.tolist()
    again = TokenBudgetBatchSampler(MIXED, 4096, seed=7)
    assert list(again) == first
    shard = sampler.shard(0, 2)
    assert shard.seed == 7
    assert list(ForkingPickler.loads(ForkingPickler.dumps(sampler))) == second


def test_a_pass_goes_on_where_its_state_says():
    sampler = TokenBudgetBatchSampler(MIXED, 4096, seed=3)
    sampler.set_epoch(2)
    batches = list(sampler)
    running = iter(sampler)
    done = [next(running) for _ in range(10)]
    state = json.loads(json.dumps(sampler.state_dict()))
    assert state["position"] == 10

    resumed = TokenBudgetBatchSampler(MIXED, 4096, seed=3)
    resumed.load_state_dict(state)
    assert done + list(resumed) == batches
    assert list(resumed) == batches  # the pass after that is a whole one
    assert resumed.state_dict()["position"] == 0


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (TokenBudgetBatchSampler(MIXED, 2048, seed=3), "it was saved with"),
        (TokenBudgetBatchSampler(MIXED[::-1].copy(), 4096, seed=3), "it has as many batches, of other samples"),
        (TokenBudgetBatchSampler(MIXED, 4096, seed=4), "it was saved with seed 3, and the seed is 4"),
    ],
)
def test_a_state_of_another_plan_is_refused_with_the_difference(other, said):
    state = TokenBudgetBatchSampler(MIXED, 4096, seed=3).state_dict()
    with pytest.raises(UsageError, match=said):
        other.load_state_dict(state)


def test_states_that_are_none():
    sampler = TokenBudgetBatchSampler(MIXED, 4096)
    with pytest.raises(UsageError, match="the state has no batches, epoch, plan, seed"):
        sampler.load_state_dict({"position": 3})
    with pytest.raises(UsageError, match="it stands at batch 9999 of"):
        sampler.load_state_dict({**sampler.state_dict(), "position": 9999})
