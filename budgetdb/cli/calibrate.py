"""`budgetdb calibrate MODEL`: find out, and remember."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from budgetdb.cli.options import database_option, json_option, seconds, size, size_or_nothing

if TYPE_CHECKING:
    from budgetdb.profiles import Profile
    from budgetdb.store import ProfileStore


@click.command()
@click.argument("model")
@click.option("--device", help="auto, cpu, cuda, cuda:1, ...  [default: the accelerator, else the CPU]")
@click.option("--dtype", default="auto", show_default=True, help="Type of the weights; auto: as configured.")
@click.option(
    "--attn", "--attention", "attention", help="Attention implementation.  [default: as transformers chooses]"
)
@click.option(
    "--workload", default="forward", show_default=True, help="Kind of step, with options: forward[hold=none]."
)
@click.option("--max-length", type=click.IntRange(min=1), help="Longest length to settle.  [default: the model's own]")
@click.option(
    "--pad-multiple", type=click.IntRange(min=1), default=1, show_default=True, help="Lengths are padded to it."
)
@click.option(
    "--memory-limit",
    callback=size,
    metavar="SIZE",
    help="Bytes to use on the device, like 2GiB.  [default: all that is free]",
)
@click.option(
    "--headroom",
    callback=size_or_nothing,
    metavar="SIZE",
    help="Bytes to keep free of it.  [default: the device's own]",
)
@click.option(
    "--weights",
    type=click.Choice(["auto", "random", "pretrained"]),
    default="auto",
    show_default=True,
    help="Memory does not depend on their values; auto: pretrained where they are on this machine.",
)
@click.option("--head", default="auto", show_default=True, help="Task of the model; auto: as configured, base: none.")
@click.option("--trust-remote-code", is_flag=True, help="Let code that comes with the model run.")
@click.option("--force", is_flag=True, help="Probe again although the answer is known.")
@click.option("--timeout", type=float, callback=seconds, metavar="SECONDS", help="Stop then, with the best so far.")
@click.option("--verbose", is_flag=True, help="Show progress where stderr is no terminal, too.")
@database_option
@json_option
def calibrate(*, db: str | None, as_json: bool, verbose: bool, **asked: Any) -> None:
    """Find how many tokens MODEL takes in one step, and store it.

    MODEL is a name on the model hub, a local directory, or the path of a config.json. What is known already is
    answered at once; what was interrupted goes on where it was.
    """
    from budgetdb.cli.names import check_names

    check_names(device=asked["device"], attention=asked["attention"], workload=asked["workload"])
    profile, is_known = _calibrate(db=db, verbose=verbose, asked=asked)
    if as_json:
        from budgetdb.cli.output import print_json
        from budgetdb.cli.show import profile_as_json

        print_json(profile_as_json(profile))
    else:
        from budgetdb.cli.summary import print_summary

        print_summary(profile, is_known=is_known)


def _calibrate(*, db: str | None, verbose: bool, asked: dict[str, Any]) -> tuple[Profile, bool]:
    """The profile, and whether it was known before."""
    from budgetdb.cli.progress import Progress

    store = _open_store(db)
    with Progress(verbose=verbose) as progress:
        from budgetdb.lookup import calibrate as run

        profile = run(
            asked.pop("model"),
            memory_limit_bytes=asked.pop("memory_limit"),
            headroom_bytes=asked.pop("headroom"),
            timeout_s=asked.pop("timeout"),
            store=store,
            on_event=progress.report,
            **asked,
        )
    return profile, progress.is_known


def _open_store(db: str | None) -> ProfileStore:
    """The store, seen to be usable: a fault is told now, and not after the seconds that torch takes."""
    from budgetdb.store import ProfileStore, SchemaState

    store = ProfileStore(db)
    # One that holds no profiles can't answer, so it will be written; one that does may be read-only.
    if store.status().state not in (SchemaState.CURRENT, SchemaState.OLDER):
        store.upgrade()
    return store
