"""Files that are broken, locked, full or out of bounds: one line that says which, and nothing lost (STORE 2.5)."""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from store_records import ENVIRONMENT, KEY, make_key, make_probe, make_profile, run_python

from budgetdb.errors import (
    ProfileNotFoundError,
    StoreCorruptError,
    StoreError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from budgetdb.store import ProfileStore, engine
from budgetdb.store.engine import Database
from budgetdb.store.faults import told_plainly
from budgetdb.store.location import locate

USES: dict[str, Callable[[ProfileStore], object]] = {
    "find": lambda store: store.find(KEY),
    "list": lambda store: store.list(),
    "get": lambda store: store.get("abc"),
    "unfinished_probes": lambda store: store.unfinished_probes(KEY, ENVIRONMENT),
    "publish": lambda store: store.publish(make_profile()),
    "add_probe": lambda store: store.add_probe(KEY, ENVIRONMENT, make_probe()),
    "discard_probes": lambda store: store.discard_probes(KEY),
    "status": lambda store: store.status(),
    "upgrade": lambda store: store.upgrade(),
}
READS = ("find", "list", "get", "unfinished_probes", "status")
WRITES = ("publish", "add_probe", "upgrade")


def check_told(error: pytest.ExceptionInfo[StoreError], path: Path) -> None:
    """One line, with the path, the next thing to do, and no trace of the driver's own words."""
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    assert "BUDGETDB_URL" in message
    assert error.value.next_step
    assert error.value.__suppress_context__
    for foreign in ("sqlalche.me", "[SQL:", "sqlite3.", "SELECT", "INSERT"):
        assert foreign not in message


@pytest.mark.parametrize("use", USES)
def test_a_directory(tmp_path: Path, use: str) -> None:
    with pytest.raises(StoreUnavailableError, match=r"^cannot open database .*: it is a directory\. ") as error:
        USES[use](ProfileStore(tmp_path))
    check_told(error, tmp_path)


@pytest.mark.parametrize("use", WRITES)
def test_a_missing_directory(tmp_path: Path, use: str) -> None:
    path = tmp_path / "missing" / "profiles.db"
    with pytest.raises(StoreUnavailableError, match=rf": directory {path.parent} is missing\. ") as error:
        USES[use](ProfileStore(path))
    check_told(error, path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("use", WRITES)
def test_a_file_where_a_directory_should_be(tmp_path: Path, use: str) -> None:
    path = tmp_path / "file" / "profiles.db"
    path.parent.write_text("")
    with pytest.raises(StoreUnavailableError, match=r"^cannot create database .*: Not a directory\. ") as error:
        USES[use](ProfileStore(path))
    check_told(error, path)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("content", [b"hello", b"profiles: none\n" * 400, b"\0" * 8192], ids=["short", "long", "zeros"])
def test_a_text_file(store: ProfileStore, path: Path, content: bytes, use: str) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreCorruptError, match=r"is not a SQLite database, .* Move it away \(mv ") as error:
        USES[use](store)
    check_told(error, path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("use", sorted({*USES} - {"discard_probes", "upgrade", "status"}))
@pytest.mark.parametrize("kept", [50, 4096, 0.5])
def test_a_truncated_file(store: ProfileStore, path: Path, kept: float, use: str) -> None:
    for pad_multiple in range(1, 9):
        store.publish(make_profile(make_key(pad_multiple=pad_multiple)))
    size = path.stat().st_size
    os.truncate(path, int(kept if kept > 1 else size * kept))
    before = path.read_bytes()
    with pytest.raises(StoreCorruptError, match=r"(is damaged|is not a SQLite database).* Move it away \(mv ") as error:
        USES[use](store)
    check_told(error, path)
    assert path.read_bytes() == before


def test_every_flipped_bit_of_a_payload_is_caught(
    store: ProfileStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = make_profile()
    store.publish(profile)
    whole = path.read_bytes()
    payload = profile.canonical_json().encode()
    start = whole.index(payload)
    places = range(0, len(payload), 3)
    for place in places:
        flipped = bytearray(whole)
        flipped[start + place] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert ProfileStore(path).find(KEY) is None, f"bit {place % 8} of byte {place}"
    assert len(caplog.records) == len(places)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_anywhere_gives_the_profile_or_a_miss_or_our_error(tmp_path: Path, data: st.DataObject) -> None:
    sound, path = tmp_path / "sound.db", tmp_path / "flipped.db"
    if not sound.exists():
        ProfileStore(sound).publish(make_profile())
        ProfileStore(sound).add_probe(KEY, ENVIRONMENT, make_probe())
    content = bytearray(sound.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 2000))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    store = ProfileStore(path)
    try:
        assert store.find(KEY) in (None, make_profile())
        assert store.list() in ([], [make_profile()])
        assert store.unfinished_probes(KEY, ENVIRONMENT) in ([], [make_probe()])
    except StoreError as error:
        assert "\n" not in str(error)  # noqa: PT017 (an error is one of three right outcomes)
    finally:
        for sidecar in tmp_path.glob("flipped.db-*"):  # a flipped header may ask for a write-ahead log
            sidecar.unlink()


def damage_payload(path: Path, table: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {table} SET payload = replace(payload, '9', '8')")  # noqa: S608 (one of ours)


def test_a_damaged_profile_is_reported_once_and_calibrating_again_replaces_it(
    store: ProfileStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile, other = make_profile(), make_profile(make_key(pad_multiple=64))
    store.publish(profile)
    damage_payload(path, "profiles")
    store.publish(other)
    for _ in range(3):
        assert store.find(KEY) is None
        assert store.list() == [other]
    assert [record.getMessage() for record in caplog.records] == [
        f"profile {profile.id} in {path} is ignored: its checksum does not hold"
    ]
    with pytest.raises(StoreCorruptError, match=rf"profile {profile.id} in .* can't be read: its checksum"):
        store.get(profile.id)
    store.publish(profile)
    assert store.find(KEY) == profile


@pytest.mark.parametrize("column", ["sha256", "payload", "key_digest"])
def test_a_value_that_is_no_text_any_more_is_a_miss(store: ProfileStore, path: Path, column: str) -> None:
    store.publish(make_profile())
    store.publish(make_profile(make_key(pad_multiple=64), age_s=1))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE profiles SET {column} = x'00ff' WHERE pad_multiple = 64")  # noqa: S608 (ours)
    assert store.list() == [make_profile()]
    with pytest.raises(ProfileNotFoundError, match=r"no profile 'zz'"):
        store.get("zz")


@pytest.mark.parametrize("use", ["find", "publish", "status"])
def test_a_schema_whose_text_is_damaged(store: ProfileStore, path: Path, use: str) -> None:
    store.publish(make_profile())
    content = bytearray(path.read_bytes())
    content[content.index(b"CREATE TABLE profiles") + 3] ^= 0x80
    path.write_bytes(content)
    with pytest.raises(StoreCorruptError, match=r" is damaged\. Move it away \(mv ") as error:
        USES[use](store)
    check_told(error, path)


def test_a_damaged_probe_is_left_out(store: ProfileStore, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.add_probe(KEY, ENVIRONMENT, make_probe(8))
    damage_payload(path, "probes")
    store.add_probe(KEY, ENVIRONMENT, make_probe(16))
    assert store.unfinished_probes(KEY, ENVIRONMENT) == [make_probe(16)]
    assert f"probe 1 in {path} is ignored: its checksum does not hold" in caplog.text


def test_a_profile_of_another_version_is_a_miss(
    store: ProfileStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from hashlib import sha256

    store.publish(make_profile())
    payload = make_profile().canonical_json()[:-1] + ',"colour":"blue"}'
    with closing(sqlite3.connect(path)) as connection, connection:
        values = (payload, sha256(payload.encode()).hexdigest())
        connection.execute("UPDATE profiles SET payload = ?, sha256 = ?", values)
    assert store.find(KEY) is None
    assert "another version of budgetdb wrote it (field colour)" in caplog.text


def test_a_profile_under_the_wrong_digest_is_a_miss(
    store: ProfileStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.publish(make_profile())
    other = make_key(pad_multiple=64)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE profiles SET key_digest = ?", (other.digest,))
    assert store.find(other) is None
    assert "it is stored under another key's digest" in caplog.text


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_READER_WAITS_S", 0.05)
    monkeypatch.setattr(engine, "_WRITER_WAITS_S", 0.05)


@pytest.mark.usefixtures("_short_waits")
@pytest.mark.parametrize("use", ["find", "publish", "status", "upgrade"])
def test_a_locked_database(store: ProfileStore, path: Path, use: str) -> None:
    ProfileStore(path).publish(make_profile())
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailableError, match="is locked by another process, or its file system") as error:
            USES[use](store)
    check_told(error, path)
    assert store.find(KEY) == make_profile()


def test_a_write_that_the_file_size_limit_refuses(path: Path) -> None:
    ProfileStore(path).publish(make_profile())
    code = """
import resource
path = sys.argv[1]
store = ProfileStore(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path), os.path.getsize(path)))
try:
    for pad_multiple in range(1, 100):
        store.publish(make_profile(make_key(pad_multiple=pad_multiple)))
except StoreReadOnlyError as error:
    print(error)
assert store.find(make_key(pad_multiple=1))
"""
    assert "took no more: the disk is full, or a quota or file size limit is reached. Free some" in run_python(
        code, path
    )
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert ProfileStore(path).find(KEY) == make_profile()


def test_a_full_database(store: ProfileStore, path: Path) -> None:
    store.publish(make_profile())
    database = Database(locate(path))
    with (  # noqa: PT012 (the context managers are what is tested)
        pytest.raises(StoreReadOnlyError, match="took no more: the disk is full") as error,
        told_plainly(database.location),
        database.write() as connection,
    ):
        connection.execute(text("PRAGMA max_page_count = 1"))
        connection.execute(text("UPDATE profiles SET payload = :payload"), {"payload": "x" * 100_000})
    check_told(error, path)
    assert store.find(KEY) == make_profile()


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter; pytest's own is closed to others."""
    directory = Path(tempfile.mkdtemp(prefix="budgetdb-test-"))
    directory.chmod(0o755)
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


# Root may read and write everything, so the process becomes nobody; what it imports lazily it must import before.
AS_NOBODY = """
import sqlalchemy.dialects.sqlite, tempfile, alembic.command, difflib
with tempfile.TemporaryDirectory() as scratch:
    ProfileStore(scratch + "/profiles.db").publish(make_profile())
    ProfileStore(scratch + "/profiles.db").find(KEY)
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
store = ProfileStore(sys.argv[1])
def told(use):
    try:
        return use()
    except StoreError as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.mark.parametrize(("file_mode", "directory_mode"), [(0o444, 0o555), (0o444, 0o755), (0o666, 0o555)])
def test_a_read_only_database_serves_lookups_and_refuses_writes(
    open_directory: Path, file_mode: int, directory_mode: int
) -> None:
    path = open_directory / "profiles.db"
    ProfileStore(path).publish(make_profile())
    path.chmod(file_mode)
    open_directory.chmod(directory_mode)
    code = """
assert store.find(KEY) == make_profile()
assert store.status().profiles == 1
assert store.upgrade().changed is False
print(told(lambda: store.publish(make_profile(token_budget=1))))
print(told(lambda: store.add_probe(KEY, ENVIRONMENT, make_probe())))
assert store.find(KEY) == make_profile()
"""
    told = run_python(AS_NOBODY + code, path).splitlines()
    assert len(told) == 2
    for line in told:
        assert line.startswith(f"StoreReadOnlyError: database {path} is read-only here: what it holds is used, nothing")


def test_a_database_that_may_not_be_read(open_directory: Path) -> None:
    path = open_directory / "profiles.db"
    ProfileStore(path).publish(make_profile())
    path.chmod(0)
    told = run_python(AS_NOBODY + "print(told(store.list))", path)
    assert told.startswith(f"StoreUnavailableError: cannot open database {path}: permission denied (uid ")
    assert ", mode 0000, owner" in told


def test_a_directory_that_may_not_be_entered(open_directory: Path) -> None:
    path = open_directory / "closed" / "profiles.db"
    path.parent.mkdir()
    path.parent.chmod(0)
    told = run_python(AS_NOBODY + "print(told(store.list))", path)
    assert told.startswith(f"StoreUnavailableError: cannot open database {path}: permission denied (uid ")
    path.parent.chmod(0o755)


def test_a_directory_where_no_file_may_be_made(open_directory: Path) -> None:
    path = open_directory / "profiles.db"
    open_directory.chmod(0o555)
    told = run_python(AS_NOBODY + "print(told(lambda: store.publish(make_profile())))", path)
    assert told.startswith(
        f"StoreReadOnlyError: cannot create database {path}: Permission denied. Correct that, or set"
    )
