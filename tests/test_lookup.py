"""The factory: find a profile or make one, then build the sampler."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import budgetdb
from budgetdb.calibration.calibrator import CalibrationEvent
from budgetdb.errors import (
    BelowFloorError,
    DoesNotFitError,
    LengthsError,
    ModelNotFoundError,
    ProfileNotFoundError,
    StoreError,
    UnknownNameError,
    UsageError,
)
from budgetdb.shapes import Shape

sys.path.insert(0, str(Path(__file__).parent / "calibration"))
from tiny import bert, classifier, limit_bytes

LENGTHS = [3, 60, 17, 40, 8, 33, 64, 5] * 50


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    # What is imported when a store is first written would be missing from the limit.
    budgetdb.ProfileStore(f"sqlite:///{tmp_path}/other.db").upgrade()
    assert budgetdb.make_batch_sampler
    limit = limit_bytes(40)
    monkeypatch.setenv("BUDGETDB_MEMORY_LIMIT", str(limit))
    return limit


@pytest.mark.usefixtures("limited")
def test_the_whole_job() -> None:
    model, events = bert(), list[CalibrationEvent]()
    batches = budgetdb.make_batch_sampler(model, LENGTHS, pad_multiple=8, on_event=events.append)
    assert "stored" in [event.stage for event in events]

    # every batch is within the profile, and so is its real peak
    profile = batches.profile
    for rows in batches:
        longest = budgetdb.padded_length(max(LENGTHS[row] for row in rows), 8)
        assert len(rows) <= profile.max_batch_size(longest)
        assert profile.peak_bytes(Shape(len(rows), longest)) <= profile.usable_bytes

    samples = [torch.full((length,), row % 500) for row, length in enumerate(LENGTHS)]
    loader = DataLoader(samples, batch_sampler=batches, collate_fn=lambda rows: [int(row[0]) for row in rows])
    outputs = [torch.tensor(batch) for batch in loader]
    assert batches.restore_order(outputs).tolist() == [row % 500 for row in range(len(LENGTHS))]

    events.clear()
    again = budgetdb.make_batch_sampler(model, np.array(LENGTHS), pad_multiple=8, on_event=events.append)
    assert [event.stage for event in events] == ["known"]
    assert sorted(index for batch in again for index in batch) == list(range(len(LENGTHS)))

    found = budgetdb.find_profile(model, pad_multiple=8)
    assert found is not None
    assert found.id == profile.id
    assert budgetdb.find_profile(model, pad_multiple=1, match="exact") is None
    other = budgetdb.find_profile(model, pad_multiple=1)
    assert other is not None
    assert other.served is not None
    assert other.served.differences == ("pad multiple 8, here 1",)
    assert budgetdb.find_profile(bert("eager"), pad_multiple=8) is None
    assert budgetdb.find_profile(model, pad_multiple=8, workload="embed") is None


@pytest.mark.usefixtures("limited")
def test_longest_batches_come_first() -> None:
    batches = budgetdb.make_batch_sampler(bert(), LENGTHS, pad_multiple=8)
    longest = [max(LENGTHS[row] for row in rows) for rows in batches]
    assert longest == sorted(longest, reverse=True)
    assert not hasattr(batches, "batch_size")


def test_a_store_that_can_not_be_used_does_not_end_an_evaluation(
    limited: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_text("this is no database" * 100)
    store, model = budgetdb.ProfileStore(damaged), bert()
    with caplog.at_level(logging.WARNING, logger="budgetdb"):
        batches = budgetdb.make_batch_sampler(model, LENGTHS, pad_multiple=8, store=store)
    assert sorted(index for batch in batches for index in batch) == list(range(len(LENGTHS)))
    assert [record.message for record in caplog.records if "going on without stored profiles" in record.message]
    assert caplog.text.count("going on without stored profiles") == 1
    with pytest.raises(StoreError):
        budgetdb.calibrate(model, memory_limit_bytes=limited, store=store)
    assert damaged.read_text().startswith("this is no database")


@pytest.mark.usefixtures("limited")
def test_a_callable_that_is_no_transformers_model() -> None:
    class Bag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(100, 64)
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.layer(self.embedding(input_ids)).mean(1)

    batches = budgetdb.make_batch_sampler(Bag(), [64, 3, 20] * 10)
    assert batches.profile.key.attention == "none"
    assert sum(map(len, batches)) == 30


@pytest.mark.usefixtures("limited")
def test_outputs_that_are_kept_to_the_end_take_room() -> None:
    model, workload = bert(), "forward[hold=all]"
    few = budgetdb.make_batch_sampler(model, [64] * 1000, workload=workload)
    # 64 numbers of 4 bytes for each of 64 tokens a row
    more = budgetdb.make_batch_sampler(model, [64] * 1300, workload=workload)
    assert few.profile.limit_bytes - more.profile.limit_bytes >= 300 * 64 * 64 * 4
    assert max(map(len, more)) < max(map(len, few))
    with pytest.raises(DoesNotFitError, match="the outputs of the whole run take"):
        budgetdb.make_batch_sampler(model, [64] * 10_000, workload=workload)


class TestTokenBudget:
    """`calibrate_token_budget` does what its model did, and says what it can't."""

    @pytest.mark.usefixtures("limited")
    def test_a_sampler_of_that_budget_stays_within_the_profile(self) -> None:
        model = bert()
        budget = budgetdb.calibrate_token_budget(
            model=model, lengths=LENGTHS, pad_multiple=8, extra_tokens_per_sample=4, tolerance=7
        )
        [profile] = budgetdb.ProfileStore().list()
        sampler = budgetdb.TokenBudgetBatchSampler(LENGTHS, budget, pad_multiple=8, extra_tokens_per_sample=4)
        for rows in sampler:
            longest = budgetdb.padded_length(max(LENGTHS[row] for row in rows), 8) + 4
            assert profile.peak_bytes(Shape(len(rows), longest)) <= profile.usable_bytes

    def test_no_lengths(self) -> None:
        with pytest.raises(ValueError, match="no lengths"):
            budgetdb.calibrate_token_budget(model=bert(), lengths=[])

    def test_a_pad_multiple_below_one(self) -> None:
        with pytest.raises(ValueError, match="pad_multiple must be at least 1, got 0"):
            budgetdb.calibrate_token_budget(model=bert(), lengths=[3], pad_multiple=0)

    @pytest.mark.usefixtures("limited")
    def test_a_budget_below_the_floor(self) -> None:
        with pytest.raises(RuntimeError, match="below the floor of 1000000000") as caught:
            budgetdb.calibrate_token_budget(model=classifier(), lengths=[3], floor=10**9)
        assert isinstance(caught.value, BelowFloorError)

    def test_nothing_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BUDGETDB_MEMORY_LIMIT", "1")
        with pytest.raises(RuntimeError) as caught:
            budgetdb.calibrate_token_budget(model=bert(), lengths=[3])
        assert isinstance(caught.value, DoesNotFitError)


