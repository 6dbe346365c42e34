import json
import os
import pty
import subprocess
import sys
from pathlib import Path

from cli_run import Program, make_key, make_profile

from budgetdb.profiles import CostRecord, Profile
from budgetdb.store import ProfileStore

LONG_NAME = "an-organisation-with-a-name/a-model-whose-name-has-no-end-" + "x" * 150


def test_an_empty_store_says_where_it_looked_and_what_to_run(budgetdb: Program, path: Path) -> None:
    output = budgetdb("show").stdout
    assert str(path) in output
    assert "budgetdb calibrate MODEL" in output
    assert not path.exists()
    assert json.loads(budgetdb("show", "--json").stdout) == []


def test_each_profile_is_one_row(budgetdb: Program, store: ProfileStore) -> None:
    older, newer = make_profile(age_s=60), make_profile(make_key(attention="eager"), token_budget=4_321)
    store.publish(older)
    store.publish(newer)
    heading, _, first, second = budgetdb("show").stdout.splitlines()
    for column in ("id", "model", "device", "VRAM", "dtype", "attention", "pad", "workload", "token budget"):
        assert column in heading
    for column in ("max length", "bound", "provenance", "created"):
        assert column in heading
    assert first.split()[0] == newer.id
    assert "4321" in first
    for part in (older.id, "bert-base", "NVIDIA H100 80GB HBM3", "80.0 GiB", "bfloat16", "sdpa", " 8 "):
        assert part in second
    for part in ("forward[hold=previous]", "65535", "512", "max_length", "measured", "2026-01-02 03:03"):
        assert part in second


def test_nothing_is_cut_where_there_is_no_terminal(budgetdb: Program, store: ProfileStore) -> None:
    store.publish(make_profile(model_name=LONG_NAME))
    assert LONG_NAME in budgetdb("show").stdout
    assert LONG_NAME in budgetdb.process("show", COLUMNS="40").stdout


def on_a_terminal(path: Path, columns: int) -> str:
    """What `budgetdb show` writes to a terminal so wide."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        environment = {**os.environ, "BUDGETDB_URL": str(path), "COLUMNS": str(columns), "TERM": "xterm"}
        command = [sys.executable, "-m", "budgetdb.cli", "show"]
        done = subprocess.run(command, stdout=theirs, stderr=theirs, env=environment, check=True)
        os.close(theirs)
        assert done.returncode == 0
        return screen.read(100_000).decode()


def test_a_narrow_terminal_leaves_columns_out_and_says_so(path: Path, store: ProfileStore) -> None:
    profile = make_profile()
    store.publish(profile)
    narrow = on_a_terminal(path, 100)
    assert profile.id in narrow
    assert "65535" in narrow
    assert "provenance" in narrow.partition("Left out for lack of width: ")[2]
    wide = on_a_terminal(path, 250)
    assert "Left out" not in wide
    assert "measured" in wide


def test_json_holds_whole_profiles(budgetdb: Program, store: ProfileStore) -> None:
    profile = make_profile()
    store.publish(profile)
    [listed] = json.loads(budgetdb("show", "--json").stdout)
    alone = json.loads(budgetdb("show", "--json", profile.id).stdout)
    assert listed == alone
    assert listed.pop("id") == profile.id
    assert Profile.model_validate_json(json.dumps(listed)) == profile


def test_the_details_of_one(budgetdb: Program, store: ProfileStore) -> None:
    profile = make_profile()
    store.publish(profile)
    output = budgetdb("show", profile.id[:4]).stdout
    for part in (profile.id, profile.key.model_hash, "NVIDIA H100 80GB HBM3", "pad_multiple", "torch", "2.13.0"):
        assert part in output
    for part in ("linear", "c + a·kL", "12345.5", "CUDA out of memory", "2, 1 of them out of memory", "400 MiB more"):
        assert part in output
    frontier = [line.split() for line in output.splitlines() if line.split()[:2] == ["512", "128"]]
    assert frontier == [["512", "128", "65536", "1.00", "GiB", "memory", "yes"]]


def test_a_cost_model_of_a_plugin_that_is_gone(budgetdb: Program, store: ProfileStore) -> None:
    profile = make_profile(cost=CostRecord(kind="linaer", parameters={"ring": 7.0}))
    store.publish(profile)
    output = budgetdb("show", profile.id).stdout
    assert "unknown cost model 'linaer'" in output
    assert "ring" in output


def test_an_id_that_is_not_there(budgetdb: Program, store: ProfileStore) -> None:
    assert "holds none yet" in budgetdb.fails("show", "abc", code=8)
    profile = make_profile()
    store.publish(profile)
    near = profile.id[:-1] + "x"
    assert profile.id in budgetdb.fails("show", near, code=8)
    assert budgetdb.fails("show", near, "--json", code=8).startswith(f"Error: no profile '{near}'")


def test_an_id_that_several_have(budgetdb: Program, store: ProfileStore) -> None:
    for pad_multiple in range(1, 18):  # more than there are hexadecimal digits
        store.publish(make_profile(make_key(pad_multiple=pad_multiple)))
    firsts = [json_id[0] for json_id in (row["id"] for row in json.loads(budgetdb("show", "--json").stdout))]
    shared = max(firsts, key=firsts.count)
    assert "Give more digits" in budgetdb.fails("show", shared, code=2)


def test_names_can_not_act_on_the_terminal(budgetdb: Program, store: ProfileStore) -> None:
    name = "a\x1b[31mred\x07\u202ename [bold]plain[/bold] :smile:\x7f"
    profile = make_profile(make_key(device_name=name), model_name=name)
    store.publish(profile)
    escaped = r"a\x1b[31mred\x07\u202ename [bold]plain[/bold] :smile:\x7f"
    for arguments in (("show",), ("show", profile.id)):
        output = budgetdb(*arguments).stdout
        assert escaped in output
        assert all(character.isprintable() or character == "\n" for character in output)
    output = budgetdb("show", "--json").stdout
    assert output.isascii()
    assert all(character.isprintable() or character == "\n" for character in output)
    assert json.loads(output)[0]["model_name"] == name


def test_a_terminal_without_unicode(budgetdb: Program, store: ProfileStore) -> None:
    profile = make_profile(model_name="modèle")
    store.publish(profile)
    output = budgetdb.process("show", PYTHONIOENCODING="ascii").stdout
    assert r"mod\xe8le" in output
    assert "kL" in budgetdb.process("show", profile.id, PYTHONIOENCODING="ascii").stdout


def test_a_damaged_row_is_a_warning(budgetdb: Program, store: ProfileStore, path: Path) -> None:
    import sqlite3

    store.publish(make_profile())
    store.publish(make_profile(make_key(attention="eager"), model_name="intact"))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE profiles SET payload = replace(payload, '65535', '65536') WHERE attention = 'sdpa'")
    connection.close()
    result = budgetdb("show")
    assert "intact" in result.stdout
    assert "bert-base" not in result.stdout
    assert result.stderr.startswith("Warning: profile ")
    assert result.stderr.count("\n") == 1
    assert "can't be read" in budgetdb.fails("show", make_profile().id, code=3)
