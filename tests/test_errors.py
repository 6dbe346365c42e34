from __future__ import annotations

import copy
import inspect
import re

import pytest

from budgetdb import errors
from budgetdb.errors import (
    BelowFloorError,
    BudgetDBError,
    CalibrationTimeoutError,
    DoesNotFitError,
    ModelNotFoundError,
    PluginError,
    ProfileNotFoundError,
    StepFailedError,
    UnknownNameError,
    UsageError,
)

# A line of the tree: its indentation, the class, what it is, and the builtins it refines.
LINE = re.compile(r"^    ((?:[│ ]   )*)(?:[├└]── )?(\w+Error) +[^()]*?(?:\((\w+)\))?$", re.MULTILINE)

EXAMPLES = [
    BudgetDBError("it broke", next_step="Mend it"),
    UnknownNameError("device", "cude", ["cuda", "cpu"]),
    DoesNotFitError("no row fits", needed_bytes=5, limit_bytes=3, next_step="Free memory"),
    BelowFloorError(100, 256),
    StepFailedError(batch_size=2, length=8, reason="shapes differ"),
    ModelNotFoundError("no model there", next_step="Look elsewhere"),
    CalibrationTimeoutError("no answer within 3 s"),
    PluginError("it can't be imported", next_step="Uninstall it"),
]


def drawn() -> dict[str, tuple[str, str | None]]:
    """Class to its parent and its builtin, as the module's docstring draws them."""
    tree: dict[str, tuple[str, str | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = LINE.match(line)
        if found is None:
            continue
        del path[found.start(2) // 4 - 1 :]
        tree[found[2]] = (path[-1] if path else "Exception", found[3])
        path.append(found[2])
    return tree


def classes() -> dict[str, type[BudgetDBError]]:
    return {
        name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)
    }


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    real = {}
    for name, value in classes().items():
        parent, *others = value.__bases__
        real[name] = (parent.__name__, others[0].__name__ if others else None)
        assert len(others) <= 1
    assert drawn() == real
    assert len(real) >= 20


def test_every_error_is_ours_and_has_a_docstring() -> None:
    for value in classes().values():
        assert issubclass(value, BudgetDBError)
        assert value.__doc__


def test_exit_codes_tell_what_to_do() -> None:
    codes = {name: value.exit_code for name, value in classes().items()}
    own = {name for name, value in classes().items() if "exit_code" in vars(value)}
    assert {name: codes[name] for name in sorted(own)} == {
        "BudgetDBError": 1,
        "CalibrationError": 6,
        "DeviceError": 5,
        "DoesNotFitError": 7,
        "ModelError": 4,
        "ProfileNotFoundError": 8,
        "StoreError": 3,
        "UsageError": 2,
    }
    assert codes["UnknownNameError"] == codes["LengthsError"] == 2
    assert codes["PluginError"] == 1


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_messages_are_one_line(error: BudgetDBError) -> None:
    assert "\n" not in str(error)
    assert str(error).strip()
    assert error.next_step is None or str(error).endswith(f". {error.next_step}")


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_to_another_process(error: BudgetDBError) -> None:
    again = copy.copy(error)  # takes an object apart and makes it anew as multiprocessing does
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_messages_carry_their_values() -> None:
    assert str(BudgetDBError("it broke")) == "it broke"
    assert str(BelowFloorError(100, 256)) == (
        "the largest token budget that fits is 100, below the floor of 256. Lower `floor`, or free memory on the device"
    )
    assert "batch size 2 x length 8, and not for lack of memory: shapes differ." in str(
        StepFailedError(batch_size=2, length=8, reason="shapes differ")
    )
    needed = DoesNotFitError("no row fits", needed_bytes=5, limit_bytes=3, next_step="Free memory")
    assert (needed.needed_bytes, needed.limit_bytes) == (5, 3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cude", "Did you mean 'cuda'?"),
        ("acelerator", "Did you mean 'accelerator'?"),
        ("quantum", "Known: accelerator, cpu, cuda"),
    ],
)
def test_an_unknown_name_offers_the_nearest(name: str, hint: str) -> None:
    error = UnknownNameError("device", name, {"cuda", "cpu", "accelerator"})
    assert str(error) == f"unknown device {name!r}. {hint}"
    assert error.known == ["accelerator", "cpu", "cuda"]
    assert (error.kind, error.name) == ("device", name)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (UsageError("x"), ValueError),
        (UnknownNameError("x", "y", []), LookupError),
        (ModelNotFoundError("x"), FileNotFoundError),
        (BelowFloorError(1, 2), RuntimeError),
        (CalibrationTimeoutError("x"), TimeoutError),
        (ProfileNotFoundError("x"), LookupError),
        (PluginError("x"), ImportError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_callers_can_catch_the_builtin(error: BudgetDBError, builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise error
