from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetdb.errors import UsageError
from budgetdb.settings import Settings, format_bytes, parse_bytes, read_settings

GOOD = [
    ("URL", "postgresql+psycopg://user@host/budgets", "postgresql+psycopg://user@host/budgets"),
    ("HEADROOM", "512MiB", 512 * 2**20),
    ("HEADROOM", "0", 0),
    ("MEMORY_LIMIT", "2GB", 2 * 10**9),
    ("MEMORY_LIMIT", "1073741824", 2**30),
    ("MATCH", "exact", "exact"),
    ("MAX_STEP_S", "2.5", 2.5),
    ("PROBE_TIMEOUT_S", "60", 60.0),
    ("PLUGINS", "none", "none"),
]
BAD = [
    ("HEADROOM", "plenty"),
    ("HEADROOM", "-1"),
    ("HEADROOM", ""),
    ("HEADROOM", "9" * 400 + "GB"),
    ("MEMORY_LIMIT", "0"),
    ("MEMORY_LIMIT", "2 gigs"),
    ("MATCH", "exactly"),
    ("MAX_STEP_S", "0"),
    ("MAX_STEP_S", "nan"),
    ("MAX_STEP_S", "inf"),
    ("PROBE_TIMEOUT_S", "soon"),
    ("PROBE_TIMEOUT_S", "-5"),
    ("PROBE_TIMEOUT_S", "a\nb"),
]


def test_nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUDGETDB_URL")
    settings = read_settings()
    assert settings.probe_timeout_s == 900
    assert {name: value for name, value in settings if value is not None} == {
        "match": "compatible",
        "probe_timeout_s": 900,
    }


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_each_variable_is_read(name: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"BUDGETDB_{name}", text)
    assert getattr(read_settings(), name.lower()) == value


def test_every_variable_has_a_case_and_a_description() -> None:
    assert {name.lower() for name, *_ in GOOD} == set(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_bad_value_is_one_line_with_the_variable_and_the_value(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"BUDGETDB_{name}", text)
    with pytest.raises(UsageError) as caught:
        read_settings()
    message = str(caught.value)
    assert message.startswith(f"BUDGETDB_{name} is {text[:60]!r}: ")
    assert message.endswith(f". Correct or unset BUDGETDB_{name}")
    assert "\n" not in message
    assert len(message) < 300


def test_settings_are_read_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUDGETDB_HEADROOM", "1KiB")
    assert read_settings().headroom == 1024
    monkeypatch.setenv("BUDGETDB_HEADROOM", "2KiB")
    assert read_settings().headroom == 2048


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2**31),
        ("1.5 GiB", 3 * 2**29),
        ("512mib", 2**29),
        ("80GB", 80 * 10**9),
        ("1024", 1024),
        (1024, 1024),
        ("1", 1),
        (2**62, 2**62),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "0", 0, "-1", -1, "GiB", "2 gigs", "nan", "inf", "1e3", "2GiB more", "9" * 400])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert str(caught.value).startswith(f"{text!r} is not a size in bytes")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (150 * 2**20, "150 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_sizes_for_people(count: int | None, text: str) -> None:
    assert format_bytes(count) == text


@given(count=st.integers(1, 2**40))
def test_what_is_shown_can_be_typed_again(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)
