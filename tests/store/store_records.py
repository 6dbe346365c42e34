"""Records to store, and Python in another process to store them from."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from budgetdb.profiles import (
    Bound,
    CostRecord,
    Environment,
    FrontierPoint,
    Outcome,
    Probe,
    Profile,
    ProfileKey,
    Provenance,
)

ENVIRONMENT = Environment(torch="2.13.0", transformers="5.24.0", platform="linux", device_total_bytes=2**31)
KEY = ProfileKey(
    model_hash="ab" * 32,
    device_name="NVIDIA H100 80GB HBM3",
    device_bytes=80 * 2**30,
    dtype="bfloat16",
    attention="sdpa",
    pad_multiple=8,
    workload="forward(hold=previous)",
)
MADE_AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def make_key(**changes: Any) -> ProfileKey:
    return KEY.model_copy(update=changes)


def make_probe(batch_size: int = 32, length: int = 128) -> Probe:
    return Probe(
        batch_size=batch_size,
        length=length,
        outcome=Outcome.FITS,
        peak_allocated_bytes=123_456_789,
        peak_reserved_bytes=130_023_424,
        elapsed_s=0.1 + 0.2,
        message="a text that no rounding survives: 0.30000000000000004, é, \U0001f600",
    )


def make_profile(key: ProfileKey = KEY, *, age_s: int = 0, **changes: Any) -> Profile:
    profile = Profile(
        key=key,
        environment=ENVIRONMENT,
        model_name="bert-base",
        cost=CostRecord(kind="quadratic", parameters={"c": 1e9, "a": 1 / 3, "b": 0.1, "q": 2.5e-7}),
        limit_bytes=2**31,
        headroom_bytes=2**28,
        resident_bytes=437_000_000,
        max_length=512,
        bound=Bound.MAX_LENGTH,
        token_budget=65_535,
        frontier=(FrontierPoint(length=512, batch_size=127, peak_bytes=2**30, bound=Bound.MEMORY, probed=True),),
        probes=(make_probe(), make_probe(1, 512)),
        provenance=Provenance.MEASURED,
        created_at=MADE_AT - timedelta(seconds=age_s),
    )
    return profile.model_copy(update=changes)


_PRELUDE = """
import os, sys
from store_records import *
from budgetdb.errors import *
from budgetdb.store import ProfileStore
"""


def start_python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    """A Python process that runs `code`, with this module's names and `ProfileStore` at hand."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def run_python(code: str, *arguments: object) -> str:
    """What `code` printed in a process of its own, which must end well."""
    process = start_python(code, *arguments)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return output.strip()
