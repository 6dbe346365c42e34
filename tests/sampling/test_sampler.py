import logging
from datetime import UTC, datetime
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from budgetdb.costs.frontier import solve
from budgetdb.costs.quadratic import QuadraticCost
from budgetdb.errors import LengthsError, UnknownNameError, UsageError
from budgetdb.profiles import Bound, Caps, Environment, Outcome, Probe, Profile, ProfileKey, Provenance
from budgetdb.sampling import ProfileBatchSampler, TokenBudgetBatchSampler
from budgetdb.shapes import Shape, padded_length

COST = QuadraticCost(c=100_000, a=1_000, p=0, b=100, q=20)


def make_profile(*, usable_bytes=2_000_000, max_length=256, pad_multiple=8, caps=None, probes=()):
    caps = caps or Caps()
    solved = solve(COST, usable_bytes=usable_bytes, max_length=max_length, caps=caps, pad_multiple=pad_multiple)
    return Profile(
        key=ProfileKey(
            model_hash="abc",
            device_name="card",
            device_bytes=2**30,
            dtype="float32",
            attention="eager",
            pad_multiple=pad_multiple,
            workload="forward",
        ),
        environment=Environment(torch="2.13.0"),
        model_name="toy",
        cost=COST.record(),
        caps=caps,
        limit_bytes=usable_bytes + 5_000,
        headroom_bytes=5_000,
        resident_bytes=100_000,
        max_length=solved.max_length,
        bound=Bound.MAX_LENGTH,
        token_budget=solved.token_budget,
        frontier=solved.frontier,
        probes=probes,
        provenance=Provenance.MEASURED,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


PROFILE = make_profile()
MIXED = np.random.default_rng(3).integers(1, 250, 2_000)


def test_yields_lists_of_int_longest_first_and_knows_their_number():
    sampler = TokenBudgetBatchSampler([5, 30, 7, 6], 32, 8)
    batches = list(sampler)
    assert batches == [[1], [2, 3, 0]]
    assert batches == list(sampler)
    assert len(sampler) == 2
    assert {type(index) for batch in batches for index in batch} == {int}
    assert sampler.order.tolist() == [1, 2, 3, 0]
    assert sampler.batch_sizes.tolist() == [1, 3]
    assert sampler.batch_lengths.tolist() == [32, 8]


def test_ascending_order_by_the_samplers_own_keyword():
    assert list(TokenBudgetBatchSampler([5, 30, 7, 6], 32, 8, order="ascending")) == [[0, 3, 2], [1]]


@pytest.mark.parametrize(
    "lengths",
    [
        MIXED.tolist(),
        torch.from_numpy(MIXED),
        Dataset.from_dict({"length": MIXED.tolist()})["length"],
        Dataset.from_dict({"length": MIXED[::-1].tolist()}).select(range(1_999, -1, -1))["length"],
    ],
    ids=["list", "tensor", "datasets", "datasets-reversed"],
)
def test_the_plan_does_not_depend_on_where_the_lengths_come_from(lengths):
    assert list(TokenBudgetBatchSampler(lengths, 1_024)) == list(TokenBudgetBatchSampler(MIXED, 1_024))


def test_oversize_samples_go_alone_are_declared_and_logged(caplog):
    with caplog.at_level(logging.WARNING, logger="budgetdb.sampling.sampler"):
        sampler = TokenBudgetBatchSampler([10, 300, 10, 200], 100)
    assert list(sampler) == [[1], [3], [0, 2]]
    assert sampler.oversize.tolist() == [1, 3]
    assert "2 of 4 samples are each over the token budget of 100" in caplog.text
    assert "the first is sample 1" in caplog.text


def test_nothing_is_logged_when_all_fit(caplog):
    assert TokenBudgetBatchSampler([10, 100], 100).oversize.tolist() == []
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_budget": 0}, "token_budget must be at least 1, got 0"),
        ({"token_budget": -5}, "token_budget must be at least 1, got -5"),
        ({"token_budget": 10.5}, "token_budget must be a whole number, got 10.5"),
        ({"token_budget": 10, "pad_multiple": 0}, "pad_multiple must be at least 1, got 0"),
        ({"token_budget": 10, "extra_tokens_per_sample": -1}, "extra_tokens_per_sample must be at least 0, got -1"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        TokenBudgetBatchSampler([1, 2], **arguments)
    assert isinstance(caught.value, UsageError)


def test_unknown_order():
    for make in (
        lambda: TokenBudgetBatchSampler([1], 8, order="asc"),
        lambda: ProfileBatchSampler([1], PROFILE, order="asc"),
    ):
        with pytest.raises(UnknownNameError, match="unknown order 'asc'"):
            make()


def test_no_samples_are_no_batches():
    sampler = TokenBudgetBatchSampler([], 8)
    assert list(sampler) == []
    assert len(sampler) == 0
    assert repr(sampler) == "TokenBudgetBatchSampler(0 samples in 0 batches, 0.0 % padding)"


def test_a_budget_beyond_64_bits_is_one_batch():
    assert len(TokenBudgetBatchSampler(MIXED, 10**30)) == 1


def test_zero_length_among_others_is_padded_to_one_multiple():
    assert list(TokenBudgetBatchSampler([0, 3, 0], 8, 4)) == [[1, 0], [2]]


def test_repr_says_samples_batches_and_padding():
    assert repr(TokenBudgetBatchSampler([6, 5, 8, 7], 16)) == (
        "TokenBudgetBatchSampler(4 samples in 2 batches, 7.1 % padding)"
    )


@pytest.mark.parametrize("sampler", [TokenBudgetBatchSampler([1, 2], 8), ProfileBatchSampler([1, 2], PROFILE)])
def test_libraries_find_no_batch_size_to_misread(sampler):
    for found in (sampler, sampler.shard(0, 2)):
        assert not hasattr(found, "batch_size")
        assert not isinstance(found, BatchSampler)


def test_the_order_is_not_writable():
    sampler = TokenBudgetBatchSampler([1, 2], 8)
    with pytest.raises(ValueError, match="read-only"):
        sampler.order[0] = 7


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_dataloader(workers):
    texts = [torch.full((length,), length) for length in MIXED.tolist()]
    sampler = TokenBudgetBatchSampler(MIXED, 2_048, 8)
    loader = DataLoader(
        texts, batch_sampler=sampler, collate_fn=lambda rows: [int(row.sum()) for row in rows], num_workers=workers
    )
    assert loader.batch_size is None
    assert len(loader) == len(sampler)
    assert sampler.restore_order(list(loader)) == (MIXED**2).tolist()


def test_pickles_small():
    lengths = np.random.default_rng(0).integers(1, 60_000, 100_000)
    sampler = TokenBudgetBatchSampler(lengths, 65_536, 8)
    payload = ForkingPickler.dumps(sampler)
    assert len(payload) < 1_000_000
    again = ForkingPickler.loads(payload)
    assert list(again) == list(sampler)
    assert repr(again) == repr(sampler)
    with pytest.raises(ValueError, match="read-only"):
        again.order[0] = 7


def test_a_million_samples_in_and_out():
    lengths = np.random.default_rng(0).integers(1, 4_000, 1_000_000)
    sampler = TokenBudgetBatchSampler(lengths, 32_768, 8)
    assert sum(len(batch) for batch in sampler) == 1_000_000
    np.testing.assert_array_equal(sampler.restore_order(lengths[sampler.order]), lengths)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=60),
    multiple=st.sampled_from([None, 1, 8, 32]),
    extra=st.integers(0, 20),
    order=st.sampled_from(["descending", "ascending"]),
)
def test_a_profile_bounds_every_batch_at_its_own_length(lengths, multiple, extra, order):
    sampler = ProfileBatchSampler(lengths, PROFILE, pad_multiple=multiple, extra_tokens_per_sample=extra, order=order)
    for batch, device_length in zip(sampler, sampler.batch_lengths.tolist(), strict=True):
        assert device_length == max(padded_length(lengths[index], multiple or 8) for index in batch) + extra
        assert COST.peak_bytes(Shape(len(batch), device_length)) <= PROFILE.usable_bytes
    assert sorted(sampler.order.tolist()) == list(range(len(lengths)))
    assert sampler.oversize.tolist() == []


