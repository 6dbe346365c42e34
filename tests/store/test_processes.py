"""Several processes on one file, some of them killed."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from store_records import ENVIRONMENT, KEY, make_probe, make_profile, start_python

from budgetdb.store import ProfileStore

WRITE_PROBES = """
store = ProfileStore(sys.argv[1])
for batch_size in range(int(sys.argv[2]), int(sys.argv[3])):
    store.add_probe(KEY, ENVIRONMENT, make_probe(batch_size))
    print(batch_size, flush=True)
"""


def test_writers_at_once_lose_nothing(path: Path) -> None:
    writers = [start_python(WRITE_PROBES, path, first, first + 40) for first in (100, 200, 300)]
    for writer in writers:
        _, errors = writer.communicate(timeout=100)
        assert writer.returncode == 0, errors
    sizes = sorted(probe.batch_size for probe in ProfileStore(path).unfinished_probes(KEY, ENVIRONMENT))
    assert sizes == [*range(100, 140), *range(200, 240), *range(300, 340)]


@pytest.mark.parametrize("acknowledged", [1, 7, 23])
def test_a_killed_writer_keeps_every_row_it_acknowledged(path: Path, acknowledged: int) -> None:
    writer = start_python(WRITE_PROBES, path, 1, 10**6)
    assert writer.stdout is not None
    for _ in range(acknowledged):
        writer.stdout.readline()
    writer.kill()
    said = acknowledged + len(writer.communicate(timeout=30)[0].split())
    kept = [probe.batch_size for probe in ProfileStore(path).unfinished_probes(KEY, ENVIRONMENT)]
    assert kept[:said] == list(range(1, said + 1))
    assert len(kept) <= said + 1  # at most the one whose acknowledgement was cut off
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    ProfileStore(path).add_probe(KEY, ENVIRONMENT, make_probe())


def test_readers_are_served_while_a_writer_holds_the_lock(store: ProfileStore, path: Path) -> None:
    store.publish(make_profile())
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        assert store.find(KEY) == make_profile()
