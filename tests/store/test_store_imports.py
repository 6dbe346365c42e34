import pytest
from store_records import run_python

HEAVY = ("torch", "transformers", "alembic", "numpy")
WHAT_IS_LOADED = f"\nprint([name for name in {HEAVY} if name in sys.modules])"


def test_reading_imports_nothing_heavy(path: object) -> None:
    code = "store = ProfileStore(sys.argv[1]); store.list(); store.find(KEY); store.status()"
    assert run_python(code + WHAT_IS_LOADED, path) == "[]"


def test_reading_a_filled_database_imports_nothing_heavy(path: object) -> None:
    run_python("ProfileStore(sys.argv[1]).publish(make_profile())", path)
    code = "assert ProfileStore(sys.argv[1]).list()[0].id"
    assert run_python(code + WHAT_IS_LOADED, path) == "[]"


@pytest.mark.parametrize("code", ["import numpy", "ProfileStore(sys.argv[1]).upgrade()"])
def test_these_tests_can_fail(path: object, code: str) -> None:
    assert run_python(code + WHAT_IS_LOADED, path) in ("['numpy']", "['alembic']")
