"""The command group, its global options, and its entry point."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Any, NoReturn

import click
from typing_extensions import override

from budgetdb.cli.calibrate import calibrate
from budgetdb.cli.db import db
from budgetdb.cli.doctor import doctor
from budgetdb.cli.exchange import export, import_
from budgetdb.cli.failures import as_one_line
from budgetdb.cli.messages import messages_on_stderr
from budgetdb.cli.plan import plan
from budgetdb.cli.plugins import plugins
from budgetdb.cli.predict import predict
from budgetdb.cli.remove import prune, rm
from budgetdb.cli.show import show


class Program(click.Group):
    """A group in which every failure of a command ends as one line and an exit code."""

    @override
    def invoke(self, ctx: click.Context) -> Any:
        debug = bool(ctx.params.get("debug"))
        with messages_on_stderr(debug=debug), as_one_line(debug=debug):
            return super().invoke(ctx)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="budgetdb", prog_name="budgetdb", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=True, help="Show debug logs, and tracebacks of errors.")
def program(debug: bool) -> None:  # `Program.invoke` reads it
    """Find once how many tokens a model takes in one step on a device, and remember it.

    Start with `budgetdb calibrate MODEL`; `budgetdb show` lists what is known, and `budgetdb predict MODEL` does
    without the device.
    """


for command in (calibrate, predict, plan, show, export, import_, rm, prune, db, doctor, plugins):
    program.add_command(command)


def main() -> NoReturn:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a name that the terminal's encoding lacks is escaped, and no error
            stream.reconfigure(errors="backslashreplace")
    program.main(prog_name="budgetdb")
