"""What is served where the stored profile is not quite what was asked for."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import budgetdb
from budgetdb import answers
from budgetdb.answers import Notebook, find_answer
from budgetdb.calibration.calibrator import CalibrationEvent, Goal
from budgetdb.calibration.opening import open_session
from budgetdb.calibration.subject import Subject
from budgetdb.devices.choose import choose_device
from budgetdb.matching import WIDER_HEADROOM, MatchPolicy
from budgetdb.profiles import CostRecord, Environment, Outcome, Probe, Profile, Provenance
from budgetdb.store.exchange import write_document
from budgetdb.store.shipped import profiles_in

sys.path.insert(0, str(Path(__file__).parent / "calibration"))
sys.path.insert(0, str(Path(__file__).parent / "store"))
from store_records import make_profile
from tiny import bert, limit_bytes

GOAL = Goal(max_length=256, pad_multiple=8)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return open_session(bert(), device=None, workload="forward").describe()


@pytest.fixture(autouse=True)
def _say_again() -> None:
    answers._say_once.cache_clear()


@pytest.fixture
def store(tmp_path: Path) -> budgetdb.ProfileStore:
    return budgetdb.ProfileStore(tmp_path / "profiles.db")


def stored(subject: Subject, *, pad_multiple: int = 8, **changes: Any) -> Profile:
    key = subject.key(pad_multiple).model_copy(update=changes.pop("key", {}))
    environment = subject.environment.model_copy(update=changes.pop("environment", {}))
    cost = CostRecord(kind="linear", parameters={"c": 1e6, "a": 1000.0})
    fields = {"environment": environment, "cost": cost, "resident_bytes": 10**6, "max_length": 256, "frontier": ()}
    profile = make_profile(key, **{**fields, "limit_bytes": 120 * 10**6, "headroom_bytes": 10**7, **changes})
    return answers.solved_for(profile, profile.limit_bytes, headroom_bytes=None)


def ask(
    subject: Subject, store: budgetdb.ProfileStore, policy: str = "compatible", goal: Goal = GOAL, **more: Any
) -> Profile | None:
    return find_answer(subject, goal, Notebook(store, strict=True), policy=MatchPolicy(policy), **more)


def test_the_same_is_served_as_it_is(subject: Subject, store: budgetdb.ProfileStore) -> None:
    profile = stored(subject)
    store.publish(profile)
    found = ask(subject, store)
    assert found is not None
    assert found.canonical_json() == profile.canonical_json()
    assert found.served is not None
    assert (found.served.source, found.served.differences, found.served.added_headroom_bytes) == ("store", (), 0)
    assert '"served"' not in found.canonical_json()


def test_other_versions_are_served_with_a_wider_headroom_and_told_once(
    subject: Subject, store: budgetdb.ProfileStore, caplog: pytest.LogCaptureFixture
) -> None:
    profile = stored(subject, environment={"transformers": "5.0.0"})
    store.publish(profile)
    with caplog.at_level(logging.WARNING, logger="budgetdb"):
        found = [ask(subject, store), ask(subject, store)][-1]
    assert found is not None
    assert found.served is not None
    added = int(WIDER_HEADROOM * (profile.usable_bytes - profile.resident_bytes))
    assert (
        found.headroom_bytes
        == profile.headroom_bytes + added
        == profile.headroom_bytes + found.served.added_headroom_bytes
    )
    assert found.token_budget < profile.token_budget
    assert found.provenance is Provenance.MEASURED
    assert caplog.text.count("transformers 5.0.0, here") == 1
    assert ask(subject, store, "exact") is None


def test_another_pad_multiple_is_solved_on_its_own_grid(subject: Subject, store: budgetdb.ProfileStore) -> None:
    profile = stored(subject)
    store.publish(profile)
    goal = Goal(max_length=192, pad_multiple=64)
    found = ask(subject, store, goal=goal)
    assert found is not None
    assert found.served is not None
    assert found.key == subject.key(64)
    assert {point.length % 64 for point in found.frontier} == {0}
    assert (found.served.profile_id, found.headroom_bytes) == (profile.id, profile.headroom_bytes)


@pytest.mark.parametrize("policy", ["exact", "compatible", "any"])
def test_a_profile_settled_for_shorter_lengths_is_never_stretched(
    subject: Subject, store: budgetdb.ProfileStore, policy: str
) -> None:
    store.publish(stored(subject, max_length=128))
    assert ask(subject, store, policy) is None
    shorter = ask(subject, store, policy, Goal(max_length=128, pad_multiple=8))
    assert shorter is not None
    assert shorter.max_length == 128


def test_another_card_is_a_prediction(subject: Subject, store: budgetdb.ProfileStore) -> None:
    name = f"{subject.device_name} of another make"
    store.publish(stored(subject, key={"device_name": name}))
    assert ask(subject, store) is None
    assert ask(subject, store, "any") is not None
    found = ask(subject, store, "any", accept_predicted=True)
    assert found is not None
    assert found.served is not None
    assert found.provenance is Provenance.PREDICTED
    assert found.key == subject.key(8)
    assert found.served.added_headroom_bytes > 0


def test_what_the_wider_headroom_leaves_nothing_of_does_not_answer(
    subject: Subject, store: budgetdb.ProfileStore
) -> None:
    tight = stored(subject, environment={"driver": "1"}, headroom_bytes=0, limit_bytes=1_260_000)
    store.publish(tight)
    assert tight.max_length == 256
    assert ask(subject, store) is None


def test_shipped_profiles_come_after_the_users_own(
    subject: Subject, store: budgetdb.ProfileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = stored(subject)
    directory = tmp_path / "shipped"
    directory.mkdir()
    (directory / "card.json").write_text(write_document([shipped], exported_by="a test"))
    (directory / "broken.json").write_text("{")
    (directory / "devices.json").write_text("not looked at")
    found = profiles_in(directory)
    assert [profile.provenance for profile in found] == [Provenance.IMPORTED]

    monkeypatch.setattr(answers, "shipped_profiles", lambda model_hash: found)
    answer = ask(subject, store, "exact")
    assert answer is not None
    assert answer.served is not None
    assert (answer.served.source, answer.provenance) == ("shipped", Provenance.IMPORTED)
    store.publish(stored(subject, token_budget=7))
    answer = ask(subject, store, "exact")
    assert answer is not None
    assert answer.served is not None
    assert (answer.served.source, answer.provenance) == ("store", Provenance.MEASURED)


@pytest.mark.slow
def test_a_longer_length_is_settled_by_probes_and_another_environment_by_calibrating(
    monkeypatch: pytest.MonkeyPatch, store: budgetdb.ProfileStore
) -> None:
    monkeypatch.setenv("BUDGETDB_MEMORY_LIMIT", str(limit_bytes(40)))
    model, events = bert(), list[CalibrationEvent]()

    def stages(longest: int) -> tuple[Profile, list[str]]:
        events.clear()
        batches = budgetdb.make_batch_sampler(model, [longest] * 9, pad_multiple=8, store=store, on_event=events.append)
        return batches.profile, [event.stage for event in events]

    short, first = stages(64)
    assert "probe" in first
    longer, second = stages(128)
    assert {"probe", "stored"} <= set(second)
    assert (short.max_length, longer.max_length) == (64, 128)
    assert longer.served is not None
    assert longer.served.source == "calibrated"
    kept, third = stages(64)
    assert third == ["known"]
    assert kept.max_length == 128

    [row] = store.list()
    old = row.environment.model_copy(update={"transformers": "5.0.0"})
    store.publish(row.model_copy(update={"environment": old}))
    served, fourth = stages(64)
    assert fourth == ["known"]
    assert served.served is not None
    assert served.served.added_headroom_bytes > 0
    assert budgetdb.calibrate(model, max_length=64, pad_multiple=8, store=store).environment != old


def test_another_process_takes_memory_and_batches_shrink(
    subject: Subject,
    monkeypatch: pytest.MonkeyPatch,
    store: budgetdb.ProfileStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = bert()
    monkeypatch.setenv("BUDGETDB_MEMORY_LIMIT", str(limit_bytes(200)))
    device = choose_device("cpu")
    room = device.room(limit_bytes(200)).limit_bytes
    store.publish(stored(subject, limit_bytes=room, overhead_bytes=device.room().overhead_bytes))
    before = budgetdb.make_batch_sampler(model, [64] * 500, pad_multiple=8, store=store).profile
    taken = torch.ones(100 * 2**20 // 4)
    with caplog.at_level(logging.WARNING, logger="budgetdb"):
        after = budgetdb.make_batch_sampler(model, [64] * 500, pad_multiple=8, store=store).profile
    assert after.token_budget < 0.8 * before.token_budget
    assert "batches shrink to fit" in caplog.text
    assert taken.sum() > 0


def test_environment_has_no_field_that_no_policy_looks_at() -> None:
    looked_at = {"torch", "transformers", "runtime", "driver", "compute_capability", "allocator", "platform"}
    assert set(Environment.model_fields) == looked_at | {"device_total_bytes"}  # the bytes are in the key


def test_a_finer_pad_multiple_is_safe_between_the_old_lengths(subject: Subject, store: budgetdb.ProfileStore) -> None:
    profile = stored(subject, pad_multiple=64)
    store.publish(profile)
    found = ask(subject, store, goal=Goal(max_length=256, pad_multiple=1))
    assert found is not None
    assert min(point.length for point in found.frontier) < 64
    assert found.token_budget < profile.token_budget
    for length in range(1, 257):
        assert found.token_budget // length <= found.max_batch_size(length)


def test_a_profile_that_memory_ends_answers_on_another_grid(subject: Subject, store: budgetdb.ProfileStore) -> None:
    too_long = Probe(batch_size=1, length=256, outcome=Outcome.OOM)
    store.publish(stored(subject, pad_multiple=1, max_length=250, probes=(too_long,)))
    found = ask(subject, store)
    assert found is not None
    assert found.max_length == 248
