import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetdb.errors import UsageError
from budgetdb.sampling import TokenBudgetBatchSampler
from budgetdb.sampling.plan import plan_batches
from budgetdb.sampling.sharding import assign, batch_costs, even_plan
from budgetdb.sampling.times import TimeModel

LENGTHS = st.lists(st.integers(1, 60), max_size=50)
TIMES = st.one_of(st.none(), st.builds(TimeModel, st.floats(0, 100), st.floats(0.1, 2), st.floats(0, 0.1)))


def all_shards(sampler, world_size, **how):
    return [sampler.shard(rank, world_size, **how) for rank in range(world_size)]


def check_shards(shards, lengths, budget):
    """Each sample once, no batch over the budget but declared ones."""
    real = [np.delete(shard.order, shard.duplicates) for shard in shards]
    assert sorted(np.concatenate(real).tolist()) == list(range(len(lengths)))
    for shard in shards:
        assert len(list(shard)) == len(shard)
        for batch, length in zip(shard, shard.batch_lengths.tolist(), strict=True):
            assert batch
            assert length == max(lengths[index] for index in batch)
            assert len(batch) * length <= budget or (len(batch) == 1 and batch[0] in shard.oversize)


@settings(max_examples=300, deadline=None)
@given(
    lengths=LENGTHS,
    budget=st.integers(1, 400),
    world_size=st.integers(1, 8),
    order=st.sampled_from(["descending", "ascending"]),
    times=TIMES,
)
def test_every_rank_has_as_many_batches_and_all_samples_run_once(lengths, budget, world_size, order, times):
    sampler = TokenBudgetBatchSampler(lengths, budget, order=order, times=times)
    shards = all_shards(sampler, world_size)
    assert {len(shard) for shard in shards} == {-(-len(sampler) // world_size)}
    check_shards(shards, lengths, budget)
    assert sum(len(shard.duplicates) for shard in shards) < world_size


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 400), st.integers(1, 8), st.sampled_from(["descending", "ascending"]), TIMES)
def test_gathered_steps_have_as_many_rows_on_every_rank(lengths, budget, world_size, order, times):
    shards = all_shards(TokenBudgetBatchSampler(lengths, budget, order=order, times=times), world_size, gather=True)
    assert len({tuple(shard.batch_sizes.tolist()) for shard in shards}) == 1
    check_shards(shards, lengths, budget)
    steps = zip(*shards, strict=True)
    arrived = [np.array([[index, lengths[index]] for batch in step for index in batch]) for step in steps]
    wanted = [[index, length] for index, length in enumerate(lengths)]
    assert [list(row) for row in shards[0].restore_order(arrived)] == wanted


@settings(max_examples=200, deadline=None)
@given(
    LENGTHS,
    st.integers(1, 400),
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_ranks_of_different_speed_share_all_samples(lengths, budget, speeds, seed):
    sampler = TokenBudgetBatchSampler(lengths, budget, seed=seed)
    shards = all_shards(sampler, len(speeds), speeds=speeds)
    check_shards(shards, lengths, budget)
    outputs = [index for shard in shards for index in shard.order.tolist()]
    assert shards[0].restore_order(outputs) == list(range(len(lengths)))


def test_a_rank_twice_as_fast_gets_twice_the_work():
    lengths = np.random.default_rng(0).integers(1, 500, 20_000)
    shards = all_shards(TokenBudgetBatchSampler(lengths, 4096), 3, speeds=[1, 1, 2])
    tokens = [int((shard.batch_sizes * shard.batch_lengths).sum()) for shard in shards]
    assert tokens[2] / tokens[0] == pytest.approx(2, rel=0.01)
    assert tokens[1] / tokens[0] == pytest.approx(1, rel=0.01)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 400), st.integers(1, 8), st.one_of(st.none(), st.integers(0, 3)))
def test_outputs_of_all_ranks_come_back_in_dataset_order(lengths, budget, world_size, seed):
    shards = all_shards(TokenBudgetBatchSampler(lengths, budget, seed=seed), world_size)
    by_batch = [np.array([[index, lengths[index]] for index in batch]) for shard in shards for batch in shard]
    wanted = [[index, length] for index, length in enumerate(lengths)]

    restored = shards[-1].restore_order(by_batch)
    assert [list(row) for row in restored] == wanted
    flat = [tuple(row) for batch in by_batch for row in batch.tolist()]
    assert shards[0].restore_order(flat) == [tuple(row) for row in wanted]


def test_costs_are_evened_out_before_batches_are_halved():
    plan = plan_batches(np.array([1] * 9 + [50]), max_rows=lambda padded: 50 // padded)
    assert plan.batch_sizes.tolist() == [1, 9]
    assert even_plan(plan, world_size=1).batch_sizes.tolist() == [1, 9]
    assert even_plan(plan, world_size=3).batch_sizes.tolist() == [1, 5, 4]
    assert sorted(even_plan(plan, world_size=7).batch_sizes.tolist()) == [1, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("world_size", [8, 64])
def test_ranks_are_done_at_about_the_same_time(world_size):
    lengths = np.clip(np.random.default_rng(2).lognormal(5.0, 0.8, 50_000), 4, 4096).astype(np.int64)
    times = TimeModel(0.02, 5e-5)
    plan = even_plan(
        plan_batches(lengths, max_rows=lambda padded: 32_768 // padded, times=times), world_size=world_size
    )
    ranks, costs = assign(plan, world_size=world_size), batch_costs(plan)
    loads = np.bincount(ranks, weights=costs)
    assert np.bincount(ranks).tolist() == [len(plan) // world_size] * world_size
    assert loads.max() / loads.mean() < 1.05


def test_fewer_samples_than_ranks_are_made_up_by_marked_duplicates_of_the_shortest():
    shards = all_shards(TokenBudgetBatchSampler([9, 3, 5], 100), 5)
    runs = [index for shard in shards for batch in shard for index in batch]
    assert sorted(runs) == [0, 1, 1, 1, 2]
    assert sum(len(shard.duplicates) for shard in shards) == 2
    outputs = [{0: "nine", 1: "three", 2: "five"}[index] for index in runs]
    assert shards[0].restore_order(outputs) == ["nine", "three", "five"]


@pytest.mark.parametrize("gather", [False, True])
def test_no_samples_are_no_batches_on_any_rank(gather):
    shards = all_shards(TokenBudgetBatchSampler([], 100), 3, gather=gather)
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


def test_speeds_that_say_nothing():
    sampler = TokenBudgetBatchSampler([1, 2], 8)
    with pytest.raises(UsageError, match="3 speeds, 2 ranks"):
        sampler.shard(0, 2, speeds=[1, 2, 3])
    with pytest.raises(UsageError, match="must be positive"):
        sampler.shard(0, 2, speeds=[1, 0])
    with pytest.raises(UsageError, match="as long on every rank"):
        sampler.shard(0, 2, speeds=[1, 2], gather=True)


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
