import json
from pathlib import Path

from cli_run import Program, make_key, make_profile

from budgetdb.store import ProfileStore


def test_profiles_travel(budgetdb: Program, store: ProfileStore, tmp_path: Path) -> None:
    kept, other = make_profile(), make_profile(make_key(pad_multiple=1))
    store.publish(kept)
    store.publish(other)
    file = tmp_path / "profiles.json"
    budgetdb("export", "-o", file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert "there already" in budgetdb.fails("export", "-o", file, code=2)
    budgetdb("export", "-o", file, "--overwrite", kept.id)
    assert json.loads(budgetdb("export", kept.id).stdout) == json.loads(file.read_text())
    assert str(tmp_path) not in file.read_text()

    theirs = Program(tmp_path / "theirs.db")
    assert "1 added (dry run" in theirs("import", "--dry-run", file).stdout
    assert not theirs.path.exists()
    assert "1 added" in theirs("import", file).stdout
    [found] = json.loads(theirs("show", "--json").stdout)
    assert (found["id"], found["provenance"]) == (kept.id, "imported")

    kept_here = budgetdb("import", file)
    assert "1 kept" in kept_here.stdout
    assert "--replace" in kept_here.stderr
    [fate] = json.loads(budgetdb("import", "--replace", "--json", file).stdout)
    assert fate == {"id": kept.id, "fate": "replaced", "before": "measured"}


def test_a_contribution(budgetdb: Program, store: ProfileStore) -> None:
    assert "measured on a card" in budgetdb.fails("export", "--contribute", code=2)
    store.publish(make_profile())
    document = json.loads(budgetdb("export", "--contribute").stdout)
    assert [card["name"] for card in document["cards"]] == ["NVIDIA H100 80GB HBM3"]
    assert "CUDA out of memory" not in json.dumps(document)


def test_names_in_a_file_are_data(budgetdb: Program, store: ProfileStore, tmp_path: Path) -> None:
    evil = "\x1b[31m'; DROP TABLE profiles; --\u202e../../etc/passwd\x7f"
    store.publish(make_profile(model_name=evil))
    file = tmp_path / "evil.json"
    budgetdb("export", "-o", file)
    theirs = Program(tmp_path / "theirs.db")
    for result in (theirs("import", file), theirs("show"), theirs("show", make_profile().id), theirs("export")):
        assert not set("\x1b\x7f\u202e") & set(result.output)
    assert ProfileStore(theirs.path).list()[0].model_name == evil
    assert sorted(file.name for file in tmp_path.iterdir()) == ["evil.json", "profiles.db", "theirs.db"]


def test_a_file_that_is_no_file_of_profiles(budgetdb: Program, tmp_path: Path, path: Path) -> None:
    broken = tmp_path / "a\x1b[31m.json"
    broken.write_text("{")
    assert "is no JSON" in budgetdb.fails("import", broken, code=2)
    assert "\x1b" not in budgetdb.fails("import", broken, code=2)
    assert "No such file" in budgetdb.fails("import", tmp_path / "none.json", code=2)
    assert not path.exists()


def test_rm(budgetdb: Program, store: ProfileStore) -> None:
    kept, gone = make_profile(), make_profile(make_key(pad_multiple=1))
    store.publish(kept)
    store.publish(gone)
    assert gone.id in budgetdb("rm", gone.id[:6]).stdout
    assert store.list() == [kept]
    assert kept.id in budgetdb.fails("rm", "0" * 12, code=8)
    assert json.loads(budgetdb("rm", kept.id, "--json").stdout) == [kept.id]
    assert store.list() == []


def test_rm_takes_a_damaged_profile(budgetdb: Program, store: ProfileStore, path: Path) -> None:
    import sqlite3

    store.publish(make_profile())
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE profiles SET payload = 'x'")
    connection.close()
    budgetdb("rm", make_profile().id)
    assert store.status().profiles == 0


def test_prune(budgetdb: Program, store: ProfileStore) -> None:
    from datetime import UTC, datetime

    now = make_profile(make_key(pad_multiple=1), created_at=datetime.now(UTC))
    old = make_profile(age_s=400 * 86_400)
    assert "none is so old" in budgetdb("prune", "--older-than", "1d").stdout
    store.publish(now)
    store.publish(old)
    assert old.id in budgetdb("prune", "--older-than", "30d", "--dry-run").stdout
    assert len(store.list()) == 2
    assert json.loads(budgetdb("prune", "--older-than", "30d", "--json").stdout) == [old.id]
    assert store.list() == [now]
    assert "is no age" in budgetdb("prune", "--older-than", "soon", code=2).output
