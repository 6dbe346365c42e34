"""One rank of a job of real processes; run by test_distributed.py with a scenario's name."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from store_records import make_key, make_profile

from budgetdb import distributed
from budgetdb.distributed import Job, current_job
from budgetdb.errors import BudgetDBError, DoesNotFitError
from budgetdb.profiles import Profile, Served

asked: list[str] = []


def asks(name: str, budget: int, *, takes_s: float = 0.0) -> Callable[[], Profile]:
    def ask() -> Profile:
        asked.append(name)
        time.sleep(takes_s)
        profile = make_profile(make_key(device_name=name), token_budget=budget)
        return profile.as_served(Served(profile_id=profile.id, source="store", policy="compatible", differences=("x",)))

    return ask


def fails(error: Exception) -> Callable[[], Profile]:
    def ask() -> Profile:
        asked.append("failed")
        raise error

    return ask


def told(job: Job, hardware: str, ask: Callable[[], Profile]) -> list[object]:
    try:
        profile = job.agree(hardware, ask)
    except BudgetDBError as error:
        return [type(error).__name__, str(error), error.exit_code]
    return [profile.key.device_name, profile.token_budget, profile.served.source if profile.served else None]


def scenarios(job: Job) -> dict[str, object]:
    rank = job.rank
    card = "A" if rank != 1 else "B"
    error = DoesNotFitError("no row fits", needed_bytes=5, limit_bytes=3, next_step="Free memory")
    found: dict[str, object] = {
        "one card": told(job, "A", asks("A", 100 + rank)),
        "two cards": told(job, card, asks(card, 200 + rank, takes_s=0.5 * rank)),
        "the least": job.least(card, 10 - rank),
        "slow": told(job, "A", asks("A", 7, takes_s=4.0)),  # longer than a collective may take
        "one card fails": told(job, card, fails(error) if rank == 1 else asks(card, 1)),
        "all fail": told(job, "A", fails(error)),
    }
    try:
        found["not ours"] = told(job, "A", fails(ZeroDivisionError("a reason\nmore")))
    except ZeroDivisionError:  # whose it is sees it as it is, with its traceback
        found["not ours"] = "its own"
    return found


def main() -> None:
    scenario, rank, world_size, meeting = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    # Ranks that wait inside a collective for longer than this are declared dead.
    options = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=3)}
    dist.init_process_group("gloo", init_method=meeting, **options)
    job = current_job()
    assert job is not None
    if scenario == "agree":
        found = scenarios(job)
    elif scenario == "silent":
        distributed._SILENCE_S = 2.0
        found = {"waiter": told(job, "A", asks("A", 1) if rank else dies)}
    else:
        found = {"sampler": sampler()}
    sys.stdout.write(json.dumps({"rank": rank, "asked": asked, "found": found}) + "\n")
    sys.stdout.flush()
    if scenario != "silent":
        dist.barrier()
        dist.destroy_process_group()


def dies() -> Profile:
    import os

    os._exit(9)


def sampler() -> list[object]:
    """The public way, on ranks that have unequal memory free."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "calibration"))
    from tiny import bert, limit_bytes

    import budgetdb

    model = bert()
    limit = limit_bytes(300) - 8 * 2**20 * dist.get_rank()  # what is imported on the way takes its share
    events: list[str] = []
    batches = budgetdb.make_batch_sampler(
        model, [20, 64, 40] * 100, pad_multiple=8, memory_limit_bytes=limit, on_event=lambda e: events.append(e.stage)
    )
    served = batches.profile.served
    return [batches.profile.limit_bytes, list(batches), "probe" in events, served.source if served else None]


if __name__ == "__main__":
    main()
