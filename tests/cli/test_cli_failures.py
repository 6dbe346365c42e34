import errno
import logging
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cli_run import Program

from budgetdb import errors
from budgetdb.cli.failures import as_one_line
from budgetdb.cli.messages import messages_on_stderr
from budgetdb.devices.catalogue import UnknownCardError
from budgetdb.errors import BelowFloorError, BudgetDBError, DoesNotFitError, UnknownNameError


def kinds(root: type[BudgetDBError] = BudgetDBError) -> list[type[BudgetDBError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in kinds(child))]


def instance(kind: type[BudgetDBError]) -> BudgetDBError:
    if kind is UnknownNameError:
        return UnknownNameError("device", "cdua", ["cuda"])
    if kind is DoesNotFitError:
        return DoesNotFitError("too big", needed_bytes=2, limit_bytes=1, next_step="Shrink it")
    if kind is BelowFloorError:
        return BelowFloorError(1, 2)
    if kind is errors.StepFailedError:
        return errors.StepFailedError(batch_size=1, length=2, reason="no")
    if issubclass(kind, errors.SimulatedOutOfMemoryError):
        return kind(requested_bytes=1, allocated_bytes=2, reserved_bytes=3, limit_bytes=3)
    if issubclass(kind, UnknownCardError):
        return kind("H1000", ["H100"])
    return kind("it failed", next_step="Try again")


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_error_is_one_line_and_its_exit_code(
    kind: type[BudgetDBError], capsys: pytest.CaptureFixture[str]
) -> None:
    error = instance(kind)
    with pytest.raises(click.exceptions.Exit) as caught, as_one_line(debug=False):
        raise error
    assert caught.value.exit_code == kind.exit_code != 0
    assert capsys.readouterr() == ("", f"Error: {error}\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "Error: interrupted\n"),
        (
            RuntimeError("first\nsecond"),
            1,
            "Error: RuntimeError: first. Run with --debug for the traceback: budgetdb --debug COMMAND\n",
        ),
        (
            AssertionError(),
            1,
            "Error: AssertionError. Run with --debug for the traceback: budgetdb --debug COMMAND\n",
        ),
        (BudgetDBError("a\x1b[31m\nb"), 1, "Error: a\\x1b[31m\\nb\n"),
    ],
)
def test_other_ends(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit) as caught, as_one_line(debug=False):
        raise error
    assert caught.value.exit_code == code
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("error", [SystemExit(3), BrokenPipeError(errno.EPIPE, "gone"), click.UsageError("no")])
def test_what_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, as_one_line(debug=False):
        raise error
    assert caught.value is error


def test_debug_shows_the_traceback(budgetdb: Program) -> None:
    assert "Traceback" not in budgetdb("show", "abc", code=8).stderr
    assert "Traceback" in budgetdb("--debug", "show", "abc", code=8).stderr


def test_log_records_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("budgetdb.test")
    before = logging.getLogger().handlers[:]
    with messages_on_stderr(debug=False):
        log.warning("free: %d\x1b", 3)
        log.info("unsaid")
    assert capsys.readouterr() == ("", "Warning: free: 3\\x1b\n")
    with messages_on_stderr(debug=True):
        log.debug("said")
    assert capsys.readouterr().err == "Debug (budgetdb.test): said\n"
    assert logging.getLogger().handlers == before


@pytest.mark.parametrize(
    ("arguments", "offered"),
    [
        (["clibrate", "bert"], "'calibrate'"),
        (["calibrate", "bert", "--dveice", "cpu"], "'--device'"),
        (["db", "statsu"], "'status'"),
    ],
)
def test_a_misspelt_command_or_option(budgetdb: Program, arguments: list[str], offered: str) -> None:
    result = budgetdb(*arguments, code=2)
    assert result.stdout == ""
    assert f"Did you mean {offered}?" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["calibrate"],
        ["calibrate", "bert", "--memory-limit", "2GB3"],
        ["calibrate", "bert", "--memory-limit", "0"],
        ["calibrate", "bert", "--headroom", "-1"],
        ["calibrate", "bert", "--max-length", "0"],
        ["calibrate", "bert", "--pad-multiple", "0"],
        ["calibrate", "bert", "--timeout", "nan"],
        ["calibrate", "bert", "--timeout", "0"],
        ["calibrate", "bert", "--weights", "some"],
        ["show", "one", "two"],
    ],
)
def test_values_that_can_not_be_used(budgetdb: Program, path: Path, arguments: list[str]) -> None:
    result = budgetdb(*arguments, code=2)
    assert result.stdout == ""
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr
    assert not path.exists()


def test_a_setting_that_can_not_be_used(budgetdb: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUDGETDB_HEADROOM", "much")
    assert "BUDGETDB_HEADROOM" in budgetdb.fails("show", code=2)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "cdua", "unknown device 'cdua'. Did you mean 'cuda'?"),
        ("--device", "cup:0", "unknown device 'cup'. Did you mean 'cpu'?"),
        ("--attn", "egaer", "unknown attention implementation 'egaer'. Did you mean 'eager'?"),
        ("--attention", "flash_attn_2", "unknown attention implementation 'flash_attn_2'. Did you mean"),
        ("--workload", "forwrad", "unknown workload 'forwrad'. Did you mean 'forward'?"),
        ("--workload", "embde[hold=none]", "unknown workload 'embde'. Did you mean 'embed'?"),
    ],
)
def test_a_misspelt_name(budgetdb: Program, path: Path, option: str, value: str, message: str) -> None:
    for as_json in ([], ["--json"]):
        assert message in budgetdb.fails("calibrate", "bert", option, value, *as_json, code=2)
    assert not path.exists()


def test_a_closed_pipe_is_quiet(budgetdb: Program, path: Path) -> None:
    command = f"{sys.executable} -m budgetdb.cli plugins | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
