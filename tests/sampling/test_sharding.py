import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetdb.errors import UsageError
from budgetdb.sampling import TokenBudgetBatchSampler
from budgetdb.sampling.plan import plan_batches
from budgetdb.sampling.sharding import even_plan

LENGTHS = st.lists(st.integers(1, 60), max_size=50)


def all_shards(sampler, world_size):
    return [sampler.shard(rank, world_size) for rank in range(world_size)]


@settings(max_examples=300, deadline=None)
@given(
    lengths=LENGTHS,
    budget=st.integers(1, 400),
    world_size=st.integers(1, 8),
    order=st.sampled_from(["descending", "ascending"]),
)
def test_every_rank_has_as_many_batches_and_all_samples_run_once(lengths, budget, world_size, order):
    sampler = TokenBudgetBatchSampler(lengths, budget, order=order)
    shards = all_shards(sampler, world_size)

    assert {len(shard) for shard in shards} == {-(-len(sampler) // world_size)}
    real = [np.delete(shard.order, shard.duplicates) for shard in shards]
    assert sorted(np.concatenate(real).tolist()) == list(range(len(lengths)))
    for shard in shards:
        for batch, length in zip(shard, shard.batch_lengths.tolist(), strict=True):
            assert batch
            assert length == max(lengths[index] for index in batch)
            assert len(batch) * length <= budget or (len(batch) == 1 and batch[0] in shard.oversize)
    assert sum(len(shard.duplicates) for shard in shards) < world_size


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 400), st.integers(1, 8))
def test_outputs_of_all_ranks_come_back_in_dataset_order(lengths, budget, world_size):
    shards = all_shards(TokenBudgetBatchSampler(lengths, budget), world_size)
    by_batch = [np.array([[index, lengths[index]] for index in batch]) for shard in shards for batch in shard]
    wanted = [[index, length] for index, length in enumerate(lengths)]

    restored = shards[-1].restore_order(by_batch)
    assert [list(row) for row in restored] == wanted
    flat = [tuple(row) for batch in by_batch for row in batch.tolist()]
    assert shards[0].restore_order(flat) == [tuple(row) for row in wanted]


def test_the_batches_with_most_rows_are_halved():
    plan = plan_batches(np.array([1] * 9 + [50]), max_rows=lambda padded: 50 // padded)
    assert plan.batch_sizes.tolist() == [1, 9]
    assert even_plan(plan, world_size=1).batch_sizes.tolist() == [1, 9]
    assert even_plan(plan, world_size=3).batch_sizes.tolist() == [1, 5, 4]
    assert even_plan(plan, world_size=4).batch_sizes.tolist() == [1, 3, 2, 4]
    assert even_plan(plan, world_size=7).batch_sizes.tolist() == [1, 1, 1, 1, 2, 2, 2]


def split_by_hand(sizes, batches):
    """The rule of `even_plan`, with no regard to cost."""
    sizes = list(sizes)
    while len(sizes) < batches and max(sizes) > 1:
        at = sizes.index(max(sizes))
        sizes[at : at + 1] = [-(-sizes[at] // 2), sizes[at] // 2]
    return sizes


@settings(deadline=None)
@given(LENGTHS.filter(bool), st.integers(1, 400), st.integers(1, 40))
def test_splits_follow_the_rule(lengths, budget, world_size):
    plan = plan_batches(np.array(lengths), max_rows=lambda padded: budget // padded)
    batches = -(-len(plan.ends) // world_size) * world_size
    even = even_plan(plan, world_size=world_size)

    by_hand = split_by_hand(plan.batch_sizes.tolist(), batches)
    assert even.batch_sizes.tolist() == by_hand + [1] * (batches - len(by_hand))
    assert even.order[: len(lengths)].tolist() == plan.order.tolist()


def test_fewer_samples_than_ranks_are_made_up_by_marked_duplicates_of_the_shortest():
    shards = all_shards(TokenBudgetBatchSampler([9, 3, 5], 100), 5)
    assert [list(shard) for shard in shards] == [[[0]], [[2]], [[1]], [[1]], [[1]]]
    assert [shard.duplicates.tolist() for shard in shards] == [[], [], [], [0], [0]]
    assert shards[0].restore_order(["nine", "five", "three", "again", "again"]) == ["nine", "three", "five"]


def test_no_samples_are_no_batches_on_any_rank():
    shards = all_shards(TokenBudgetBatchSampler([], 100), 3)
    assert [len(shard) for shard in shards] == [0, 0, 0]
    assert shards[1].restore_order([]) == []


def test_shards_of_many_batches():
    lengths = np.random.default_rng(0).integers(1, 500, 20_000)
    sampler = TokenBudgetBatchSampler(lengths, 512)
    shards = all_shards(sampler, 7)
    assert len({len(shard) for shard in shards}) == 1
    assert sorted(np.concatenate([shard.order for shard in shards]).tolist()) == list(range(20_000))


@pytest.mark.parametrize(("rank", "world_size"), [(4, 4), (-1, 4), (0, 0), (0, -2), ("0", 2), (0, 1.5)])
def test_ranks_that_do_not_exist(rank, world_size):
    with pytest.raises(UsageError, match=r"rank|world_size"):
        TokenBudgetBatchSampler([1, 2], 8).shard(rank, world_size)


def test_outputs_of_one_rank_alone_are_refused_with_both_numbers():
    shard = TokenBudgetBatchSampler([1] * 10, 2).shard(0, 2)
    with pytest.raises(UsageError, match=r"5 outputs for 10 rows in 6 batches\. Gather the outputs of all ranks"):
        shard.restore_order([0] * len(shard.order))


def test_a_shard_is_not_sharded_again():
    shard = TokenBudgetBatchSampler([1] * 10, 2).shard(0, 2)
    with pytest.raises(UsageError, match="rank 0 of 2 already"):
        shard.shard(0, 2)


def test_repr_names_the_rank():
    shard = TokenBudgetBatchSampler([4] * 10, 8).shard(1, 2)
    assert repr(shard) == "RankBatchSampler(rank 1 of 2: 5 samples in 3 batches, 0.0 % padding)"
