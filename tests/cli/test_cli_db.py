import json
import sqlite3
from pathlib import Path

import pytest
from cli_run import Program, make_profile

from budgetdb.store import ProfileStore


def test_upgrade_makes_the_database_once(budgetdb: Program, path: Path) -> None:
    assert f"{path}: schema 0001 (before: none)" in budgetdb("db", "upgrade").stdout
    assert path.exists()
    assert "nothing to do" in budgetdb("db", "upgrade").stdout
    done = json.loads(budgetdb("db", "upgrade", "--json").stdout)
    assert done == {"location": str(path), "before": "0001", "after": "0001", "backup": None}


def test_status_of_an_absent_a_filled_and_a_foreign_database(
    budgetdb: Program, store: ProfileStore, path: Path
) -> None:
    assert "absent: it is made by the first `budgetdb calibrate MODEL`" in budgetdb("db", "status").stdout
    assert not path.exists()
    store.publish(make_profile())
    lines = [line.split() for line in budgetdb("db", "status").stdout.splitlines()]
    assert ["profiles", "1"] in lines
    assert ["state", "current"] in lines
    found = json.loads(budgetdb("db", "status", "--json").stdout)
    assert (found["location"], found["state"], found["profiles"]) == (str(path), "current", 1)

    foreign = path.with_name("foreign.db")
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    connection.close()
    assert "belongs to another program" in budgetdb("db", "status", "--db", foreign).stdout
    assert "belongs to another program" in budgetdb.fails("show", "--db", foreign, code=3)
    assert "belongs to another program" in budgetdb.fails("calibrate", "bert", "--db", foreign, code=3)


def test_path(budgetdb: Program, path: Path, tmp_path: Path) -> None:
    assert budgetdb("db", "path").stdout == f"{path}\n"
    other = tmp_path / "other.db"
    assert budgetdb("db", "path", "--db", other).stdout == f"{other}\n"
    assert json.loads(budgetdb("db", "path", "--json").stdout) == {"location": str(path)}
    url = "postgresql+psycopg://ann:secret@host/budget?password=secret"
    assert budgetdb("db", "path", "--db", url).stdout == "postgresql+psycopg://ann:***@host/budget\n"


@pytest.mark.parametrize("command", [["show"], ["db", "status"], ["db", "upgrade"], ["calibrate", "some-model"]])
def test_a_file_that_is_no_database(budgetdb: Program, path: Path, command: list[str]) -> None:
    path.write_text("this is a letter, and no database at all\n" * 50)
    before = path.read_bytes()
    message = budgetdb.fails(*command, code=3)
    assert f"{path} is not a SQLite database" in message
    assert "BUDGETDB_URL" in message
    assert path.read_bytes() == before


@pytest.mark.parametrize("command", [["db", "upgrade"], ["calibrate", "some-model"]])
def test_a_path_that_can_not_be_written(budgetdb: Program, tmp_path: Path, command: list[str]) -> None:
    message = budgetdb.fails(*command, "--db", tmp_path / "missing" / "profiles.db", code=3)
    assert f"directory {tmp_path / 'missing'} is missing" in message
    (tmp_path / "file").touch()
    assert "ot a directory" in budgetdb.fails(*command, "--db", tmp_path / "file" / "profiles.db", code=3)
    assert "is a directory" in budgetdb.fails(*command, "--db", tmp_path, code=3)


def test_a_url_of_another_kind(budgetdb: Program) -> None:
    assert "'mysql' are not supported" in budgetdb.fails("show", "--db", "mysql://host/name", code=2)
    assert "is not the path of a database" in budgetdb.fails("show", "--db", "", code=2)
