"""A database of the test's own, and the program as a user runs it."""

from pathlib import Path

import pytest
from cli_run import Program

from budgetdb.store import ProfileStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profiles.db"


@pytest.fixture
def store(path: Path) -> ProfileStore:
    return ProfileStore(path)


@pytest.fixture
def budgetdb(path: Path) -> Program:
    return Program(path)
