import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from store_records import ENVIRONMENT, KEY, make_probe, make_profile, start_python

from budgetdb.errors import SchemaMismatchError, StoreCorruptError
from budgetdb.store import ProfileStore, SchemaState, schema, upgrade
from budgetdb.store.tables import metadata

NEXT_REVISION = """
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade():
    with op.batch_alter_table("profiles") as table:
        table.add_column(sa.Column("stars", sa.Integer()))
    {then}
    op.execute("PRAGMA user_version = 2")
"""


def write_next_revision(directory: Path, then: str = "pass") -> None:
    (directory / "versions" / "0002_stars.py").write_text(NEXT_REVISION.format(then=then))


@pytest.fixture
def newer_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process becomes a budgetdb that knows one revision more; yields its directory of migrations."""
    directory = tmp_path / "migrations"
    shutil.copytree(str(upgrade.migrations()), directory, ignore=shutil.ignore_patterns("__pycache__"))
    write_next_revision(directory)
    monkeypatch.setattr(schema, "REVISIONS", ("0001", "0002"))
    monkeypatch.setattr(upgrade, "migrations", lambda: directory)
    return directory


def query(path: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement).fetchall()


def test_the_migrated_schema_is_the_tables(store: ProfileStore, path: Path) -> None:
    store.upgrade()
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        options = {"version_table": schema.VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        differences = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
    engine.dispose()
    assert differences == []


def test_the_gate_knows_the_revisions_that_alembic_has() -> None:
    scripts = ScriptDirectory(str(upgrade.migrations()))
    newest_first = [script.revision for script in scripts.walk_revisions()]
    assert newest_first[::-1] == list(schema.REVISIONS)


def test_header_and_version_table_agree(store: ProfileStore, path: Path) -> None:
    store.upgrade()
    assert query(path, "PRAGMA application_id") == [(schema.APPLICATION_ID,)]
    assert query(path, "PRAGMA user_version") == [(len(schema.REVISIONS),)]
    assert query(path, "SELECT version_num FROM budgetdb_alembic_version") == [(schema.head(),)]


def test_upgrading_again_changes_nothing(store: ProfileStore, path: Path) -> None:
    first = store.upgrade()
    assert (first.before, first.after, first.backup, first.changed) == (None, "0001", None, True)
    before = path.read_bytes()
    second = store.upgrade()
    assert (second.before, second.after, second.backup, second.changed) == ("0001", "0001", None, False)
    assert path.read_bytes() == before


def test_processes_that_meet_an_absent_database_all_succeed(path: Path) -> None:
    code = """
