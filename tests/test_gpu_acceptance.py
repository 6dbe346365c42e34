"""The acceptance of a device, on the CPU and in small; and what of a card's side of it needs no card."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from gpu_acceptance import main
from gpu_acceptance_events import compared, segments_for, without
from gpu_acceptance_history import read_entries
from gpu_acceptance_models import CLASSES, SIZES, WORKLOADS, configuration, names_for, write_case
from gpu_acceptance_record import Bench
from gpu_acceptance_traced import foretold

from budgetdb.devices.cpu import CpuDevice
from budgetdb.devices.info import DeviceInfo
from budgetdb.shapes import Shape
from budgetdb.tracing.allocator_settings import AllocatorSettings

MIB = 2**20


def run(out: Path, *, sections: str = "1,2,3,4", models: str = "llama") -> int:
    """The script as a user starts it, on the CPU."""
    fixed = ["--device", "cpu", "--memory-limit", "700MiB", "--size", "tiny"]
    return main([*fixed, "--models", models, "--sections", sections, "--out", str(out)])


def document(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "acceptance.json").read_text())
    return read


def test_what_is_expected_of_a_cpu_is_true_of_it_and_nothing_runs_twice(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    first = document(tmp_path)
    results = {name: section["result"] for name, section in first["sections"].items()}
    assert list(results) == ["facts", "events", "peaks", "scaled"]
    assert all(not results[name].get("left_out") for name in results)
    assert results["facts"]["device"]["total_bytes"] > 0
    assert [row["is_equal_but_for"] for row in results["events"]["rows"]] == [True]
    for row in results["peaks"]["rows"]:
        assert row["is_exact"]
        assert {probe["hold"] for probe in row["probes"]} == {"previous", "none"}
        for probe in row["probes"]:
            assert probe["traced_bytes"] == pytest.approx(probe["measured_allocated_bytes"], rel=0.01)
            assert probe["replayed_bytes"] == probe["traced_bytes"]
    assert {row["mask"] for row in results["scaled"]["rows"]} == set(WORKLOADS)
    assert all(abs(error) < 0.01 for row in results["scaled"]["rows"] for error in row["peak_errors"])
    tables = (tmp_path / "acceptance.md").read_text()
    assert "## 3. Peaks" in tables
    assert "llama sdpa" in tables

    assert run(tmp_path) == 0
    assert document(tmp_path) == first


def test_a_section_that_fails_is_recorded_and_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, sections="scaled,facts") == 1
    sections = document(tmp_path)["sections"]
    assert sections["facts"]["error"] is None
    assert "section 3" in sections["scaled"]["error"]
    assert "failed: KeyError" in capsys.readouterr().out
    assert run(tmp_path, sections="4") == 1
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, models="bert")
    assert "another models: give another --out, or --afresh" in capsys.readouterr().err


@pytest.mark.parametrize("name", CLASSES)
def test_every_model_is_what_its_configuration_says(name: str, tmp_path: Path) -> None:
    case = write_case(name, SIZES["tiny"], dtype="bfloat16", directory=tmp_path)
    model: Any = case.load(torch.device("cpu"))
    assert type(model).__name__ == CLASSES[name][0]
    assert model.config._attn_implementation == case.attention
    assert configuration(name, SIZES["large"])["vocab_size"] > model.config.vocab_size
    assert len(names_for("bfloat16")) == len(names_for("float32")) == 8


class CardOnPaper(CpuDevice):
    """A card as far as tracing for it asks."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.torch_device = torch.device("cuda", 0)

    @override
    def info(self) -> DeviceInfo:
        return DeviceInfo(name="a card", total_bytes=16 * 2**30, compute_capability="9.0")


def test_on_a_card_rounding_and_segments_come_on_top(tmp_path: Path) -> None:
    size = SIZES["tiny"]
    case = write_case("bert", size, dtype="bfloat16", directory=tmp_path)
    bench = Bench(CardOnPaper(), size, (case,), "bfloat16", 48 * MIB, 700 * MIB, tmp_path)
    shape = Shape(3, 40)
    with foretold(case, WORKLOADS["padded"](), bench, longest=size.lengths[-1]) as told:
        expected = told.probe(shape, hold="previous")
        step = told.step(Shape(160, 128))
        needed = told.sequence([step, step]).reserved_bytes
        fits = [told.sequence([step, step], limit_bytes=limit).fits for limit in (needed, needed // 2)]
    assert told.traced.resident_bytes < told.traced.cost.peak_bytes(shape) == expected.live_bytes
    assert expected.live_bytes < expected.allocated_bytes < expected.reserved_bytes
    assert fits == [True, False]


def test_a_history_is_read_and_the_allocator_takes_the_same_segments() -> None:
    entries = [
        {"action": "free_completed", "addr": 7, "size": 512},  # born before the record
        {"action": "segment_alloc", "addr": 0, "size": 2 * MIB},
        {"action": "alloc", "addr": 0, "size": 100},
        {"action": "segment_alloc", "addr": 100 * MIB, "size": 20 * MIB},
        {"action": "alloc", "addr": 100 * MIB, "size": 3 * MIB},
        {"action": "free_requested", "addr": 0, "size": 100},
        {"action": "free_completed", "addr": 0, "size": 100},
        {"action": "alloc", "addr": 0, "size": 200},
        {"action": "segment_free", "addr": 50 * MIB, "size": 4 * MIB},
    ]
    events, segments = read_entries(entries)
    assert events == [(0, 100), (1, 3 * MIB), (0, -100), (2, 200)]
    assert segments == [2 * MIB, 20 * MIB, -4 * MIB]
    assert segments_for(events, AllocatorSettings()) == segments[:2]


def test_a_step_is_compared_event_by_event() -> None:
    traced = [(0, 10), (1, 20), (0, -10), (2, 30), (1, -20)]
    real = [(0, 10), (1, 20), (9, 5), (9, -5), (0, -10), (2, 30), (1, -20), (2, -30)]
    row = compared(traced, real)
    assert (row["is_equal"], row["is_equal_but_for"], row["first_difference"]) == (False, True, None)
    assert (row["births_only_real"], row["births_only_traced"]) == ([[5, 1]], [])
    assert compared(traced, [*real[:5], (2, 31), (1, -20), (2, -31)])["first_difference"] == 2
    assert without([1, 2, 1, 3], [2, 1, 3]) == [2, 1, 3]
