import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_records import ENVIRONMENT, KEY, make_key, make_probe, make_profile, run_python

from budgetdb.errors import ProfileNotFoundError, UsageError
from budgetdb.store import ProfileStore, SchemaState

OTHER_ENVIRONMENT = ENVIRONMENT.model_copy(update={"torch": "2.14.0"})


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.find(KEY),
        lambda store: store.list(),
        lambda store: store.find_candidates(model_hash=KEY.model_hash),
        lambda store: store.unfinished_probes(KEY, ENVIRONMENT),
        lambda store: store.discard_probes(KEY),
        lambda store: store.status(),
    ],
)
@pytest.mark.parametrize("name", ["profiles.db", "no/such/directory/profiles.db"])
def test_reading_an_absent_database_creates_nothing(
    tmp_path: Path, name: str, read: Callable[[ProfileStore], object]
) -> None:
    read(ProfileStore(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


def test_an_absent_database_holds_nothing(store: ProfileStore) -> None:
    assert store.find(KEY) is None
    assert store.list() == []
    assert store.unfinished_probes(KEY, ENVIRONMENT) == []
    with pytest.raises(ProfileNotFoundError, match=r"^no profile 'abc': .*profiles.db holds none yet\. Run `budgetdb"):
        store.get("abc")


def test_what_is_published_is_found_again_to_the_bit(store: ProfileStore, path: Path) -> None:
    profile = make_profile()
    store.publish(profile)
    found = ProfileStore(path).find(KEY)
    assert found == profile
    assert found.canonical_json() == profile.canonical_json()


def test_another_key_is_a_miss(store: ProfileStore) -> None:
    store.publish(make_profile())
    assert store.find(make_key(pad_multiple=16)) is None


def test_publishing_again_replaces(store: ProfileStore) -> None:
    store.publish(make_profile(token_budget=1))
    store.publish(make_profile(token_budget=2))
    assert [profile.token_budget for profile in store.list()] == [2]


def test_list_is_newest_first(store: ProfileStore) -> None:
    for age_s in (30, 0, 90, 60):
        store.publish(make_profile(make_key(pad_multiple=age_s + 1), age_s=age_s))
    assert [profile.key.pad_multiple for profile in store.list()] == [1, 31, 61, 91]


def test_candidates_are_of_the_model_and_where_asked_of_the_device(store: ProfileStore) -> None:
    store.publish(make_profile(make_key(device_name="A100"), age_s=2))
    store.publish(make_profile(make_key(device_name="H100"), age_s=1))
    store.publish(make_profile(make_key(model_hash="cd" * 32)))
    found = store.find_candidates(model_hash=KEY.model_hash)
    assert [profile.key.device_name for profile in found] == ["H100", "A100"]
    found = store.find_candidates(model_hash=KEY.model_hash, device_name="A100")
    assert [profile.key.device_name for profile in found] == ["A100"]


def test_get_takes_the_first_digits_of_an_id(store: ProfileStore) -> None:
    profile = make_profile()
    store.publish(profile)
    assert store.get(profile.id) == profile
    assert store.get(profile.key.digest) == profile
    assert store.get(profile.id[:3].upper()) == profile


def test_get_refuses_to_guess_between_two(store: ProfileStore) -> None:
    made = [make_profile(make_key(pad_multiple=n)) for n in range(1, 18)]  # one more than there are first digits
    for profile in made:
        store.publish(profile)
    first = [profile.id[0] for profile in made]
    digit = next(digit for digit in first if first.count(digit) > 1)
    with pytest.raises(
        UsageError, match=rf"{first.count(digit)} profiles have ids that begin with '{digit}': [0-9a-f]"
    ):
        store.get(digit)


def test_get_offers_the_nearest_id(store: ProfileStore) -> None:
    profile = make_profile()
    store.publish(profile)
    mistyped = profile.id[:5] + "zz" + profile.id[7:]
    with pytest.raises(ProfileNotFoundError, match=rf"no profile '{mistyped}' in .*\. Nearest: {profile.id}$"):
        store.get(mistyped)


@pytest.mark.parametrize("wanted", ["", "  ", "%", "_", "' OR 1=1 --"])
def test_get_takes_no_pattern(store: ProfileStore, wanted: str) -> None:
    store.publish(make_profile())
    with pytest.raises(ProfileNotFoundError, match=r"Known: [0-9a-f]{12}$"):
        store.get(wanted)


def test_probes_come_back_in_the_order_they_ran(store: ProfileStore) -> None:
    ran = [make_probe(batch_size) for batch_size in (8, 64, 16, 8)]
    for probe in ran:
        store.add_probe(KEY, ENVIRONMENT, probe)
    assert store.unfinished_probes(KEY, ENVIRONMENT) == ran


def test_probes_of_another_environment_or_key_are_not_resumed(store: ProfileStore) -> None:
    store.add_probe(KEY, OTHER_ENVIRONMENT, make_probe())
    store.add_probe(make_key(dtype="float32"), ENVIRONMENT, make_probe())
    assert store.unfinished_probes(KEY, ENVIRONMENT) == []


def test_publishing_finishes_the_probes_of_that_key_only(store: ProfileStore) -> None:
    other = make_key(dtype="float32")
    for key in (KEY, other):
        store.add_probe(key, ENVIRONMENT, make_probe())
    store.publish(make_profile())
    assert store.unfinished_probes(KEY, ENVIRONMENT) == []
    assert store.unfinished_probes(other, ENVIRONMENT) == [make_probe()]
    assert (store.status().probes, store.status().unfinished_probes) == (2, 1)


def test_discarded_probes_are_gone_in_every_environment(store: ProfileStore) -> None:
    store.add_probe(KEY, ENVIRONMENT, make_probe())
    store.publish(make_profile())
    store.add_probe(KEY, ENVIRONMENT, make_probe())
    store.add_probe(KEY, OTHER_ENVIRONMENT, make_probe())
    store.discard_probes(KEY)
    assert store.unfinished_probes(KEY, ENVIRONMENT) == []
    assert store.unfinished_probes(KEY, OTHER_ENVIRONMENT) == []
    assert store.status().probes == 1  # the finished one stays: a profile rests on it


def test_status_tells_what_there_is(store: ProfileStore, path: Path) -> None:
    status = store.status()
    assert (status.state, status.revision, status.profiles) == (SchemaState.ABSENT, None, 0)
    store.publish(make_profile())
    status = store.status()
    assert status.location == str(path)
    assert (status.state, status.revision, status.head) == (SchemaState.CURRENT, "0001", "0001")
    assert (status.profiles, status.probes, status.journal_mode) == (1, 0, "delete")


def test_the_file_is_private_whatever_the_umask(store: ProfileStore, path: Path) -> None:
    old = os.umask(0)
    try:
        store.publish(make_profile())
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_default_directory_is_made_on_the_first_write_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    store = ProfileStore()
    assert store.list() == []
    assert list(tmp_path.iterdir()) == []
    store.publish(make_profile())
    assert store.location == str(tmp_path / "data" / "budgetdb" / "profiles.db")
    assert stat.S_IMODE((tmp_path / "data" / "budgetdb").stat().st_mode) == 0o700


def test_a_path_with_every_awkward_character(tmp_path: Path) -> None:
    path = tmp_path / "a b%20?mode=memory#&é'\".db"
    ProfileStore(path).publish(make_profile())
    assert ProfileStore(path).find(KEY) == make_profile()
    assert list(tmp_path.iterdir()) == [path]


def test_a_relative_path_is_not_moved_by_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = ProfileStore("profiles.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.publish(make_profile())
    assert (tmp_path / "profiles.db").exists()


def test_a_file_that_was_replaced_is_noticed(store: ProfileStore, path: Path) -> None:
    store.publish(make_profile())
    path.rename(path.with_suffix(".old"))
    assert store.find(KEY) is None
    store.publish(make_profile(token_budget=7))
    assert ProfileStore(path).list()[0].token_budget == 7


def test_queries_can_use_the_readable_columns(store: ProfileStore, path: Path) -> None:
    store.publish(make_profile())
    with closing(sqlite3.connect(path)) as connection:
        row = connection.execute("SELECT device_name, device_bytes, workload, provenance FROM profiles").fetchone()
        created_at = connection.execute("SELECT created_at FROM profiles").fetchone()[0]
    assert row == (KEY.device_name, KEY.device_bytes, KEY.workload, "measured")
    assert created_at == "2026-01-02 03:04:05.678901"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(min_size=1, max_size=60), workload=st.text(min_size=1, max_size=60), a=st.floats(0, 1e300))
def test_names_are_data(store: ProfileStore, name: str, workload: str, a: float) -> None:
    key = make_key(device_name=name, workload=workload)
    cost = make_profile().cost.model_copy(update={"parameters": {"c": 0.0, "a": a}})
    profile = make_profile(key, cost=cost, model_name=name)
    store.publish(profile)
    assert store.find(key) == profile
    assert profile in store.find_candidates(model_hash=key.model_hash, device_name=name)


def test_threads_share_a_store(store: ProfileStore) -> None:
    def write(first: int) -> None:
        for batch_size in range(first, first + 10):
            store.add_probe(KEY, ENVIRONMENT, make_probe(batch_size))

    threads = [Thread(target=write, args=(first,)) for first in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = sorted(probe.batch_size for probe in store.unfinished_probes(KEY, ENVIRONMENT))
    assert sizes == [*range(100, 110), *range(200, 210), *range(300, 310)]


def test_a_forked_child_uses_its_parents_store(path: Path) -> None:
    code = """
store = ProfileStore(sys.argv[1])
store.add_probe(KEY, ENVIRONMENT, make_probe(1))
children = []
for batch_size in (2, 3, 4):
    if not (pid := os.fork()):
        store.add_probe(KEY, ENVIRONMENT, make_probe(batch_size))
        os._exit(0)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
store.add_probe(KEY, ENVIRONMENT, make_probe(5))
print(sorted(probe.batch_size for probe in store.unfinished_probes(KEY, ENVIRONMENT)))
"""
    assert run_python(code, path) == "[1, 2, 3, 4, 5]"
