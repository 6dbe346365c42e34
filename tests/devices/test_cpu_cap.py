"""The cap of the CPU is real: an allocation beyond it fails, and the process goes on."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from device_process import run_on_cpu

from budgetdb.devices.choose import choose_device
from budgetdb.testing.devices import check_device

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")

LIMIT_MIB, HALF_MIB = 200, 100
# The records of the profiler may take 4 MiB above the cap, and Python's own small blocks take a little of it.
NEAR_MIB = 8


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    code = f"""
import resource
facts["before"] = resource.getrlimit(resource.RLIMIT_DATA)

def fits(mib):
    try:
        block(mib)
    except RuntimeError as error:
        facts["message"], facts["kind"] = str(error), classify(error)
        return False
    return True

def around(mib):
    return [fits(mib - {NEAR_MIB}), fits(mib + {NEAR_MIB}), fits(mib * 10)]

kept = block(50)
with device.capped(device.allocated_bytes() + {LIMIT_MIB} * MIB):
    facts["around"] = [around({LIMIT_MIB}) for _ in range(4)]
    half = torch.ones({HALF_MIB} * MIB, dtype=torch.uint8)
    facts["beside_half"] = around({LIMIT_MIB - HALF_MIB})
    facts["sum"] = int(half[::MIB].sum())
    del half
    facts["after_it"] = around({LIMIT_MIB})
facts["after"] = resource.getrlimit(resource.RLIMIT_DATA)
facts["fits_after"] = fits(2 * {LIMIT_MIB})
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
    assert facts["around"] == [[True, False, False]] * 4


def test_the_process_goes_on(facts: dict[str, Any]) -> None:
    assert facts["sum"] == HALF_MIB
    assert facts["beside_half"] == facts["after_it"] == [True, False, False]


def test_it_lets_go(facts: dict[str, Any]) -> None:
    assert facts["before"] == facts["after"] == facts["after_an_error"]
    assert facts["fits_after"]


def test_it_keeps_the_contract_in_a_process_that_was_not_started_for_it(quick_collector: None) -> None:
    check_device(choose_device("cpu"), block_bytes=32 * 2**20)
