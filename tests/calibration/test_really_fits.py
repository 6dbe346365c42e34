"""Calibrated under a real limit, then run under the same limit, and held against what is true there."""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from judged import calibrate, default_limit_bytes, evaluate, true_frontier, which_run
from real_limit import ENVIRONMENT, Setting
from small_models import ATTENTION, CONFIGURATIONS, LENGTHS, write_configuration

from budgetdb.profiles import Provenance
from budgetdb.shapes import Shape

# The rest of the grid takes as long again and shows the same code.
ALWAYS = {("bert", "eager")}
GRID = [
    pytest.param(model, attention, marks=() if (model, attention) in ALWAYS else pytest.mark.slow)
    for model in CONFIGURATIONS
    for attention in ATTENTION
]
# Real steps at the limit, in three processes a model.
pytestmark = pytest.mark.timeout(1200)
LEAST_SHARE = 0.90
EVALUATIONS = 3


@pytest.fixture(scope="module")
def limit_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """One for all, as it takes a process to find."""
    return default_limit_bytes(tmp_path_factory.mktemp("limit"))


@pytest.mark.parametrize(("model", "attention"), GRID)
def test_what_was_found_fits_and_is_nearly_all_there_is(
    model: str, attention: str, limit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    setting = Setting(str(write_configuration(model, tmp_path)), attention, limit_bytes)
    database = tmp_path / "profiles.db"
    profile = calibrate(setting, database)
    assert profile.provenance is Provenance.MEASURED
    assert profile.key.attention == attention

    # The true frontier is between n and n / LEAST_SHARE rows exactly when n rows run and one above the latter fails.
    found = [Shape(profile.max_batch_size(length), length) for length in LENGTHS]
    beyond = [Shape(math.floor(shape.batch_size / LEAST_SHARE) + 1, shape.length) for shape in found]
    with ThreadPoolExecutor(max_workers=2) as both:
        truth = both.submit(which_run, setting, [*found, *beyond])
        runs = evaluate(setting, database, profile, seeds=range(EVALUATIONS))
    assert dict(zip(map(str, found), truth.result(), strict=False)) == dict.fromkeys(map(str, found), True)
    assert dict(zip(map(str, beyond), truth.result()[len(found) :], strict=True)) == dict.fromkeys(
        map(str, beyond), False
    )

    assert [run["out_of_memory_at"] for run in runs] == [None] * EVALUATIONS
    for run in runs:
        assert run["full"] >= 12
        assert run["full_lengths"] >= 6


@pytest.mark.slow
def test_the_frontier_that_is_compared_with_is_the_edge(limit_bytes: int, tmp_path: Path) -> None:
    setting = Setting(str(write_configuration("llama", tmp_path)), "eager", limit_bytes)
    truth = true_frontier(setting, [256])
    [rows] = truth["frontier"]
    assert truth["out_of_memory"] >= 1
    assert which_run(setting, [Shape(rows, 256), Shape(rows + 1, 256)]) == [True, False]