print("ready", flush=True)
sys.stdin.readline()
ProfileStore(sys.argv[1]).add_probe(KEY, ENVIRONMENT, make_probe())
"""
    processes = [start_python(code, path) for _ in range(12)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    assert not path.exists()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    assert len(ProfileStore(path).unfinished_probes(KEY, ENVIRONMENT)) == 12


def test_an_empty_file_is_a_fresh_database(store: ProfileStore, path: Path) -> None:
    path.touch(0o600)
    assert store.status().state is SchemaState.EMPTY
    assert store.find(KEY) is None
    assert path.stat().st_size == 0
    store.publish(make_profile())
    assert store.find(KEY) == make_profile()


@pytest.mark.usefixtures("newer_program")
def test_a_newer_database_is_refused_with_both_versions(
    store: ProfileStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(make_profile())
    before = path.read_bytes()
    monkeypatch.setattr(schema, "REVISIONS", ("0001",))
    told = rf"^database {path} has schema 0002, this budgetdb knows up to 0001\. Upgrade budgetdb, or set BUDGETDB_URL"
    for use in (store.list, lambda: store.publish(make_profile()), store.upgrade, lambda: store.discard_probes(KEY)):
        with pytest.raises(SchemaMismatchError, match=told):
            use()
    status = store.status()
    assert (status.state, status.revision, status.profiles) == (SchemaState.NEWER, "0002", None)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "statements",
    ["CREATE TABLE alembic_version (version_num TEXT)", "PRAGMA application_id = 1", "CREATE TABLE profiles (id INT)"],
)
def test_another_programs_database_is_left_alone(store: ProfileStore, path: Path, statements: str) -> None:
    query(path, statements)
    before = path.read_bytes()
    for use in (store.list, lambda: store.publish(make_profile()), store.upgrade):
        with pytest.raises(SchemaMismatchError, match=r"belongs to another program\. Set BUDGETDB_URL"):
            use()
    assert store.status().state is SchemaState.FOREIGN
    assert path.read_bytes() == before


def test_an_older_database_is_read_as_it_is(store: ProfileStore, path: Path, request: pytest.FixtureRequest) -> None:
    store.publish(make_profile())
    request.getfixturevalue("newer_program")
    before = path.read_bytes()
    assert store.status().state is SchemaState.OLDER
    assert store.find(KEY) == make_profile()
    assert path.read_bytes() == before


def test_an_older_database_without_the_tables_asked_for_names_the_command(
    store: ProfileStore, path: Path, request: pytest.FixtureRequest
) -> None:
    store.publish(make_profile())
    query(path, "ALTER TABLE profiles RENAME TO profiles_of_old")
    request.getfixturevalue("newer_program")
    with pytest.raises(SchemaMismatchError, match=r"has an older schema, or .*\. Run `budgetdb db upgrade`"):
        store.list()


def test_a_write_upgrades_an_older_database_and_keeps_a_copy(
    store: ProfileStore, path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    store.publish(make_profile())
    store.add_probe(KEY, ENVIRONMENT, make_probe())
    request.getfixturevalue("newer_program")
    store.publish(make_profile(token_budget=5))
    copy = path.with_name("profiles.db.bak-r0001")
    assert f"upgraded {path} to schema 0002; as it was it is kept in {copy}" in caplog.text
    assert store.status().state is SchemaState.CURRENT
    assert [profile.token_budget for profile in store.list()] == [5]
    assert query(path, "SELECT stars FROM profiles") == [(None,)]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]
    assert copy.stat().st_mode & 0o777 == 0o600
    assert query(copy, "PRAGMA user_version") == [(1,)]
    assert query(copy, "SELECT count(*) FROM probes WHERE NOT finished") == [(1,)]


def test_a_second_copy_does_not_overwrite_the_first(
    store: ProfileStore, path: Path, request: pytest.FixtureRequest
) -> None:
    store.publish(make_profile())
    first = path.with_name("profiles.db.bak-r0001")
    first.write_text("precious")
    request.getfixturevalue("newer_program")
    assert store.upgrade().backup == path.with_name("profiles.db.bak-r0001.1")
    assert first.read_text() == "precious"


def test_a_failed_migration_leaves_the_database_as_it_was_and_can_be_run_again(
    store: ProfileStore, path: Path, request: pytest.FixtureRequest
) -> None:
    store.publish(make_profile())
    schema_before = query(path, "SELECT * FROM sqlite_master")
    directory = request.getfixturevalue("newer_program")
    write_next_revision(directory, then="raise RuntimeError('power cut')")
    with pytest.raises(RuntimeError, match="power cut"):
        store.upgrade()
    assert query(path, "SELECT * FROM sqlite_master") == schema_before
    assert query(path, "PRAGMA user_version") == [(1,)]
    assert store.find(KEY) == make_profile()
    write_next_revision(directory)
    store.upgrade()
    assert store.status().state is SchemaState.CURRENT
    assert store.find(KEY) == make_profile()


def test_a_version_table_that_contradicts_the_header_is_told(
    store: ProfileStore, path: Path, request: pytest.FixtureRequest
) -> None:
    store.publish(make_profile())
    query(path, "UPDATE budgetdb_alembic_version SET version_num = 'beef'")
    request.getfixturevalue("newer_program")
    with pytest.raises(StoreCorruptError, match=r"contradicts itself about its schema \(.*beef.*\)"):
        store.upgrade()
    assert store.find(KEY) == make_profile()


def test_downgrading_and_upgrading_again_gives_the_same_schema(store: ProfileStore, path: Path) -> None:
    from alembic import command
    from alembic.config import Config

    store.upgrade()
    schema_before = query(path, "SELECT type, name, sql FROM sqlite_master ORDER BY name")
    engine = create_engine(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", str(upgrade.migrations()))
    config.attributes["connection"] = engine  # as pytest-alembic hands it over
    command.downgrade(config, "base")
    engine.dispose()
    assert store.status().state is SchemaState.EMPTY
    store.upgrade()
    assert query(path, "SELECT type, name, sql FROM sqlite_master ORDER BY name") == schema_before