class TestBadInput:
    """Each mistake is one line that names what is wrong and what to do."""

    def test_an_unknown_choice_on_a_miss(self) -> None:
        with pytest.raises(UnknownNameError, match="Did you mean 'calibrate'"):
            budgetdb.make_batch_sampler(bert(), [3], on_miss="calibrat")

    def test_no_profile(self) -> None:
        with pytest.raises(ProfileNotFoundError, match=r"no profile of BertModel .* Run `budgetdb.calibrate"):
            budgetdb.make_batch_sampler(bert(), [3], on_miss="error")

    def test_samples_that_are_longer_than_the_model_takes(self) -> None:
        with pytest.raises(LengthsError, match="takes 300 tokens once it is padded, and BertModel takes 256"):
            budgetdb.make_batch_sampler(bert(), [300, 2])

    @pytest.mark.parametrize("lengths", [[0, 0], [-1, 3], ["a"]])
    def test_lengths_that_make_no_sense(self, lengths: list[object]) -> None:
        with pytest.raises(LengthsError):
            budgetdb.make_batch_sampler(bert(), lengths)

    def test_what_is_no_model(self) -> None:
        with pytest.raises(UsageError, match="a int is not"):
            budgetdb.make_batch_sampler(3, [3])

    def test_a_name_that_is_no_model(self) -> None:
        with pytest.raises(ModelNotFoundError):
            budgetdb.calibrate("/no/such/directory", device="cpu")

    @pytest.mark.parametrize(
        ("options", "hint"),
        [
            ({"workload": "embedd"}, "Did you mean 'embed'"),
            ({"device": "cupa"}, "Did you mean"),
            ({"workload": "forward[hold=previos]"}, "Did you mean 'previous'"),
        ],
    )
    def test_misspelt_names(self, options: dict[str, str], hint: str) -> None:
        with pytest.raises(UnknownNameError, match=hint):
            budgetdb.calibrate(bert(), **options)

    def test_options_of_building_do_not_apply_to_a_live_model(self) -> None:
        with pytest.raises(UsageError, match="dtype='float16' can't be applied to a live model"):
            budgetdb.calibrate(bert(), dtype="float16")