def test_a_profile_fills_each_length_where_one_budget_cannot():
    by_profile = ProfileBatchSampler(MIXED, PROFILE)
    by_budget = TokenBudgetBatchSampler(MIXED, PROFILE.token_budget, 8)
    assert len(by_profile) < 0.85 * len(by_budget)
    assert by_profile.profile is PROFILE
    for size, length in zip(by_profile.batch_sizes.tolist()[:-1], by_profile.batch_lengths.tolist(), strict=False):
        assert size == PROFILE.max_batch_size(length)


def test_caps_of_a_profile_bound_the_rows():
    capped = make_profile(caps=Caps(rows=3))
    assert ProfileBatchSampler([1] * 10, capped).batch_sizes.tolist() == [3, 3, 3, 1]


def test_a_sample_that_no_longer_fits_the_profile_goes_alone_and_is_declared():
    shrunk = PROFILE.model_copy(update={"limit_bytes": 305_000})
    sampler = ProfileBatchSampler([10, 200, 12], shrunk)
    assert sampler.oversize.tolist() == [1]
    assert list(sampler) == [[1], [2, 0]]


def test_a_length_beyond_the_profile_is_named():
    with pytest.raises(
        LengthsError, match=r"lengths\[1\] is 249 \(256 tokens.*Calibrate with max_length=264"
    ) as caught:
        ProfileBatchSampler([10, 249, 260], make_profile(max_length=248))
    assert PROFILE.id in str(caught.value)
    assert len(ProfileBatchSampler([256], PROFILE)) == 1
    with pytest.raises(LengthsError, match=r"lengths\[0\] is 250 \(257 tokens on the device\)"):
        ProfileBatchSampler([250], PROFILE, extra_tokens_per_sample=1)


def test_arguments_of_the_profile_sampler_that_make_no_sense():
    with pytest.raises(UsageError, match="pad_multiple must be at least 1, got 0"):
        ProfileBatchSampler([1], PROFILE, pad_multiple=0)
    with pytest.raises(UsageError, match="extra_tokens_per_sample must be at least 0"):
        ProfileBatchSampler([1], PROFILE, extra_tokens_per_sample=-1)


def test_a_profile_sampler_pickles_without_the_probes():
    probe = Probe(batch_size=4, length=64, outcome=Outcome.FITS, peak_allocated_bytes=400_000)
    sampler = ProfileBatchSampler(MIXED, make_profile(probes=(probe,) * 500))
    payload = ForkingPickler.dumps(sampler)
    assert len(payload) < 40_000
    again = ForkingPickler.loads(payload)
    assert list(again) == list(sampler)
    assert again.profile == make_profile()
    assert len(sampler.profile.probes) == 500
