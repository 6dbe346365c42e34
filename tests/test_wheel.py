"""The wheel, built and used as a user would, away from the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

CHECKOUT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "budgetdb", "migrations", "profiles")


def run(*command: object, cwd: Path, **environment: str) -> str:
    """What a command printed, run without this process's BUDGETDB_ and PYTHON variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BUDGETDB_", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that what earlier builds left in the checkout can't get in."""
    source = tmp_path_factory.mktemp("source")
    for name in filter(lambda name: (CHECKOUT / name).exists(), SOURCES):
        if (CHECKOUT / name).is_dir():
            shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(CHECKOUT / name, source / name)
    output = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", output, source, cwd=output)
    (built,) = output.glob("budgetdb-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment that holds the wheel, and sees the packages it needs but not the checkout."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False, symlinks=True)
    interpreter = directory / "bin" / "python"
    site = Path(run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=directory))
    pip = (sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", "--quiet")
    run(*pip, "--disable-pip-version-check", wheel, cwd=directory)
    # A plain path is appended, after the environment's own packages, and its own .pth files, which lead to the
    # checkout, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return interpreter


def test_the_installed_wheel_is_what_the_environment_imports(python: Path, tmp_path: Path) -> None:
    for package in ("budgetdb", "budgetdb.store", "budgetdb.migrations", "budgetdb.shipped_profiles"):
        place = run(python, "-c", f"import {package} as package; print(*package.__path__)", cwd=tmp_path)
        assert Path(place).is_relative_to(python.parent.parent)


def test_a_database_is_made_from_the_wheel(python: Path, tmp_path: Path) -> None:
    code = """
from budgetdb.store import ProfileStore
store = ProfileStore("profiles.db")
assert store.upgrade().changed
print(store.list(), store.status().state, store.status().revision)
"""
    assert run(python, "-W", "error", "-c", code, cwd=tmp_path) == "[] current 0001"


def test_the_commands_work_from_the_wheel(python: Path, tmp_path: Path) -> None:
    database = tmp_path / "profiles.db"
    for command in (("db", "upgrade"), ("show",)):
        run(python, "-m", "budgetdb.cli", *command, cwd=tmp_path, BUDGETDB_URL=str(database))
    assert database.stat().st_size > 0


def test_the_wheel_holds_what_is_no_python(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert {"budgetdb/py.typed", "budgetdb/migrations/script.py.mako"} <= set(names)
    shipped = {f"budgetdb/shipped_profiles/{file.name}" for file in (CHECKOUT / "profiles").glob("*.json")}
    assert shipped <= set(names)


def packages_of_the_checkout() -> set[str]:
    """Each directory with an `__init__.py`, under the name it is imported by."""
    roots = {directory: package for package, directory in SETUPTOOLS["package-dir"].items()}
    found = set()
    for directory, package in roots.items():
        for init in (CHECKOUT / directory).rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(CHECKOUT / directory).parts]))
    return found


def test_every_package_is_listed_in_pyproject() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_of_the_checkout())
