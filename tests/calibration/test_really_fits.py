"""Calibrated under a real limit, then run under the same limit, and held against what is true there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from judged import calibrate, evaluate, limited_setting, true_frontier
from real_limit import ENVIRONMENT
from small_models import ATTENTION, CONFIGURATIONS, LENGTHS, write_configuration

from budgetdb.profiles import Provenance

# The rest of the grid takes as long again and shows the same code.
ALWAYS = {("bert", "eager"), ("llama", "sdpa"), ("t5", "eager"), ("albert", "sdpa")}
GRID = [
    pytest.param(model, attention, marks=() if (model, attention) in ALWAYS else pytest.mark.slow)
    for model in CONFIGURATIONS
    for attention in ATTENTION
]
# The frontier is bisected to within this share of itself: the limits below are wider.
RESOLUTION = 0.01
EVALUATIONS = 3


@pytest.mark.parametrize(("model", "attention"), GRID)
def test_what_was_found_fits_and_is_nearly_all_there_is(
    model: str, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    setting = limited_setting(write_configuration(model, tmp_path), attention)
    database = tmp_path / "profiles.db"
    profile = calibrate(setting, database)
    assert profile.provenance is Provenance.MEASURED
    assert profile.key.attention == attention

    truth = true_frontier(setting, resolution=RESOLUTION)
    rows = [profile.max_batch_size(length) for length in LENGTHS]
    for length, found, fits, fails in zip(LENGTHS, rows, truth["fits"], truth["fails"], strict=True):
        assert 0.90 * (fails - 1) <= found <= fits, f"{found} of {fits} to {fails - 1} rows at length {length}"

    runs = evaluate(setting, database, profile, seeds=range(EVALUATIONS))
    assert [run["out_of_memory_at"] for run in runs] == [None] * EVALUATIONS
    for run in runs:
        assert run["full"] >= 12
        assert run["full_lengths"] >= 6


def test_the_limit_is_real(tmp_path: Path) -> None:
    """A batch of one row more than what ran does not run: the truth that is compared with comes from failures."""
    truth = true_frontier(limited_setting(write_configuration("bert", tmp_path), "sdpa"), [256])
    assert truth["fails"] == [truth["fits"][0] + 1]
    assert truth["out_of_memory"] >= 1
