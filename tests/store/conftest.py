from pathlib import Path

import pytest

from budgetdb.store import ProfileStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profiles.db"


@pytest.fixture
def store(path: Path) -> ProfileStore:
    return ProfileStore(path)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUDGETDB_URL", raising=False)
