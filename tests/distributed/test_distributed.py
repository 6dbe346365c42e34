"""Jobs of real processes that met by gloo: one asks, all decide alike."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANKS = Path(__file__).with_name("ranks.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def by_tcp() -> str:
    """As torchrun has ranks meet: rank 0 keeps the job's store."""
    return f"tcp://127.0.0.1:{free_port()}"


def run(scenario: str, *, world_size: int, meeting: str) -> list[dict[str, Any]]:
    """What each rank printed; a rank that printed nothing is left out."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANKS), scenario, str(rank), str(world_size), meeting],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if scenario != "silent":
        assert [process.returncode for process in processes] == [0] * world_size, [error for _, error in ended]
    return [json.loads(line) for output, _ in ended for line in output.splitlines() if line.startswith('{"rank"')]


def test_all_ranks_decide_alike() -> None:
    told = run("agree", world_size=3, meeting=by_tcp())
    found = [rank["found"] for rank in told]

    assert [one["one card"] for one in found] == [
        ["A", 100, "store"],
        ["A", 100, "rank 0 (store)"],
        ["A", 100, "rank 0 (store)"],
    ]
    assert [one["two cards"][:2] for one in found] == [["A", 200], ["B", 201], ["A", 200]]
    assert [one["the least"] for one in found] == [8, 9, 8]
    assert [one["slow"][:2] for one in found] == [["A", 7]] * 3
    [failure] = {tuple(one["one card fails"]) for one in found}
    assert failure == ("DoesNotFitError", "no row fits. Free memory", 7)
    assert {tuple(one["all fail"]) for one in found} == {failure}
    assert found[0]["not ours"] == "its own"
    assert {tuple(one["not ours"]) for one in found[1:]} == {
        ("WorkerError", "rank 0 failed to find the budget: ZeroDivisionError: a reason. See that rank's log", 6)
    }
    # each asked only where it was the lowest rank of its hardware
    assert told[0]["asked"] == ["A", "A", "A", "A", "failed", "failed"]
    assert told[1]["asked"] == ["B", "failed"]
    assert told[2]["asked"] == []


@pytest.mark.parametrize(
    ("by_file", "said"),
    [(True, "rank 0, which was finding the budget, fell silent"), (False, "the job's key-value store is gone")],
)
def test_who_waits_for_a_rank_that_died_is_told(tmp_path: Path, by_file: bool, said: str) -> None:
    [waiter] = run("silent", world_size=2, meeting=f"file://{tmp_path}/meeting" if by_file else by_tcp())
    kind, message, _ = waiter["found"]["waiter"]
    assert kind == "WorkerError"
    assert said in message


@pytest.mark.slow
def test_ranks_of_one_card_plan_the_same_batches_by_the_least_that_is_free() -> None:
    told = run("sampler", world_size=2, meeting=by_tcp())
    (limit, batches, probed, source), (other_limit, other_batches, other_probed, other_source) = (
        rank["found"]["sampler"] for rank in told
    )
    assert limit == other_limit
    assert batches == other_batches
    assert (probed, other_probed) == (True, False)
    assert (source, other_source) == ("calibrated", "rank 0 (calibrated)")
