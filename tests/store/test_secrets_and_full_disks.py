"""A password appears nowhere; a full disk costs the storing and nothing else; broken files cost one line."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path

import pytest
from store_records import KEY, make_key, make_profile, run_python

from budgetdb.errors import StoreReadOnlyError
from budgetdb.store import ProfileStore

SENTINEL = "S3ntinel"
URLS = [
    f"postgresql+psycopg://ann:{SENTINEL}@127.0.0.1:1/budget",
    f"postgresql+psycopg://ann@127.0.0.1:1/budget?password={SENTINEL}",
    f"postgresql+psycopg://ann@/budget?host=127.0.0.1&port=1&password={SENTINEL}",
    f"postgresql+psycopg://ann:{SENTINEL}%40x@127.0.0.1:1/budget?passfile=/{SENTINEL}",
    f"postgresql+psycopg://ann:a@{SENTINEL}@127.0.0.1:1/budget",
    f"postgresql+psycopg://ann:{SENTINEL}/x@127.0.0.1:1/budget",
    f"postgresql+psycopg://ann:{SENTINEL}@127.0.0.1:port/budget",
    f"postgresql+psycopg://ann:{SENTINEL}@127.0.0.1:1/budget?sslmode={SENTINEL}",
    f"postgresql+nodriver://ann:{SENTINEL}@127.0.0.1:1/budget",
    f"mysql://ann:{SENTINEL}@127.0.0.1:1/budget",
    f"sqlite:////tmp/none.db?password={SENTINEL}",
    f"://{SENTINEL}",
    f"host=127.0.0.1 port=1 user=ann password={SENTINEL}",
    f"password = '{SENTINEL}'",
]
COMMANDS = [
    ["show"],
    ["show", "ab"],
    ["rm", "ab"],
    ["prune", "--older-than", "1d"],
    ["export"],
    ["db", "status"],
    ["db", "path"],
    ["db", "upgrade"],
    ["show", "--json"],
    ["import", "FILE"],
]
# Every logger at debug level, with a handler of its own beside those of the program; and tracebacks.
RUN = """
import json, logging
from click.testing import CliRunner
from budgetdb.cli.program import program
from budgetdb.store.exchange import write_document
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
open(sys.argv[1], "w").write(write_document([make_profile()], exported_by="a test"))
for url in json.loads(sys.argv[2]):
    for command in json.loads(sys.argv[3]):
        command = [part.replace("FILE", sys.argv[1]) for part in command]
        for where in ({"BUDGETDB_URL": url}, {}):
            given = ["--db", url] if not where else []
            result = CliRunner(env=where).invoke(program, ["--debug", *command, *given])
            print("CODE", result.exit_code, result.output)
            logging.getLogger().setLevel(logging.DEBUG)
    try:
        store = ProfileStore(url)
        print(repr(store), vars(store), store._database.location)
        store.publish(make_profile())
    except BudgetDBError as error:
        import traceback, copy, pprint
        print(repr(error), error.__dict__, error.__context__ if not error.__suppress_context__ else "")
        traceback.print_exception(error, file=sys.stdout)
"""


def test_a_password_appears_nowhere(tmp_path: Path) -> None:
    import json

    output = run_python(RUN, tmp_path / "in.json", json.dumps(URLS), json.dumps(COMMANDS))
    assert output.count("CODE") == 2 * len(URLS) * len(COMMANDS)
    assert "Error: " in output
    assert "Traceback" in output
    assert SENTINEL not in output


def test_the_sentinel_would_be_seen(tmp_path: Path) -> None:
    assert SENTINEL in run_python(RUN, tmp_path / "in.json", f'["/none/{SENTINEL}.db"]', '[["show"]]')


def test_an_export_says_nothing_of_where_it_comes_from(store: ProfileStore, path: Path) -> None:
    from budgetdb.store.exchange import write_document

    store.publish(make_profile())
    written = write_document(store.list(), exported_by="budgetdb")
    for secret in (str(path), path.name, os.uname().nodename, str(Path.home())):
        assert secret not in written or len(secret) < 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB, of the test's own."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def write_for_ever(file: FileIO) -> None:
    while True:
        file.write(b"x" * 4096)


def fill(directory: Path) -> Path:
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        write_for_ever(file)
    return ballast


def publish_many(store: ProfileStore) -> None:
    for pad_multiple in range(101, 200):
        store.publish(make_profile(make_key(pad_multiple=pad_multiple)))


def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    path = small_disk / "profiles.db"
    store = ProfileStore(path)
    store.publish(make_profile())
    ballast = fill(small_disk)
    with pytest.raises(StoreReadOnlyError, match="the disk is full") as caught:
        publish_many(store)
    assert "\n" not in str(caught.value)
    assert store.find(KEY) == make_profile()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    ballast.unlink()
    store.publish(make_profile(token_budget=1))
    assert store.find(KEY) == make_profile(token_budget=1)


def test_a_full_disk_costs_a_calibration_only_its_storing(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    from budgetdb.answers import Notebook

    path = small_disk / "profiles.db"
    store = ProfileStore(path)
    store.publish(make_profile())
    fill(small_disk)
    notebook = Notebook(store, strict=False)
    for number in range(1, 60):  # what a calibration does: a row for each probe, and the profile
        notebook.add_probe(KEY, make_profile().environment, make_profile().probes[0])
        notebook.publish(make_profile(make_key(pad_multiple=1000 + number)))
    assert caplog.text.count("going on without stored profiles") == 1
    assert store.find(KEY) == make_profile()
    assert store.integrity() == []


@pytest.mark.parametrize(
    ("state", "code", "told"),
    [
        ("empty", 0, "No profiles"),
        ("text", 3, "is not a SQLite database"),
        ("truncated", 3, "is damaged"),
        ("flipped", 3, "checksum does not hold"),
        ("directory missing", 3, "is missing"),
        ("newer schema", 3, "this budgetdb knows up to"),
        ("read-only", 3, "is read-only here"),
        ("other owner", 3, "permission denied"),
    ],
)
def test_broken_files_cost_one_line_and_nothing_is_lost(tmp_path: Path, state: str, code: int, told: str) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:  # pytest's own directories are closed to the user that the program becomes
        if parent.name.startswith(("pytest", "popen")):
            parent.chmod(0o755)
    path = tmp_path / "profiles.db"
    command = ["show", make_profile().id] if state == "flipped" else ["show"]
    if state == "empty":
        path.touch()
    elif state == "text":
        path.write_text("a text\n" * 300)
    elif state == "directory missing":
        path = tmp_path / "none" / "profiles.db"
        command = ["db", "upgrade"]
    else:
        ProfileStore(path).publish(make_profile())
    if state == "truncated":
        os.truncate(path, 5000)
    if state == "flipped":
        path.write_bytes(path.read_bytes().replace(b'"token_budget":65535', b'"token_budget":65531'))
    if state == "newer schema":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA user_version = 99")
    if state == "read-only":
        path.chmod(0o444)
        command = ["rm", make_profile().id]
    if state == "other owner":
        path.chmod(0o600)
    before = path.read_bytes() if path.exists() else None

    become = "import os, sys\n"
    if state in ("read-only", "other owner") and os.geteuid() == 0:
        become += "import budgetdb.store.profile_store, sqlalchemy.dialects.sqlite, difflib\n"
        become += "from budgetdb.cli import program\n"
        become += "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    done = subprocess.run(
        [sys.executable, "-c", become + "from budgetdb.cli import main; main()", *command],
        env={**os.environ, "BUDGETDB_URL": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert told in output
    assert output.count("\n") == 1, output
    assert (path.read_bytes() if path.exists() else None) == before
