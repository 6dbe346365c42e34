"""Profiles as a JSON file: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_records import make_key, make_profile

from budgetdb.errors import FileFormatError, StoreReadOnlyError, UsageError
from budgetdb.profiles import Profile, Provenance
from budgetdb.store import ProfileStore
from budgetdb.store.exchange import (
    MAX_FILE_BYTES,
    contribution,
    json_schema,
    parse_document,
    read_document,
    write_document,
    write_file,
)
from budgetdb.store.imports import Fate

SCHEMA = Path(__file__).parents[2] / "profiles" / "schema.json"
CPU = make_key(device_name="CPU AMD EPYC")


def text(*profiles: Profile) -> str:
    return write_document(profiles or (make_profile(),), exported_by="a test")


def parsed(content: str | bytes) -> list[Profile]:
    content = content.encode() if isinstance(content, str) else content
    return [sealed.profile for sealed in parse_document(content, name="file").profiles]


def test_the_schema_is_that_of_the_models() -> None:
    assert json.loads(SCHEMA.read_text()) == json_schema(), "run scripts/write_schema.py"
    assert json_schema()["additionalProperties"] is False


@given(name=st.text(max_size=40).filter(lambda name: name.isascii() or name.encode("utf-8", "ignore").decode() == name))
def test_what_is_written_is_read_to_the_bit(name: str) -> None:
    profiles = [make_profile(model_name=name), make_profile(make_key(pad_multiple=1))]
    written = text(*profiles)
    assert written.isascii()
    assert [one.canonical_json() for one in parsed(written)] == [one.canonical_json() for one in profiles]


def test_what_was_served_is_not_written() -> None:
    from budgetdb.profiles import Served

    served = make_profile().as_served(Served(profile_id="x", source="store", policy="exact"))
    assert text(served) == text(make_profile())


def change(edit: Callable[[Any], object]) -> str:
    document = json.loads(text())
    edit(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "no JSON"),
        ("[1, 2]", "the document"),
        ('{"a": 1, "a": 2}', "twice"),
        ("[" * 100_000, "nested"),
        (text().replace("2147483648", "NaN"), "NaN is no number"),
        (text().replace("1000000000.0", "1e999"), "too large a number"),
        (text().replace("1000000000.0", "9" * 5000), "no JSON"),
        (text().encode("utf-16"), "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (text()[:-40], "no JSON"),
        (change(lambda d: d.update(comment="hello")), "comment"),
        (change(lambda d: d["profiles"][0]["profile"].update(served={})), "served"),
        (change(lambda d: d["profiles"][0]["profile"]["key"].update(path="/etc")), "key.path"),
        (change(lambda d: d["profiles"][0]["profile"].update(limit_bytes="2")), "limit_bytes"),
        (change(lambda d: d["profiles"][0]["profile"].update(limit_bytes=2**63)), "limit_bytes"),
        (change(lambda d: d["profiles"][0]["profile"].update(model_name="x" * 513)), "model_name"),
        (change(lambda d: d["profiles"][0]["profile"].update(token_budget=7)), "checksum of profile 1"),
        (change(lambda d: d["profiles"].clear()), "checksum of the list"),
        (change(lambda d: d.update(format_version=2)), "format_version"),
        (change(lambda d: d.update(format="other")), "format"),
    ],
)
def test_what_is_no_file_of_ours_is_refused_in_one_line(content: str | bytes, told: str) -> None:
    with pytest.raises(FileFormatError, match=told) as caught:
        parsed(content)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_every_changed_digit_is_caught() -> None:
    written = text()
    for at in range(written.index('"profiles"'), len(written), 7):
        if written[at].isdigit():
            changed = f"{written[:at]}{(int(written[at]) + 1) % 10}{written[at + 1 :]}"
            if json.loads(changed) != json.loads(written):  # else a digit beyond what a float holds
                with pytest.raises(FileFormatError):
                    parsed(changed)


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(100 * MAX_FILE_BYTES)
    with pytest.raises(FileFormatError, match="larger than 16 MiB"):
        read_document(path)


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, told in ((tmp_path / "pipe", "regular"), (tmp_path, "directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(UsageError, match=told):
            read_document(path)


def test_a_file_is_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_file(path, text())
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="there already"):
        write_file(path, "other")
    assert parsed(path.read_text())
    write_file(path, "other", overwrite=True)
    assert path.read_text() == "other"
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
    with pytest.raises(UsageError, match="cannot write"):
        write_file(tmp_path / "none" / "out.json", "x")


def test_a_contribution_has_cards_and_no_texts() -> None:
    failed = make_profile().probes[0].model_copy(update={"message": "process 123 of ann on host7"})
    measured = make_profile(probes=(failed,))
    written = contribution(
        [measured, make_profile(CPU), make_profile(make_key(pad_multiple=1), provenance=Provenance.PREDICTED)],
        exported_by="a test",
    )
    document = parse_document(written.encode(), name="file")
    assert "host7" not in written
    assert [sealed.profile.id for sealed in document.profiles] == [measured.id]
    assert [(card.name, card.total_bytes) for card in document.cards] == [(measured.key.device_name, 2**31)]
    with pytest.raises(UsageError, match="measured on a card"):
        contribution([make_profile(CPU)], exported_by="a test")


class TestImport:
    def test_others_measurements_are_imported(self, store: ProfileStore) -> None:
        [done] = store.import_profiles([make_profile()])
        [found] = store.list()
        assert (done.fate, found.provenance) == (Fate.ADDED, Provenance.IMPORTED)
        [again] = store.import_profiles([make_profile()])
        assert again.fate is Fate.UNCHANGED

    def test_what_was_measured_here_stays_unless_told(self, store: ProfileStore) -> None:
        mine, theirs = make_profile(), make_profile(token_budget=99)
        store.publish(mine)
        assert [one.fate for one in store.import_profiles([theirs])] == [Fate.KEPT]
        assert store.list() == [mine]
        assert [one.fate for one in store.import_profiles([theirs], replace=True, dry_run=True)] == [Fate.REPLACED]
        assert store.list() == [mine]
        assert [one.fate for one in store.import_profiles([theirs], replace=True)] == [Fate.REPLACED]
        assert store.list()[0].token_budget == 99

    @pytest.mark.parametrize(
        ("before", "after", "fate"),
        [
            (Provenance.PREDICTED, Provenance.MEASURED, Fate.REPLACED),
            (Provenance.PREDICTED, Provenance.PREDICTED, Fate.REPLACED),
            (Provenance.IMPORTED, Provenance.MEASURED, Fate.REPLACED),
            (Provenance.IMPORTED, Provenance.PREDICTED, Fate.KEPT),
            (Provenance.MEASURED, Provenance.PREDICTED, Fate.KEPT),
        ],
    )
    def test_more_takes_the_place_of_less(
        self, store: ProfileStore, before: Provenance, after: Provenance, fate: Fate
    ) -> None:
        store.publish(make_profile(provenance=before))
        [done] = store.import_profiles([make_profile(provenance=after, token_budget=9)])
        assert (done.fate, done.before) == (fate, before)
        if after is Provenance.PREDICTED and fate is Fate.REPLACED:
            assert store.list()[0].provenance is Provenance.PREDICTED

    def test_all_or_none(self, store: ProfileStore, path: Path) -> None:
        import sqlite3

        store.upgrade()
        with sqlite3.connect(path) as connection:
            connection.execute(
                "CREATE TRIGGER full BEFORE INSERT ON profiles WHEN NEW.pad_multiple = 3 "
                "BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        connection.close()
        with pytest.raises(Exception, match="no"):
            store.import_profiles([make_profile(), make_profile(make_key(pad_multiple=3))])
        assert store.list() == []


def test_disk_full_is_not_hidden_by_an_import(store: ProfileStore, path: Path) -> None:
    store.upgrade()
    path.chmod(0o600)
    size = path.stat().st_size // 4096
    import sqlite3

    from sqlalchemy import event

    @event.listens_for(store._database._writer, "connect")
    def no_more_pages(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {size}")

    many = [make_profile(make_key(pad_multiple=n + 1)) for n in range(50)]
    with pytest.raises(StoreReadOnlyError):
        store.import_profiles(many)
    assert store.list() == []
