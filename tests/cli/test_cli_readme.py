"""Everything the command line has is explained, by itself and in the README."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import budgetdb
from budgetdb.cli.failures import INTERRUPTED, UNEXPECTED
from budgetdb.cli.program import program
from budgetdb.errors import BudgetDBError
from budgetdb.settings import Settings

README = (Path(__file__).parents[2] / "README.md").read_text()


def commands(group: click.Group = program, name: str = "budgetdb") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with its full name."""
    for part, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {part}")
        else:
            yield f"{name} {part}", command


def kinds(root: type[BudgetDBError] = BudgetDBError) -> Iterator[type[BudgetDBError]]:
    yield root
    for child in root.__subclasses__():
        yield from kinds(child)


COMMANDS = dict(commands())


def test_there_are_commands_to_look_at() -> None:
    assert {"budgetdb calibrate", "budgetdb show", "budgetdb db status", "budgetdb plugins"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_and_its_options_have_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert "..." not in command.get_short_help_str(limit=66)  # else the list of commands would cut it
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_and_its_options_stand_in_the_readme(name: str) -> None:
    command = COMMANDS[name]
    [row] = [line for line in README.splitlines() if line.startswith(f"| `{name}")]
    assert command.get_short_help_str(limit=100) in row.replace("&nbsp;", " ")
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
    assert [option for option in options if f"`{option}" not in README] == []


def test_global_options_stand_in_the_readme() -> None:
    for parameter in program.params:
        assert isinstance(parameter, click.Option)
        assert parameter.help
        assert f"budgetdb {parameter.opts[0]}" in README


def test_every_exit_code_stands_in_the_readme() -> None:
    table = README.partition("### Exit codes")[2].partition("###")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert listed == {0, UNEXPECTED, INTERRUPTED, 2, *(kind.exit_code for kind in kinds())}


def test_every_variable_stands_in_the_readme() -> None:
    table = README.partition("### Environment variables")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(BUDGETDB_\w+)`", table, re.MULTILINE))
    assert listed == {f"BUDGETDB_{field.upper()}" for field in Settings.model_fields}


def test_names_in_the_readme_exist() -> None:
    mentioned = set(re.findall(r"\bbudgetdb\.([A-Za-z_]+)\b", README))
    submodules = {"costs", "devices", "workloads", "attention", "plugins", "sampling", "strategies", "testing"}
    assert mentioned - submodules <= set(budgetdb.__all__)
    assert {"make_batch_sampler", "calibrate", "find_profile", "TokenBudgetBatchSampler"} <= mentioned


def test_the_readme_keeps_to_this_repository() -> None:
    assert not re.search(r"/(work|home|root|tmp)/", README)
    for script in re.findall(r"scripts/\w+", README):
        assert (Path(__file__).parents[2] / script).exists(), script


def test_version() -> None:
    from click.testing import CliRunner

    result = CliRunner().invoke(program, ["--version"])
    assert (result.exit_code, result.output) == (0, "budgetdb 0.1.0\n")
