"""Profiles without running a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, LlamaConfig, T5Config

import budgetdb
from budgetdb.calibration.calibrator import CalibrationEvent, Goal
from budgetdb.devices.catalogue import find_card
from budgetdb.devices.simulated import SimulatedCard
from budgetdb.errors import DoesNotFitError, UntraceableError, UsageError
from budgetdb.models.load import outline_config
from budgetdb.models.spec import ModelSpec
from budgetdb.prediction import CARD_ERROR, find_place, predict_everywhere, predict_for
from budgetdb.profiles import Provenance
from budgetdb.shapes import Shape
from budgetdb.tracing.depth import DeepTracer
from budgetdb.workloads.base import parse_workload

sys.path.insert(0, str(Path(__file__).parent / "calibration"))
from tiny import bert, limit_bytes

MIB = 2**20
LLAMA = LlamaConfig(
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    architectures=["LlamaForCausalLM"],
)
DEEP: dict[str, Any] = {
    "llama": LLAMA,
    "bert": BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=7, num_attention_heads=4, vocab_size=99
    ),
    "t5": T5Config(d_model=64, d_ff=128, d_kv=16, num_layers=6, num_heads=4, vocab_size=99, decoder_start_token_id=0),
}


def outline(config: Any, *, dtype: str = "bfloat16", attention: str = "sdpa") -> Any:
    return outline_config(config, ModelSpec(source="made", dtype=dtype, attention=attention))


@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("bert", "sdpa"), ("t5", "sdpa")])
def test_shallow_copies_stand_for_a_deep_model(name: str, attention: str) -> None:
    card, workload = SimulatedCard.named("NVIDIA A100-SXM4-40GB"), parse_workload("forward")
    model = outline(DEEP[name], attention=attention)
    with DeepTracer(model, workload, card.target()) as tracer:
        for shape in (Shape(2, 32), Shape(3, 64)):
            deep, direct = tracer.trace(shape), tracer.whole.trace(shape)
            assert tracer.is_shallow
            assert (deep.peak_bytes, deep.held_bytes) == (direct.peak_bytes, direct.held_bytes)
            assert [event.nbytes > 0 for event in deep.events] == [event.nbytes > 0 for event in direct.events]


def test_a_step_replayed_at_the_frontier_fits_the_simulated_card() -> None:
    card, workload = SimulatedCard.named("Tesla T4"), parse_workload("forward")
    prediction = predict_for(outline(LLAMA), card, Goal(pad_multiple=8), workload=workload)
    profile = prediction.profile
    assert prediction.traced.is_exact
    assert profile.provenance is Provenance.PREDICTED
    assert profile.error_bound == CARD_ERROR
    steps = [
        prediction.traced.step(Shape(point.batch_size, point.length))
        for point in reversed(profile.frontier)
        if point.length >= 128
    ]
    fits, allocator = card.fits(
        steps, resident_bytes=profile.resident_bytes, hold="previous", limit_bytes=profile.limit_bytes
    )
    assert fits
    assert allocator.peak_reserved_bytes <= profile.limit_bytes
    # and the budget is no gift: a third more rows would not fit
    larger = [prediction.traced.step(Shape(2 * profile.max_batch_size(512), 512))]
    if profile.caps.clip(10**9, 512) > 2 * profile.max_batch_size(512):
        assert not card.fits(
            larger, resident_bytes=profile.resident_bytes, hold="previous", limit_bytes=profile.limit_bytes
        )[0]


def test_more_memory_gives_more_and_a_limit_gives_less() -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "pad_multiple": 8, "attention": "eager"}
    small = budgetdb.predict(LLAMA, memory_bytes=2 * 2**30, capability="8.0", **options)
    large = budgetdb.predict(LLAMA, memory_bytes=4 * 2**30, capability="8.0", **options)
    limited = budgetdb.predict(LLAMA, memory_bytes=4 * 2**30, capability="8.0", memory_limit_bytes=2 * 2**30, **options)
    assert 0 < small.token_budget < large.token_budget
    assert limited.token_budget == small.token_budget
    assert small.usable_bytes < 2 * 2**30 - small.overhead_bytes


def test_a_card_is_named_described_or_refused() -> None:
    assert find_place("H100").info().name == find_card("H100").name
    with pytest.raises(UsageError, match=r"Did you mean .*--memory 48GiB --capability 8.9"):
        find_place("NVIDIA H100 80GB HBN3")
    with pytest.raises(UsageError, match="Give both"):
        find_place(None, memory_bytes=2**30)
    with pytest.raises(UsageError, match="compute capability"):
        find_place(None, memory_bytes=2**30, capability="new")


def test_what_does_not_fit_says_what_it_needs() -> None:
    with pytest.raises(DoesNotFitError, match="for its weights"):
        budgetdb.predict(LLAMA, memory_bytes=400 * MIB, capability="8.0", dtype="float32")


def test_options_of_building_are_not_for_live_models() -> None:
    with pytest.raises(UsageError, match="live model"):
        budgetdb.predict(bert(), dtype="float16")


def test_control_flow_on_activations_is_named() -> None:
    class Branching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(10, 4)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(input_ids)
            return hidden * 2 if hidden.sum() > 0 else hidden

    with pytest.raises(UntraceableError, match="Branching"):
        budgetdb.predict(Branching(), device="H100", max_length=64)


def test_the_catalogue_is_predicted_as_a_whole() -> None:
    cards = [find_card("Tesla T4"), find_card("H100"), find_card("NVIDIA L4")]
    rows = predict_everywhere(
        outline(LLAMA), Goal(pad_multiple=8, max_length=256), workload=parse_workload("embed"), cards=cards
    )
    budgets = []
    for card, found in rows:
        assert not isinstance(found, Exception)
        alone = predict_for(
            outline(LLAMA), SimulatedCard(card), Goal(pad_multiple=8, max_length=256), workload=parse_workload("embed")
        )
        # the table simulates the allocator over fewer batches
        assert found.profile.token_budget == pytest.approx(alone.profile.token_budget, rel=0.05)
        assert found.traced.moments == alone.traced.moments
        budgets.append(found.profile.token_budget)
    assert budgets[0] <= budgets[1]  # where 2**31 elements decide, memory does not


def test_the_factory_predicts_when_asked_and_calibrates_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUDGETDB_MEMORY_LIMIT", str(limit_bytes(60)))
    model, lengths, store = bert(), [3, 60, 17, 40] * 20, budgetdb.ProfileStore(tmp_path / "profiles.db")
    events: list[CalibrationEvent] = []
    batches = budgetdb.make_batch_sampler(
        model, lengths, pad_multiple=8, on_miss="predict", store=store, on_event=events.append
    )
    assert batches.profile.provenance is Provenance.PREDICTED
    assert [event.stage for event in events] == ["note"]
    assert sorted(row for batch in batches for row in batch) == list(range(80))

    # what is predicted and stored does not keep a calibration from being made
    store.publish(batches.profile)
    kept = budgetdb.make_batch_sampler(model, lengths, pad_multiple=8, on_miss="error", store=store)
    assert kept.profile.provenance is Provenance.PREDICTED
    measured = budgetdb.make_batch_sampler(model, lengths, pad_multiple=8, store=store)
    assert measured.profile.provenance is Provenance.MEASURED
    assert store.find(measured.profile.key) is not None
    assert [profile.provenance for profile in store.list()] == [Provenance.MEASURED]


def test_a_cpu_is_predicted_to_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUDGETDB_MEMORY_LIMIT", str(limit_bytes(60)))
    model = bert("eager")
    predicted = budgetdb.predict(model, pad_multiple=8)
    measured = budgetdb.calibrate(model, pad_multiple=8)
    for point in measured.frontier:
        shape = Shape(max(point.batch_size, 1), point.length)
        above = measured.peak_bytes(shape) - measured.resident_bytes
        assert abs(predicted.peak_bytes(shape) - measured.peak_bytes(shape)) <= 0.02 * above
