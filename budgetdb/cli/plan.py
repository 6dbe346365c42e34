"""`budgetdb plan MODEL --lengths FILE`: the batches of a run, before it is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from budgetdb.cli.options import database_option, json_option, size

if TYPE_CHECKING:
    from budgetdb.profiles import Profile
    from budgetdb.sampling.packing import Lengths
    from budgetdb.sampling.sampler import ProfileBatchSampler


@click.command()
@click.argument("model")
@click.option(
    "--lengths",
    "file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Lengths: numbers line by line, JSON lines, .npy or .parquet; or texts, with --tokenizer.",
)
@click.option("--column", metavar="NAME", help="Column or field of FILE.  [default: length, input_ids or text]")
@click.option("--tokenizer", metavar="NAME", help="Counts the tokens of texts: a name on the hub, or a directory.")
@click.option("--device", metavar="CARD", help="A card, like H100; by default this machine's own device.")
@click.option("--memory-limit", callback=size, metavar="SIZE", help="Bytes to use on the device, like 2GiB.")
@click.option("--dtype", default="auto", show_default=True, help="Type of the weights; auto: as configured.")
@click.option(
    "--attn", "--attention", "attention", help="Attention implementation.  [default: as transformers chooses]"
)
@click.option(
    "--workload", default="forward", show_default=True, help="Kind of step, with options: forward[hold=none]."
)
@click.option(
    "--pad-multiple", type=click.IntRange(min=1), default=1, show_default=True, help="Lengths are padded to it."
)
@click.option("--strategy", help="Of packing.  [default: fastest where times are known, else fewest]")
@click.option("--world-size", type=click.IntRange(min=1), help="Ranks to spread the batches over.")
@click.option("--head", default="auto", show_default=True, help="Task of the model; auto: as configured, base: none.")
@click.option("--trust-remote-code", is_flag=True, help="Let code that comes with the model run.")
@database_option
@json_option
def plan(
    *,
    file: Path,
    column: str | None,
    tokenizer: str | None,
    world_size: int | None,
    strategy: str | None,
    db: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Show the batches of a run of MODEL, and what they take.

    Nothing is run. MODEL is a name on the model hub, a local directory, or the path of a config.json. Its stored
    profile for the device answers, else a prediction, as `budgetdb predict` makes it; no GPU is needed for either.
    Times are known where the profile was measured.
    """
    from budgetdb.cli.names import check_names
    from budgetdb.sampling.length_files import read_length_file
    from budgetdb.sampling.sampler import ProfileBatchSampler

    check_names(device=None, attention=asked["attention"], workload=asked["workload"])
    lengths = read_length_file(file, column=column, tokenizer=_tokenizer(tokenizer, asked))
    profile = _profile(asked, lengths, db)
    sampler = ProfileBatchSampler(lengths, profile, pad_multiple=asked["pad_multiple"], strategy=strategy)
    _show(sampler, lengths, profile, world_size=world_size, as_json=as_json)


def _show(
    sampler: ProfileBatchSampler, lengths: Lengths, profile: Profile, *, world_size: int | None, as_json: bool
) -> None:
    from budgetdb.cli.output import print_facts, print_json, print_table
    from budgetdb.cli.plan_text import COLUMNS, NUMBERS, RANK_COLUMNS, RANK_NUMBERS, compared, facts, ranks

    rows = compared(sampler, lengths, profile)
    by_rank = ranks(sampler, world_size) if world_size is not None else []
    if as_json:
        print_json(
            {
                "profile": {"id": profile.id, "model": profile.model_name, "provenance": profile.provenance.value},
                "samples": len(lengths),
                "tokens": int(lengths.sum()),
                "oversize": sampler.oversize.tolist(),
                "plans": [row.as_json() for row in rows],
                **({"ranks": [rank.as_json() for rank in by_rank]} if world_size is not None else {}),
            }
        )
        return
    print_facts(facts(sampler, lengths, profile), indent=0)
    click.echo()
    print_table(COLUMNS, [row.as_cells() for row in rows], right=NUMBERS)
    if by_rank:
        click.echo()
        print_table(RANK_COLUMNS, [rank.as_cells() for rank in by_rank], right=RANK_NUMBERS)


def _profile(asked: dict[str, Any], lengths: Lengths, db: str | None) -> Profile:
    """The stored profile for the device, else a prediction."""
    from budgetdb.answers import Notebook, find_answer
    from budgetdb.calibration.calibrator import Goal
    from budgetdb.calibration.subject import describe_subject
    from budgetdb.matching import MatchPolicy
    from budgetdb.prediction import find_place, name_of, outline_of, predict_for
    from budgetdb.shapes import padded_length
    from budgetdb.store import ProfileStore
    from budgetdb.workloads.base import parse_workload

    place, workload = find_place(asked["device"]), parse_workload(asked["workload"])
    outline = outline_of(
        asked["model"],
        dtype=asked["dtype"],
        attention=asked["attention"],
        head=asked["head"],
        trust_remote_code=asked["trust_remote_code"],
    )
    goal = Goal(
        max_length=padded_length(int(lengths.max(initial=1)), asked["pad_multiple"]),
        pad_multiple=asked["pad_multiple"],
        memory_limit_bytes=asked["memory_limit"],
    )
    name = name_of(asked["model"])
    subject = describe_subject(outline, device=place, workload=workload, name=name)
    notebook = Notebook(ProfileStore(db), strict=False)
    known = find_answer(subject, goal, notebook, policy=MatchPolicy.COMPATIBLE, accept_predicted=True)
    return known if known is not None else predict_for(outline, place, goal, workload=workload, name=name).profile


def _tokenizer(name: str | None, asked: dict[str, Any]) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    from budgetdb.errors import ModelNotFoundError

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=asked["trust_remote_code"])
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelNotFoundError(
            f"no tokenizer {name!r} ({reason})", next_step="Give a directory that has one, or its name on the hub"
        ) from None
