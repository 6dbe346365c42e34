import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import URL, make_url

from budgetdb.errors import UsageError
from budgetdb.store import ProfileStore
from budgetdb.store.location import locate, redacted

SECRET = "s3cr3t-sentinel"  # noqa: S105 (it is what must not be shown)
WITH_SECRET = [
    f"postgresql+psycopg://ann:{SECRET}@db/budget",
    f"postgresql://ann:{SECRET}@db:5432/budget?sslmode=require",
    f"postgresql+psycopg://ann@db/budget?password={SECRET}",
    f"postgresql+psycopg://db/budget?user=ann&passfile=/home/{SECRET}",
    f"postgresql+psycopg://ann:a@{SECRET}@db/budget",
    f"postgresql+psycopg://ann:a/{SECRET}@db/budget",
    f"postgresql+psycopg://ann:a?{SECRET}@db/budget",
    f"postgresql+psycopg://ann:a#{SECRET}@db/budget",
    f"postgresql+psycopg://ann:{SECRET}@db:port/budget",
    f"postgresql+psycopg://ann:{SECRET}@[db/budget",
    f"mysql://ann:{SECRET}@db/budget",
    f"sqlite://ann:{SECRET}@db/budget",
    f"sqlite:///profiles.db?password={SECRET}",
    f"sqlite:///?password={SECRET}",
    f"nonsense://ann:{SECRET}@db",
    f"://{SECRET}",
    f"post gres://ann:{SECRET}@db",
]


@pytest.mark.parametrize("url", WITH_SECRET)
def test_a_password_is_never_shown(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert SECRET not in redacted(url)
    try:
        store = ProfileStore(url)
        told = f"{store.location} {store._database.location!r}"
        store.list()
    except Exception as error:  # whatever happens, it must not be shown
        told = f"{error} {error!r} {error.__cause__}"
    assert told
    assert SECRET not in told
    assert SECRET not in caplog.text


@given(password=st.text(st.characters(codec="ascii", exclude_characters="x"), min_size=1, max_size=20))
def test_any_password_that_is_escaped_is_hidden(password: str) -> None:
    url = URL.create("postgresql+psycopg", "xx", f"xx{password}xx", "host", 5432, "name")
    shown = redacted(url.render_as_string(hide_password=False))
    assert shown == redacted(url) == "postgresql+psycopg://xx:***@host:5432/name"


def test_a_path_is_its_own_name(tmp_path: Path) -> None:
    assert redacted(str(tmp_path)) == str(tmp_path)
    for given_path in (tmp_path / "a.db", str(tmp_path / "a.db"), f"sqlite:///{tmp_path}/a.db"):
        location = locate(given_path)
        assert (location.path, location.url, location.is_default) == (tmp_path / "a.db", None, False)


def test_control_characters_of_a_path_are_escaped(tmp_path: Path) -> None:
    assert locate(tmp_path / "a\n\x1b[31mb.db").shown == f"{tmp_path}/a\\n\\x1b[31mb.db"


def test_a_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/a.db").path == tmp_path / "a.db"


def test_the_environment_names_the_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUDGETDB_URL", str(tmp_path / "from-environment.db"))
    assert locate().path == tmp_path / "from-environment.db"
    assert locate(tmp_path / "argument.db").path == tmp_path / "argument.db"
    monkeypatch.setenv("BUDGETDB_URL", "")
    assert locate().is_default


def test_a_servers_url_gets_the_driver_we_install() -> None:
    location = locate("postgresql://ann:pw@db/budget")
    assert location.url == make_url("postgresql+psycopg://ann:pw@db/budget")
    assert location.shown == "postgresql://ann:***@db/budget"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("", "'' is not the path of a database file"),
        (":memory:", "':memory:' is not the path"),
        ("a\0b", r"'a\\x00b' is not the path"),
        ("sqlite://", "a SQLite URL names a file and takes no options"),
        ("sqlite:///a.db?mode=ro", "takes no options"),
        ("mysql://host/name", "databases of kind 'mysql' are not supported. Give the path of a file, or postgresql"),
        ("postgresql://host:port/name", r"the database URL postgresql://\.\.\. can't be parsed"),
        ("postgresql://a:b@c@host/name", "has an unescaped character in its password. Write @ as %40"),
    ],
)
def test_what_is_no_database_is_refused(url: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as error:
        locate(url)
    assert "\n" not in str(error.value)
