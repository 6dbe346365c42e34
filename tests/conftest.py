"""What holds for every test: no settings from outside, a database of its own, and what to skip."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported anywhere: the machine's cores are shared by the processes of pytest-xdist.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Timing is benchmarked, not tested.
settings.register_profile("budgetdb", deadline=None)
settings.load_profile("budgetdb")


def pytest_collection_finish() -> None:
    """Collections, and counts of live tensors, pass over what imports made: torch's objects are a million."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        skip(items, "slow", "takes minutes: run with --slow")
    if any(item.get_closest_marker("gpu") for item in items) and not has_accelerator():
        skip(items, "gpu", "this machine has no accelerator")


def skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


@pytest.fixture(autouse=True)
def _own_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's database and settings are out of reach, for the processes that a test starts, too."""
    for name in list(os.environ):
        if name.upper().startswith("BUDGETDB_") and not name.startswith("BUDGETDB_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("BUDGETDB_URL", str(tmp_path / "default-profiles.db"))


@pytest.fixture
def quick_collector() -> None:
    """Passes over what earlier tests left, too."""
    gc.collect()
    gc.freeze()
