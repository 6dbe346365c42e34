"""`budgetdb plan`: the batches of a run before it is run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_run import Program

from budgetdb.shapes import padded_length

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
LENGTHS = [5, 250, 17, 40, 8, 33, 64, 200] * 40


@pytest.fixture
def config(tmp_path: Path) -> Path:
    directory = tmp_path / "small-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return directory


def test_a_plan_by_prediction_beside_fixed_sizes_and_over_ranks(budgetdb: Program, config: Path) -> None:
    file = config / "lengths.npy"
    np.save(file, np.array(LENGTHS))
    asked = ("plan", config, "--lengths", file, "--device", "L4", "--pad-multiple", 8, "--memory-limit", "600MiB")
    found = json.loads(budgetdb(*asked, "--world-size", 3, "--json").stdout)
    ours, *fixed = found["plans"]
    assert found["profile"]["provenance"] == "predicted"
    assert (found["samples"], found["tokens"], found["oversize"]) == (len(LENGTHS), sum(LENGTHS), [])
    assert ours["fits"]
    padded = sum(padded_length(length, 8) for length in LENGTHS)
    best_share = 1 - sum(LENGTHS) / padded
    assert all(plan["padding_share"] >= best_share for plan in found["plans"])
    by_name = {plan["plan"]: plan for plan in fixed}
    assert by_name["sorted, 32 rows"]["batches"] == len(LENGTHS) // 32
    assert by_name["unsorted, 32 rows"]["largest_batch"] == [32, 256]
    assert by_name["unsorted, 32 rows"]["padding_share"] > by_name["sorted, 32 rows"]["padding_share"]
    assert len({rank["batches"] for rank in found["ranks"]}) == 1
    assert sum(rank["samples"] for rank in found["ranks"]) == len(LENGTHS)

    text = budgetdb(*asked, "--world-size", 3).stdout
    for words in ("times    not known", "unsorted, 128 rows", "rank  batches  samples"):
        assert words in text
    assert "No profiles" in budgetdb("show").stdout


def test_files_that_hold_no_lengths_are_one_line(budgetdb: Program, config: Path) -> None:
    file = config / "lengths.txt"
    file.write_text("3\nseven\n")
    line = budgetdb.fails("plan", config, "--lengths", file, "--device", "L4", code=2)
    assert "line 2 is 'seven', and no number of tokens. Give --tokenizer NAME" in line
