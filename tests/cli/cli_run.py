"""The program run on a database, in this process or in one of its own, and records to show."""

import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from budgetdb.cli.program import program
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

MADE_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@dataclass(frozen=True)
class Program:
    """Commands on the database at `path`, which `BUDGETDB_URL` names."""

    path: Path

    def __call__(self, *arguments: object, code: int = 0) -> Result:
        """Run a command in this process; its output is no terminal."""
        result = CliRunner(env={"BUDGETDB_URL": str(self.path)}).invoke(program, [str(part) for part in arguments])
        assert result.exit_code == code, result.output
        return result

    def fails(self, *arguments: object, code: int) -> str:
        """The one line on stderr of a command that fails with `code` and says nothing else."""
        result = self(*arguments, code=code)
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1, result.stderr
        assert result.stderr.startswith("Error: ")
        return result.stderr

    def process(self, *arguments: object, code: int = 0, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "budgetdb.cli", *map(str, arguments)],
            env={**os.environ, "BUDGETDB_URL": str(self.path), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done


def make_key(**changes: Any) -> ProfileKey:
    key = ProfileKey(
        model_hash="ab" * 32,
        device_name="NVIDIA H100 80GB HBM3",
        device_bytes=80 * 2**30,
        dtype="bfloat16",
        attention="sdpa",
        pad_multiple=8,
        workload="forward[hold=previous]",
    )
    return key.model_copy(update=changes)


def make_profile(key: ProfileKey | None = None, *, age_s: int = 0, **changes: Any) -> Profile:
    fits = Probe(
        batch_size=1270,
        length=64,
        outcome=Outcome.FITS,
        peak_allocated_bytes=123_000_000,
        peak_reserved_bytes=130_023_424,
        elapsed_s=0.25,
        cap_bytes=7 * 2**28,
    )
    failed = Probe(batch_size=140, length=512, outcome=Outcome.OOM, message="CUDA out of memory")
    profile = Profile(
        key=key or make_key(),
        environment=Environment(torch="2.13.0", transformers="5.24.0", runtime="12.9", device_total_bytes=80 * 2**30),
        model_name="bert-base",
        cost=CostRecord(kind="linear", parameters={"c": 1e9, "a": 12_345.5}),
        limit_bytes=2**31,
        headroom_bytes=2**28,
        overhead_bytes=400 * 2**20,
        resident_bytes=437_000_000,
        max_length=512,
        bound=Bound.MAX_LENGTH,
        token_budget=65_535,
        frontier=tuple(
            FrontierPoint(
                length=length,
                batch_size=65_536 // length,
                peak_bytes=2**30,
                bound=Bound.MEMORY,
                probed=length in (64, 512),
            )
            for length in (8, 16, 32, 64, 128, 256, 512)
        ),
        probes=(fits, failed),
        provenance=Provenance.MEASURED,
        created_at=MADE_AT - timedelta(seconds=age_s),
    )
    return profile.model_copy(update=changes)
