"""`budgetdb predict`: budgets for cards that are not here."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_run import Program

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    directory = tmp_path / "small-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return directory


def test_a_card_by_its_short_name(budgetdb: Program, config: Path) -> None:
    text = budgetdb("predict", config, "--device", "t4", "--pad-multiple", 8, "--attn", "eager").stdout
    assert "is predicted: no step was run" in text
    for line in ("model          small-llama", "device         Tesla T4", "exact, from", "error bound    5%"):
        assert line in text
    assert "peak in" in text
    assert "No profiles" in budgetdb("show").stdout


def test_json_has_the_profile_and_what_it_rests_on(budgetdb: Program, config: Path) -> None:
    found = json.loads(budgetdb("predict", config, "--device", "L4", "--pad-multiple", 8, "--json").stdout)
    assert found["provenance"] == "predicted"
    assert found["error_bound"] == 0.05
    assert found["prediction"]["exact"] is True
    assert found["token_budget"] > 0
    assert found["prediction"]["fragmentation_bytes"] >= found["prediction"]["fragmentation_bytes_expandable_segments"]


def test_a_described_card_and_storing(budgetdb: Program, config: Path) -> None:
    described = ("--memory", "4GiB", "--capability", "8.9", "--max-length", 64, "--pad-multiple", 8)
    text = budgetdb("predict", config, *described, "--store").stdout
    assert "It is stored." in text
    shown = budgetdb("show").stdout
    assert "predicted" in shown
    [profile] = json.loads(budgetdb("show", "--json").stdout)
    assert profile["max_length"] == 64
    assert "error bound" in budgetdb("show", profile["id"]).stdout


def test_the_whole_catalogue(budgetdb: Program, config: Path) -> None:
    rows = json.loads(
        budgetdb("predict", config, "--all-devices", "--max-length", 64, "--pad-multiple", 8, "--json").stdout
    )
    assert len(rows) >= 40
    assert {"Tesla T4", "NVIDIA H100 80GB HBM3"} <= {row["card"] for row in rows}
    assert all(row["token_budget"] > 0 for row in rows)


def test_what_can_not_be_is_said_in_one_line(budgetdb: Program, config: Path) -> None:
    assert "--memory 48GiB --capability 8.9" in budgetdb.fails("predict", config, "--device", "H1000", code=2)
    assert "Give both" in budgetdb.fails("predict", config, "--memory", "4GiB", code=2)
    assert "stands for" in budgetdb.fails("predict", config, "--device", "A100", code=2)
    assert "for its weights" in budgetdb.fails(
        "predict", config, "--memory", "500MiB", "--capability", "8.0", "--memory-limit", "300MiB", code=7
    )
    refused = budgetdb("predict", config, "--all-devices", "--device", "T4", code=2)
    assert "--all-devices goes with none of" in refused.stderr
