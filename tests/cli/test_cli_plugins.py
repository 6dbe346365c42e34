import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from cli_run import Program


def install(directory: Path, name: str, entry_points: str, **modules: str) -> None:
    """A distribution as an installer leaves it."""
    information = directory / f"{name}-1.5.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (information / "entry_points.txt").write_text(entry_points)
    for module, source in modules.items():
        (directory / f"{module}.py").write_text(source)


def test_what_comes_with_budgetdb(budgetdb: Program) -> None:
    rows = [line.split() for line in budgetdb("plugins").stdout.splitlines()]
    assert ["budgetdb.costs", "quadratic", "budgetdb", "0.1.0"] in rows
    assert ["budgetdb.workloads", "embed", "budgetdb", "0.1.0"] in rows
    listed = json.loads(budgetdb("plugins", "--json").stdout)
    assert {"group": "budgetdb.devices", "name": "cpu", "origin": "budgetdb", "version": "0.1.0", "error": None} in (
        listed
    )


BROKEN = "[budgetdb.costs]\nring = broken_ring:Ring\n"
GOOD = "[budgetdb.attention]\nring_attention = good_names:KIND\n"
SLOW = "[budgetdb.attention]\nslow = slow_names:KIND\n"


def test_a_broken_plugin_is_listed_with_its_distribution_and_the_others_go_on(
    budgetdb: Program, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    install(site, "broken-ring", BROKEN, broken_ring="import nothing_")
    install(site, "good-names", GOOD, good_names="KIND = 'linear'")
    output = budgetdb.process("plugins", PYTHONPATH=str(site)).stdout
    [broken] = [line for line in output.splitlines() if "broken-ring" in line]
    assert "ModuleNotFoundError: No module named 'nothing_'" in broken
    assert "1.5" in broken
    [good] = [line.split() for line in output.splitlines() if "good-names" in line]
    assert good == ["budgetdb.attention", "ring_attention", "good-names", "1.5"]
    without = budgetdb.process("plugins", PYTHONPATH=str(site), BUDGETDB_PLUGINS="none").stdout
    assert "ring" not in without


def test_an_interrupt_ends_with_130(tmp_path: Path) -> None:
    install(tmp_path, "slow-names", SLOW, slow_names="import time; print('imported', flush=True); time.sleep(100)")
    with subprocess.Popen(
        [sys.executable, "-m", "budgetdb.cli", "plugins"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, "", "Error: interrupted\n")
