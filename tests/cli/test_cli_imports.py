import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import make_profile

from budgetdb.store import ProfileStore

HEAVY = ("torch", "transformers", "numpy", "alembic")
CODE = f"""
import sys
EXTRA
from budgetdb.cli.program import program
try:
    program.main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {HEAVY} if name in sys.modules])
"""


def heavy_modules(path: Path, *arguments: str, extra: str = "") -> str:
    """The heavy modules that a command has imported when it ends."""
    command = [sys.executable, "-c", CODE.replace("EXTRA", extra), *arguments, "--db", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("command", [["show"], ["show", "ID"], ["show", "--json"], ["db", "status"], ["db", "path"]])
def test_commands_that_import_nothing_heavy(path: Path, store: ProfileStore, command: list[str]) -> None:
    profile = make_profile()
    store.publish(profile)
    assert heavy_modules(path, *(profile.id if part == "ID" else part for part in command)) == "[]"


def test_an_empty_store_needs_nothing_heavy_either(path: Path) -> None:
    assert heavy_modules(path, "show") == "[]"


def test_these_tests_can_fail(path: Path) -> None:
    assert heavy_modules(path, "show", extra="import numpy") == "['numpy']"
    assert heavy_modules(path, "db", "upgrade") == "['alembic']"


def test_help_needs_neither_rich_nor_sqlalchemy() -> None:
    code = """
import sys
from budgetdb.cli.program import program
try:
    program.main(["--help"])
except SystemExit:
    pass
print([name for name in ("rich", "sqlalchemy", "pydantic", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("option", [["--device", "cdua"], ["--attn", "egaer"], ["--workload", "forwrad"]])
def test_a_misspelt_name_is_told_before_torch_is_imported(path: Path, option: list[str]) -> None:
    code = """
import sys
from budgetdb.cli.program import program
try:
    program.main(["calibrate", "bert", *sys.argv[1:]])
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, *option], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
