"""The calibration cases from public bug reports: each names the right outcome, and stands for a kind of fault.

Three of them are tested elsewhere: a found size that fails in the real run (test_really_fits), a killed calibration
and a second run (test_calibrate_by_name), as they need processes of their own.
"""

from __future__ import annotations

import logging

import pytest
import torch
from tiny import POSITIONS, bert, classifier, limit_bytes
from transformers import MixtralConfig, MixtralForCausalLM

import budgetdb
from budgetdb.calibration.calibrator import CalibrationEvent
from budgetdb.errors import DoesNotFitError, LengthsError, ProfileNotFoundError, StepFailedError
from budgetdb.profiles import Bound

ROOM_MIB = 48


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> int:
    """A memory limit that leaves little room, set in the environment too."""
    limit = limit_bytes(ROOM_MIB)
    monkeypatch.setenv("BUDGETDB_MEMORY_LIMIT", str(limit))
    return limit


@pytest.mark.usefixtures("limited")
def test_case_1_the_data_runs_out_first() -> None:
    model = bert()
    budget = budgetdb.calibrate_token_budget(model=model, lengths=[10] * 100)
    [profile] = budgetdb.ProfileStore().list()
    assert profile.bound is Bound.MEMORY
    assert budget > 10 * 100
    # the device's own: as many tokens as the same model takes when there is plenty of data
    assert budgetdb.calibrate_token_budget(model=model, lengths=[10] * 10_000) == pytest.approx(budget, rel=0.1)


@pytest.mark.usefixtures("limited")
def test_case_2_sequence_classification_has_one_label_a_row() -> None:
    budget = budgetdb.calibrate_token_budget(model=classifier(), lengths=[5, 60, 64], pad_multiple=8)
    [profile] = budgetdb.ProfileStore().list()
    assert profile.key.workload.startswith("loss[")
    # a little more or less is free by now
    assert budget == pytest.approx(profile.token_budget, rel=0.2)


def test_case_3_more_positions_are_asked_for_than_there_are(limited: int) -> None:
    events: list[CalibrationEvent] = []
    profile = budgetdb.calibrate(bert(), max_length=4096, memory_limit_bytes=limited, on_event=events.append)
    assert profile.max_length == POSITIONS
    assert profile.bound is Bound.MAX_LENGTH
    assert any(str(POSITIONS) in event.message for event in events if event.stage == "note")


def test_case_5_what_is_stored_as_measured_has_run(limited: int) -> None:
    profile = budgetdb.calibrate(bert("eager"), max_length=64, memory_limit_bytes=limited)
    probed = [point for point in profile.frontier if point.probed]
    assert len(probed) >= 3
    for point in probed:
        ran = [probe.batch_size for probe in profile.probes if probe.fits and probe.length == point.length]
        assert max(ran) >= 0.95 * point.batch_size


def test_case_6_the_model_does_not_fit_at_all() -> None:
    with pytest.raises(DoesNotFitError, match="weights take") as caught:
        budgetdb.calibrate(bert(), memory_limit_bytes=1)
    assert caught.value.exit_code == 7
    assert budgetdb.ProfileStore().list() == []


class ShapeBug(torch.nn.Module):
    """Fails for every batch of more than one row, as a wrong reshape does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 8)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.embedding(input_ids).reshape(1, -1, 8)[:, : input_ids.shape[1]] @ torch.ones(7, 8)


def test_case_7_a_shape_bug_is_not_an_oom(limited: int) -> None:
    model = ShapeBug()
    with pytest.raises(StepFailedError, match=r"cannot be multiplied|must match"):
        budgetdb.calibrate(model, max_length=32, memory_limit_bytes=limited)
    assert model.calls == 1
    assert budgetdb.ProfileStore().list() == []


def test_case_8_a_live_model_is_probed_once(limited: int) -> None:
    model, calls = bert(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    budgetdb.calibrate(model, max_length=64, memory_limit_bytes=limited)
    assert calls
    calls.clear()
    budgetdb.calibrate(model, max_length=64, memory_limit_bytes=limited)
    assert calls == []


def test_case_10_someone_elses_memory(limited: int, caplog: pytest.LogCaptureFixture) -> None:
    model, lengths = bert(), [64] * 5000
    whole = budgetdb.make_batch_sampler(model, lengths, memory_limit_bytes=limited)
    mine = torch.zeros(limited // 50, dtype=torch.uint8)  # held by this process, but not by the model
    with caplog.at_level(logging.WARNING, logger="budgetdb"):
        less = budgetdb.make_batch_sampler(model, lengths, memory_limit_bytes=limited)
    assert mine.numel() > 0
    assert max(map(len, less)) < max(map(len, whole))
    assert "batches shrink to fit" in caplog.text
    assert sorted(index for batch in less for index in batch) == list(range(5000))


def test_case_11_a_short_bound_is_not_used_for_long_samples(limited: int) -> None:
    model = bert("eager")
    short = budgetdb.calibrate(model, max_length=32, memory_limit_bytes=limited)
    assert short.max_length == 32
    with pytest.raises(ProfileNotFoundError, match="up to length 200"):
        budgetdb.make_batch_sampler(model, [200, 10], memory_limit_bytes=limited, on_miss="error")
    batches = budgetdb.make_batch_sampler(model, [200, 10], memory_limit_bytes=limited)
    assert batches.profile.max_length >= 200
    with pytest.raises(LengthsError, match="256"):
        budgetdb.make_batch_sampler(model, [POSITIONS + 1], memory_limit_bytes=limited)


def test_case_12_a_mixture_of_experts_is_flagged_and_probed_with_different_tokens(limited: int) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    model, seen = MixtralForCausalLM(config).eval(), []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0].unique())))
    profile = budgetdb.calibrate(model, max_length=32, memory_limit_bytes=limited)
    assert "mixture_of_experts" in profile.flags
    assert max(seen) > 100
