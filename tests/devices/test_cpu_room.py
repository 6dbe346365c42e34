"""What the CPU says of itself and of the room it has."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from device_process import run_on_cpu

from budgetdb.devices.base import BUCKET_BYTES, DeviceInfo
from budgetdb.devices.choose import choose_device
from budgetdb.profiles import Caps

MIB, GIB = 2**20, 2**30
CPU = choose_device("cpu")


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    code = """
device.clean()
for name, limit in (("free", None), ("two", 2048 * MIB), ("three", 3072 * MIB), ("tiny", 1)):
    room = device.room(limit)
    facts[name] = [room.limit_bytes, room.overhead_bytes]
kept = block(300)
facts["two_beside_300"] = [device.room(2048 * MIB).limit_bytes, device.room(2048 * MIB).overhead_bytes]
del kept
facts["two_again"] = [device.room(2048 * MIB).limit_bytes, device.room(2048 * MIB).overhead_bytes]
"""
    return run_on_cpu(code)[0]


def test_the_overhead_is_what_the_process_takes_beside_its_tensors(facts: dict[str, Any]) -> None:
    limit, overhead = facts["two"]
    assert limit + overhead == 2 * GIB
    assert 10 * MIB < overhead < GIB


def test_another_limit_moves_the_room_by_the_difference(facts: dict[str, Any]) -> None:
    assert abs(facts["three"][0] - facts["two"][0] - GIB) < 8 * MIB


def test_what_the_process_holds_in_tensors_is_part_of_its_room(facts: dict[str, Any]) -> None:
    assert abs(facts["two_beside_300"][0] - facts["two"][0]) < 8 * MIB
    assert abs(facts["two_again"][0] - facts["two"][0]) < 8 * MIB


def test_a_limit_below_the_overhead_leaves_nothing(facts: dict[str, Any]) -> None:
    assert facts["tiny"][0] == 0


def test_without_a_limit_it_is_what_the_machine_has_free(facts: dict[str, Any]) -> None:
    assert 0 < facts["free"][0] < psutil.virtual_memory().total


def test_what_it_is() -> None:
    info = CPU.info()
    assert info == CPU.info()
    assert info.name.startswith("CPU ")
    assert len(info.name) > len("CPU ")
    assert 0 < info.total_bytes <= psutil.virtual_memory().total
    assert CPU.caps(heads=12, widest=30_000) == Caps()


def test_headroom_is_a_share_within_reason() -> None:
    assert CPU.default_headroom_bytes(100 * MIB) == 8 * MIB
    assert CPU.default_headroom_bytes(2 * GIB) == int(0.02 * 2 * GIB)
    assert CPU.default_headroom_bytes(1024 * GIB) == GIB


@pytest.mark.parametrize(
    ("total", "key"),
    [
        (80 * GIB, 80 * GIB),
        (80 * GIB + 5 * MIB, 80 * GIB),
        (80 * GIB - 1, 80 * GIB - BUCKET_BYTES),
        (100 * MIB, BUCKET_BYTES),
    ],
)
def test_cards_that_differ_by_a_few_mib_share_a_key(total: int, key: int) -> None:
    assert DeviceInfo(name="card", total_bytes=total).key_bytes == key
