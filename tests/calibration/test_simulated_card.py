"""Calibration against a card's own allocator, simulated: fragmentation, retries and what a trace does not see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from transformers import BertConfig, LlamaConfig, PretrainedConfig

from budgetdb.calibration.calibrator import Goal, run_calibration
from budgetdb.devices.catalogue import custom_card
from budgetdb.devices.simulated import SimulatedCard
from budgetdb.errors import DoesNotFitError
from budgetdb.models.load import outline_config
from budgetdb.models.spec import ModelSpec
from budgetdb.prediction import guess_for
from budgetdb.profiles import Profile
from budgetdb.shapes import Shape
from budgetdb.testing.sessions import SimulatedSession
from budgetdb.tracing.allocator_settings import AllocatorSettings
from budgetdb.workloads.base import parse_workload

MIB = 2**20
LONGEST = 512
LLAMA = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LONGEST,
    architectures=["LlamaForCausalLM"],
)
BERT = BertConfig(
    hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4, architectures=["BertModel"]
)


@dataclass(frozen=True)
class Setting:
    config: PretrainedConfig
    attention: str
    expandable: bool = False
    unseen_per_token: int = 0
    unseen_constant: int = 0
    traced: bool = True

    def session(self) -> SimulatedSession:
        spec = ModelSpec(source=self.config.model_type, weights="random", attention=self.attention, dtype="bfloat16")
        card = SimulatedCard(custom_card(2048 * MIB, "8.0"), AllocatorSettings(expandable_segments=self.expandable))
        return SimulatedSession(
            outline_config(self.config, spec), card, parse_workload("forward"), unseen_bytes=self.unseen_bytes
        )

    def unseen_bytes(self, shape: Shape) -> int:
        return self.unseen_constant + self.unseen_per_token * shape.tokens


def calibrated(setting: Setting) -> Profile:
    session, goal = setting.session(), Goal(max_length=LONGEST, pad_multiple=8)
    subject = session.describe()
    guess = guess_for(session, subject, goal) if setting.traced else None
    with session:
        return run_calibration(
            session, subject, goal, record=lambda probe: None, listen=lambda event: None, guess=guess
        )


@pytest.mark.parametrize(
    ("setting", "probes", "failures"),
    [
        pytest.param(Setting(LLAMA, "sdpa"), 4, 0, id="llama sdpa"),
        pytest.param(Setting(BERT, "eager"), 4, 0, id="bert eager"),
        pytest.param(
            Setting(LLAMA, "sdpa", expandable=True), 4, 0, id="llama sdpa, expandable", marks=pytest.mark.slow
        ),
        pytest.param(Setting(LLAMA, "sdpa", unseen_per_token=300, unseen_constant=32 * MIB), 4, 1, id="llama, unseen"),
    ],
)
def test_a_traced_card_takes_few_probes_and_every_batch_of_a_mixed_run_fits(
    setting: Setting, probes: int, failures: int
) -> None:
    profile = calibrated(setting)
    assert profile.cost.kind == "calibrated"
    assert len(profile.probes) <= probes
    assert sum(not probe.fits and probe.peak_allocated_bytes is None for probe in profile.probes) <= failures
    assert all(mixed_run(setting, profile, share=1.0))
    # Nor is much given away: what is kept free is for any order of lengths, and this is one.
    assert not all(mixed_run(setting, profile, share=1.3))


def mixed_run(setting: Setting, profile: Profile, *, share: float) -> Iterator[bool]:
    """Whether each batch of a run over many lengths fits, in one process and with nothing given back in between."""
    with setting.session() as session:
        session.prepare(longest=LONGEST, memory_limit_bytes=None, headroom_bytes=None)
        for length in range(LONGEST, 0, -40):
            batch = Shape(int(share * profile.max_batch_size(length)), length)
            yield session.probe(batch, purpose="check").fits


def test_without_a_trace_probes_alone_do() -> None:
    profile = calibrated(Setting(BERT, "eager", traced=False))
    assert profile.cost.kind == "quadratic"
    assert len(profile.probes) <= 15
    assert any(probe.purpose == "check" and not probe.fits for probe in profile.probes)  # the warm allocator told
    assert profile.max_batch_size(LONGEST) >= 100


def test_weights_that_fill_the_card_are_said_before_a_probe() -> None:
    session = Setting(LLAMA, "sdpa").session()
    with pytest.raises(DoesNotFitError, match="weights take"):
        session.prepare(longest=LONGEST, memory_limit_bytes=310 * MIB, headroom_bytes=0)
