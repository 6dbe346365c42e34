"""The cap of the CPU is real: an allocation beyond it fails, and the process goes on."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from device_process import run_on_cpu

from budgetdb.devices.choose import choose_device
from budgetdb.testing.devices import check_device

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")

LIMIT_MIB = 200
# What the profiler's records may take above the limit, and what Python's own small blocks take of it.
OVER_MIB, UNDER_MIB = 4, 4


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    code = f"""
import resource
facts["before"] = resource.getrlimit(resource.RLIMIT_DATA)
device.clean()

def fits(mib):
    try:
        block(mib)
    except RuntimeError as error:
        facts["message"], facts["kind"] = str(error), classify(error)
        return False
    return True

def largest(low=0, high=400):
    # As the prober does before each probe. A block within a MiB of the cap can be refused to mmap and granted to brk;
    # the heap keeps it until it is trimmed.
    device.clean()
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

kept = block(50)
with device.capped(device.allocated_bytes() + {LIMIT_MIB} * MIB):
    facts["largest"] = [largest() for _ in range(4)]
    half = torch.ones({LIMIT_MIB // 2} * MIB, dtype=torch.uint8)
    facts["largest_beside_half"] = largest()
    facts["sum"] = int(half[::MIB].sum())
    del half
    facts["largest_after_it"] = largest()
facts["after"] = resource.getrlimit(resource.RLIMIT_DATA)
facts["fits_after"] = fits(400)
try:
    with device.capped(10 * MIB):
        block(100)
except RuntimeError:
    pass
facts["after_an_error"] = resource.getrlimit(resource.RLIMIT_DATA)
"""
    return run_on_cpu(code)[0]


def test_an_allocation_beyond_it_fails_as_on_a_full_machine(facts: dict[str, Any]) -> None:
    assert "can't allocate memory" in facts["message"]
    assert facts["kind"] == "oom"


def test_it_holds_to_a_few_mib_and_each_time_the_same(facts: dict[str, Any]) -> None:
    assert max(facts["largest"]) - min(facts["largest"]) <= 1
    assert LIMIT_MIB - UNDER_MIB <= facts["largest"][0] <= LIMIT_MIB + OVER_MIB


def test_the_process_goes_on(facts: dict[str, Any]) -> None:
    assert facts["sum"] == LIMIT_MIB // 2
    assert abs(facts["largest_beside_half"] - facts["largest"][0] + LIMIT_MIB // 2) <= 1
    assert abs(facts["largest_after_it"] - facts["largest"][0]) <= 1


def test_it_lets_go(facts: dict[str, Any]) -> None:
    assert facts["before"] == facts["after"] == facts["after_an_error"]
    assert facts["fits_after"]


def test_it_keeps_the_contract_in_a_process_that_was_not_started_for_it() -> None:
    check_device(choose_device("cpu"), block_bytes=32 * 2**20)
