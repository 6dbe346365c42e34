import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_run import Program, make_profile

from budgetdb.errors import DeviceError
from budgetdb.store import ProfileStore


def findings(budgetdb: Program, *, code: int = 0) -> dict[tuple[str, str], dict[str, Any]]:
    found = json.loads(budgetdb("doctor", "--json", code=code).stdout)
    assert all(one["next_step"] or one["level"] in ("ok", "note") for one in found)
    return {(one["area"], one["subject"]): one for one in found}


def test_a_sound_machine(budgetdb: Program, store: ProfileStore) -> None:
    store.publish(make_profile())
    found = findings(budgetdb)
    assert {
        ("store", "location"),
        ("store", "file system"),
        ("store", "permissions"),
        ("store", "locks"),
        ("store", "space"),
        ("store", "schema"),
        ("store", "journal"),
        ("store", "integrity"),
        ("store", "checksums"),
        ("torch", "build"),
        ("devices", "cpu"),
        ("plugins", "registered"),
    } <= set(found)
    assert {one["level"] for one in found.values()} == {"ok"}
    assert "1 profiles, all as they were written" in budgetdb("doctor").stdout


def test_nothing_there_yet(budgetdb: Program, path: Path) -> None:
    assert findings(budgetdb)["store", "schema"]["level"] == "note"
    assert not path.exists()


def test_a_flipped_bit_that_sqlite_does_not_see(budgetdb: Program, store: ProfileStore, path: Path) -> None:
    store.publish(make_profile())
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"token_budget":65535', b'"token_budget":65531', 1))
    found = findings(budgetdb, code=3)
    assert found["store", "integrity"]["level"] == "ok"
    assert found["store", "checksums"]["level"] == "problem"
    assert f"budgetdb rm {make_profile().id}" in found["store", "checksums"]["next_step"]


def test_a_damaged_page(budgetdb: Program, store: ProfileStore, path: Path) -> None:
    store.publish(make_profile())
    with closing(sqlite3.connect(path)) as connection:
        [page] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'ix_probes_key_digest'").fetchone()
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    content = bytearray(path.read_bytes())
    content[(page - 1) * size : page * size] = b"\xff" * size
    path.write_bytes(content)
    assert "problem" in {one["level"] for (area, _), one in findings(budgetdb, code=3).items() if area == "store"}


@pytest.mark.parametrize("content", [b"this is a text\n" * 100, b"SQLite format 3\0" + b"\0" * 4000])
def test_no_database_and_the_rest_is_looked_at_all_the_same(budgetdb: Program, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found = findings(budgetdb, code=3)
    assert ("devices", "cpu") in found
    assert path.read_bytes() == content


def test_another_programs_file_and_a_newer_one(budgetdb: Program, store: ProfileStore, path: Path) -> None:
    store.upgrade()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    assert "0099" in findings(budgetdb, code=3)["store", "schema"]["found"]
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA application_id = 7")
    assert "another program" in findings(budgetdb, code=3)["store", "schema"]["found"]


def test_permissions_and_the_write_ahead_log(budgetdb: Program, store: ProfileStore, path: Path) -> None:
    store.publish(make_profile())
    path.chmod(0o644)
    assert "chmod 600" in findings(budgetdb)["store", "permissions"]["next_step"]
    path.chmod(0o666)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        found = findings(budgetdb)
    assert found["store", "permissions"]["level"] == found["store", "journal"]["level"] == "warning"


def test_a_device_that_breaks_hides_nothing(budgetdb: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    import budgetdb.devices.cpu as cpu

    def breaks(self: object, memory_limit_bytes: int | None = None) -> None:
        raise DeviceError("it fell off the bus", next_step="Reboot")

    monkeypatch.setattr(cpu.CpuDevice, "room", breaks)
    found = findings(budgetdb, code=5)
    broken = found["devices", "devices"]
    assert (broken["found"], broken["next_step"]) == ("it fell off the bus", "Reboot")
    assert ("plugins", "registered") in found
