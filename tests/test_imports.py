from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import budgetdb

CHECKOUT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "numpy", "sqlalchemy", "alembic", "pydantic", "rich", "click")


def imported_by(code: str) -> set[str]:
    """The top-level modules of a fresh process that ran `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=CHECKOUT)
    return set(json.loads(done.stdout))


def test_importing_budgetdb_imports_nothing_heavy() -> None:
    found = imported_by("import budgetdb; dir(budgetdb); budgetdb.__all__")
    assert "budgetdb" in found
    assert found.isdisjoint(HEAVY)


def test_values_do_not_import_torch() -> None:
    code = "import budgetdb; budgetdb.Shape, budgetdb.Profile, budgetdb.padded_length, budgetdb.BudgetDBError"
    assert imported_by(code).isdisjoint(("torch", "transformers", "sqlalchemy"))


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import budgetdb; budgetdb.Profile", "pydantic"),
        ("import budgetdb; budgetdb.ProfileStore", "sqlalchemy"),
        ("import budgetdb.costs.frontier", "numpy"),
        ("import budgetdb; budgetdb.TokenBudgetBatchSampler", "torch"),
    ],
)
def test_these_tests_can_fail(code: str, heavy: str) -> None:
    assert heavy in imported_by(code)


@pytest.mark.parametrize("module", ["budgetdb.costs.linear", "budgetdb.plugins", "budgetdb.testing.costs"])
def test_cost_models_and_their_check_do_not_import_torch(module: str) -> None:
    assert imported_by(f"import {module}").isdisjoint(("torch", "transformers"))


def test_listing_plugins_does_not_import_torch() -> None:
    code = "from budgetdb.plugins import REGISTRIES; [registry.names() for registry in REGISTRIES]"
    assert imported_by(code).isdisjoint(("torch", "transformers", "numpy"))


def test_the_public_names_are_sorted_and_there() -> None:
    assert budgetdb.__all__ == sorted(budgetdb.__all__)
    assert len(budgetdb.__all__) == len(set(budgetdb.__all__))
    for name in budgetdb.__all__:
        assert getattr(budgetdb, name).__name__ == name
    assert set(budgetdb.__all__) <= set(dir(budgetdb))


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'budgetdb' has no attribute 'make_batch_sampling'"):
        budgetdb.make_batch_sampling  # noqa: B018  # what is tested


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    """What `lint-imports` says of this checkout by the pyproject.toml in `directory`."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=environment,
    )


@pytest.mark.skipif(
    not (CHECKOUT / "budgetdb" / "cli" / "__init__.py").exists(), reason="the top layer, budgetdb.cli, is not there"
)
def test_arrows_run_downwards_only() -> None:
    done = lint_imports(CHECKOUT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_test_of_the_arrows_can_fail(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        """
[tool.importlinter]
root_package = "budgetdb"

[[tool.importlinter.contracts]]
name = "errors on top"
type = "layers"
layers = ["budgetdb.errors", "budgetdb.profiles"]
"""
    )
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "errors on top BROKEN" in done.stdout
