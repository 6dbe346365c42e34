"""A process of its own for a device, started with the environment that the device asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from budgetdb.devices.cpu import CpuDevice

_PRELUDE = """
import json, torch
from budgetdb.calibration.outcomes import classify
from budgetdb.devices.choose import choose_device
device, MIB, facts = choose_device("cpu"), 2**20, {}

def block(mib):
    return torch.zeros(mib * MIB, dtype=torch.uint8)
"""


def run_on_cpu(code: str) -> tuple[dict[str, Any], str]:
    """The `facts` that `code` gathered in a process that is started as a worker is, and what it wrote to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", f"{_PRELUDE}\n{code}\nprint(json.dumps(facts))"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **CpuDevice.worker_environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr
