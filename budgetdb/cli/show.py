"""`budgetdb show`: what is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from budgetdb.cli.options import database_option, json_option

if TYPE_CHECKING:
    from budgetdb.profiles import Profile


@click.command()
@click.argument("profile_id", metavar="[ID]", required=False)
@database_option
@json_option
def show(profile_id: str | None, *, db: str | None, as_json: bool) -> None:
    """List the stored profiles, or show one in full.

    ID is a profile's id, or how it begins. Shown are its key, the environment it was made in, its cost model, the
    largest batch size by length, and every probe. No torch is needed to see them.
    """
    from budgetdb.store import ProfileStore

    store = ProfileStore(db)
    if profile_id is not None:
        _show_one(store.get(profile_id), as_json=as_json)
    else:
        _show_all(store.list(), location=store.location, as_json=as_json)


def profile_as_json(profile: Profile) -> dict[str, Any]:
    """All of a profile in JSON's types, its id first."""
    return {"id": profile.id, **profile.model_dump(mode="json")}


def _show_one(profile: Profile, *, as_json: bool) -> None:
    from budgetdb.cli.details import print_details
    from budgetdb.cli.output import print_json

    if as_json:
        print_json(profile_as_json(profile))
    else:
        print_details(profile)


def _show_all(profiles: list[Profile], *, location: str, as_json: bool) -> None:
    from budgetdb.cli.output import print_json, print_table

    if as_json:
        print_json([profile_as_json(profile) for profile in profiles])
    elif profiles:
        print_table(_COLUMNS, map(_row, profiles), right=_NUMBERS, expendable=_EXPENDABLE)
    else:
        click.echo(f"No profiles in {location} yet. Run `budgetdb calibrate MODEL` to make one.")


_COLUMNS = (
    "id",
    "model",
    "device",
    "VRAM",
    "dtype",
    "attention",
    "pad",
    "workload",
    "token budget",
    "max length",
    "bound",
    "provenance",
    "created (UTC)",
)
_NUMBERS = ("VRAM", "pad", "token budget", "max length")
_EXPENDABLE = ("provenance", "created (UTC)", "bound", "VRAM", "pad", "max length", "dtype")


def _row(profile: Profile) -> tuple[object, ...]:
    from budgetdb.cli.output import minute
    from budgetdb.settings import format_bytes

    key = profile.key
    return (
        profile.id,
        profile.model_name,
        key.device_name,
        format_bytes(key.device_bytes),
        key.dtype,
        key.attention,
        key.pad_multiple,
        key.workload,
        profile.token_budget,
        profile.max_length,
        profile.bound.value,
        profile.provenance.value,
        minute(profile.created_at),
    )
