"""`budgetdb predict MODEL --device CARD`: a budget without the card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from budgetdb.cli.options import database_option, json_option, size, size_or_nothing

if TYPE_CHECKING:
    from budgetdb.prediction import Prediction


@click.command()
@click.argument("model")
@click.option("--device", metavar="CARD", help="A card, like H100 or 'NVIDIA L4'; cpu or cuda for this machine's own.")
@click.option("--all-devices", is_flag=True, help="Predict for every card of the catalogue, as a table.")
@click.option("--memory", callback=size, metavar="SIZE", help="Memory of a card that is not in the catalogue.")
@click.option("--capability", metavar="X.Y", help="Its compute capability, like 8.9.")
@click.option("--dtype", default="auto", show_default=True, help="Type of the weights; auto: as configured.")
@click.option(
    "--attn", "--attention", "attention", help="Attention implementation.  [default: as transformers chooses]"
)
@click.option(
    "--workload", default="forward", show_default=True, help="Kind of step, with options: forward[hold=none]."
)
@click.option("--max-length", type=click.IntRange(min=1), help="Longest length wanted.  [default: the model's own]")
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
    help="Bytes to keep free beside what the prediction's own uncertainty needs.  [default: the device's own]",
)
@click.option("--head", default="auto", show_default=True, help="Task of the model; auto: as configured, base: none.")
@click.option("--trust-remote-code", is_flag=True, help="Let code that comes with the model run.")
@click.option("--store", "keep", is_flag=True, help="Store the profile, where none was measured.")
@database_option
@json_option
def predict(*, all_devices: bool, keep: bool, db: str | None, as_json: bool, **asked: Any) -> None:
    """Tell how many tokens MODEL takes on a card that is not here.

    MODEL is a name on the model hub, a local directory, or the path of a config.json. Its step is traced without
    memory, torch's allocator is simulated, and what that leaves uncertain is kept free.
    """
    from budgetdb.cli.names import check_names

    check_names(device=None, attention=asked["attention"], workload=asked["workload"])
    if all_devices:
        _refuse_with_all(keep=keep, asked=asked)
        _predict_all(asked, as_json=as_json)
        return
    prediction = _predict_one(asked)
    stored = _keep(prediction, db) if keep else None
    if as_json:
        from budgetdb.cli.output import print_json
        from budgetdb.cli.prediction_text import prediction_as_json

        print_json(prediction_as_json(prediction))
    else:
        from budgetdb.cli.prediction_text import print_prediction

        print_prediction(prediction, stored=stored)


def _refuse_with_all(*, keep: bool, asked: dict[str, Any]) -> None:
    named = [f"--{name}" for name in ("device", "memory", "capability") if asked[name] is not None]
    named += ["--store"] if keep else []
    if named:
        raise click.UsageError(f"--all-devices goes with none of: {', '.join(named)}")


def _predict_one(asked: dict[str, Any]) -> Prediction:
    from budgetdb.prediction import find_place, name_of, predict_for
    from budgetdb.workloads.base import parse_workload

    place = find_place(asked["device"], memory_bytes=asked["memory"], capability=asked["capability"])
    return predict_for(
        _outline(asked), place, _goal(asked), workload=parse_workload(asked["workload"]), name=name_of(asked["model"])
    )


def _predict_all(asked: dict[str, Any], *, as_json: bool) -> None:
    from budgetdb.cli.output import print_json, print_table
    from budgetdb.cli.prediction_text import CARD_COLUMNS, CARD_NUMBERS, card_as_json, card_row
    from budgetdb.prediction import name_of, predict_everywhere
    from budgetdb.workloads.base import parse_workload

    rows = predict_everywhere(
        _outline(asked), _goal(asked), workload=parse_workload(asked["workload"]), name=name_of(asked["model"])
    )
    if as_json:
        print_json([card_as_json(card, found) for card, found in rows])
    else:
        print_table(CARD_COLUMNS, [card_row(card, found) for card, found in rows], right=CARD_NUMBERS)


def _outline(asked: dict[str, Any]) -> Any:
    from budgetdb.prediction import outline_of

    return outline_of(
        asked["model"],
        dtype=asked["dtype"],
        attention=asked["attention"],
        head=asked["head"],
        trust_remote_code=asked["trust_remote_code"],
    )


def _goal(asked: dict[str, Any]) -> Any:
    from budgetdb.calibration.calibrator import Goal

    return Goal(
        max_length=asked["max_length"],
        pad_multiple=asked["pad_multiple"],
        memory_limit_bytes=asked["memory_limit"],
        headroom_bytes=asked["headroom"],
    )


def _keep(prediction: Prediction, db: str | None) -> bool:
    """Store the profile; False where a measured one is there and stays."""
    from budgetdb.profiles import Provenance
    from budgetdb.store import ProfileStore

    store = ProfileStore(db)
    known = store.find(prediction.profile.key)
    if known is not None and known.provenance is not Provenance.PREDICTED:
        return False
    store.publish(prediction.profile)
    return True
