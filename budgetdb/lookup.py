"""The factory: find a profile, or make one, then build the sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from budgetdb.answers import Notebook, find_answer, make_answer, solved_for
from budgetdb.calibration.calibrator import DEFAULT_MAX_STEP_S, CalibrationEvent, Goal, Listener
from budgetdb.calibration.opening import device_of, open_session
from budgetdb.calibration.session import Session
from budgetdb.calibration.subject import Subject
from budgetdb.costs.frontier import solve
from budgetdb.devices.base import Device
from budgetdb.distributed import Job, current_job
from budgetdb.errors import (
    BelowFloorError,
    DoesNotFitError,
    LengthsError,
    ProfileNotFoundError,
    UnknownNameError,
    UsageError,
)
from budgetdb.matching import MatchPolicy, parse_policy
from budgetdb.plugins import WORKLOADS
from budgetdb.prediction import predict_for
from budgetdb.profiles import Profile, Served
from budgetdb.sampling.lengths import read_lengths
from budgetdb.sampling.packing import Lengths, padded_lengths
from budgetdb.sampling.sampler import ProfileBatchSampler
from budgetdb.settings import format_bytes, read_settings
from budgetdb.shapes import Shape, padded_length
from budgetdb.store.profile_store import ProfileStore
from budgetdb.workloads.base import Workload, parse_workload

_log = logging.getLogger(__name__)

# Less free memory than this share of what a profile was made under is worth a warning; the rest is everyday life.
_NOTABLY_LESS = 0.95
ON_MISS = ("calibrate", "error", "predict")


def calibrate(
    model: Any,
    *,
    max_length: int | None = None,
    workload: str = "forward",
    device: str | None = None,
    dtype: str = "auto",
    attention: str | None = None,
    pad_multiple: int = 1,
    memory_limit_bytes: int | None = None,
    headroom_bytes: int | None = None,
    weights: str = "auto",
    head: str = "auto",
    trust_remote_code: bool = False,
    force: bool = False,
    match: str = "exact",
    timeout_s: float | None = None,
    store: ProfileStore | None = None,
    on_event: Listener | None = None,
) -> Profile:
    """Find out how many tokens `model` takes in one step, store that as a profile, and return it.

    A profile that is stored already is returned without running a step, unless `force` is set, or it is settled for
    shorter lengths or for less memory than asked. A calibration that was interrupted goes on where it was.

    Args:
        model: a live model, which is probed in this process as it is; or a name on the hub, a local directory, or the
            path of a `config.json`, which a worker process builds and probes.
        max_length: longest length to settle, in tokens; None for the model's own limit, at most 8 192.
        workload: kind of step, `forward`, `loss` or `embed`, with options as in `forward[hold=none]`.
        device: `auto`, `cpu`, `cuda:1` and the like; a live model's own device.
        dtype: of the weights, `auto` for the configuration's. Not for live models, nor are the next ones.
        attention: attention implementation, None for what transformers chooses.
        pad_multiple: what the collator rounds lengths up to.
        memory_limit_bytes: what the process may use on the device; None for `BUDGETDB_MEMORY_LIMIT`, else all that is
            free.
        headroom_bytes: what to keep free of it; None for `BUDGETDB_HEADROOM`, else the device's default.
        weights: `pretrained`, `random` or `auto`; memory does not depend on their values.
        head: the task, or `auto` for the class that the configuration names.
        trust_remote_code: whether code that comes with the model may run.
        force: probe again although the answer is known.
        match: how alike a stored profile must be to be the answer; by default only one made in this environment.
        timeout_s: stop after this long with the best so far.
        store: where profiles are kept; None for the user's own database.
        on_event: called for each thing that happens.

    Raises:
        UsageError: an argument can't be used; `UnknownNameError` with the nearest spelling for a name.
        ModelError: the model can't be found, built or loaded.
        DeviceError: the device is not there.
        DoesNotFitError: not even one row of the shortest length fits.
        CalibrationError: no result; its subclasses say why.
        StoreError: the database can't be used.
    """
    goal = _goal(
        max_length=max_length,
        pad_multiple=pad_multiple,
        memory_limit_bytes=memory_limit_bytes,
        headroom_bytes=headroom_bytes,
        timeout_s=timeout_s,
    )
    build = {
        "dtype": dtype,
        "attention": attention,
        "weights": weights,
        "head": head,
        "trust_remote_code": trust_remote_code,
    }
    session = open_session(model, device=device, workload=workload, build=build)

    policy = parse_policy(match)
    listen = on_event or _log_event
    notebook = Notebook(_store_or_default(store), strict=True)
    with session:
        subject = session.describe()
        known = None if force else find_answer(subject, goal, notebook, policy=policy)
        if known is None:
            return make_answer(session, subject, goal, notebook=notebook, listen=listen, afresh=force)
    listen(CalibrationEvent("known", f"{known.model_name} is known as {known.id}: no forward pass was made"))
    return known


def find_profile(
    model: Any,
    *,
    workload: str = "forward",
    device: str | None = None,
    pad_multiple: int = 1,
    match: str | None = None,
    store: ProfileStore | None = None,
) -> Profile | None:
    """The stored profile of a live model on its device, or None; no step is run.

    What is returned is as `match` lets it be served, and says so in `Profile.served`: see `make_batch_sampler`. A
    prediction is returned where nothing was measured.

    Raises:
        UnknownNameError: no workload, device or match policy of that name.
        StoreError: the database can't be read.
    """
    session = open_session(model, device=device, workload=workload)
    subject, notebook = session.describe(), Notebook(_store_or_default(store), strict=True)
    # Whatever was settled answers here: how far it reaches is for the caller to see.
    goal = Goal(max_length=pad_multiple, pad_multiple=pad_multiple)
    return find_answer(subject, goal, notebook, policy=_policy(match), accept_predicted=True)


def make_batch_sampler(
    model: Any,
    lengths: Any,
    *,
    pad_multiple: int = 1,
    workload: str = "forward",
    on_miss: str = "calibrate",
    match: str | None = None,
    max_length: int | None = None,
    device: str | None = None,
    extra_tokens_per_sample: int = 0,
    memory_limit_bytes: int | None = None,
    headroom_bytes: int | None = None,
    order: str = "descending",
    target_lengths: Any = None,
    strategy: str | None = None,
    seed: int | None = None,
    across_ranks: bool = True,
    store: ProfileStore | None = None,
    on_event: Listener | None = None,
) -> ProfileBatchSampler:
    """A batch sampler for torch's DataLoader, whose every batch fits `model` on its device.

    The profile is looked up; if there is none for this model, device and workload, or it is settled for shorter
    lengths than these, it is made first (`on_miss="calibrate"`). It is solved for the memory that is free now. A
    database that can't be used is reported once and does without: then the calibration is for this run only.

    Args:
        model: the live model, on its device and in evaluation mode.
        lengths: tokens of each sample, in the data set's order: a list, an array, a tensor, or a column of `datasets`.
        pad_multiple: what the collator rounds lengths up to.
        workload: kind of step that the evaluation loop runs.
        on_miss: `calibrate`; `predict`, from a trace of the step and with a wider headroom; or `error`.
        match: how alike a stored profile must be to answer: `exact`, `compatible` (other versions of torch or of the
            driver, with a wider headroom, or another pad multiple), or `any` (another card too);
            None for `BUDGETDB_MATCH`. What was served and why is in the sampler's `profile.served`.
        max_length: settle for lengths up to this, where longer samples are to come later.
        device: the model's own device by default.
        extra_tokens_per_sample: tokens the model adds to every row by itself, such as a prompt's virtual tokens.
        memory_limit_bytes: what this process may use on the device; see `calibrate`.
        headroom_bytes: what to keep free of it.
        order: `descending`, longest first, or `ascending`.
        target_lengths: tokens of each target, for models with an encoder and a decoder.
        strategy: of packing: `fastest`, the default where the profile knows the seconds of steps, or `fewest` batches.
        seed: shuffles the order of batches, another one in each epoch; None for longest first.
        across_ranks: under `torch.distributed`, one rank for each kind of hardware looks up or calibrates, and all
            go by what it finds, so every rank must call this; False where only one does.
        store: where profiles are kept.
        on_event: called for each thing that happens.

    Raises:
        LengthsError: lengths that make no sense, or are longer than the model takes.
        ProfileNotFoundError: no profile, and `on_miss` is `error`.
        DoesNotFitError: there is a profile, and not one row of it fits what is free now.
        BudgetDBError: whatever `calibrate` raises.
    """
    samples = read_lengths(lengths)
    targets = None if target_lengths is None else read_lengths(target_lengths, count=len(samples))
    longest = _longest(samples, pad_multiple=pad_multiple, extra_tokens=extra_tokens_per_sample)
    if targets is not None:
        longest = max(longest, _longest(targets, pad_multiple=pad_multiple, extra_tokens=0))
    goal = _goal(
        max_length=max(longest, max_length or 0),
        pad_multiple=pad_multiple,
        memory_limit_bytes=memory_limit_bytes,
        headroom_bytes=headroom_bytes,
    )
    job = current_job() if across_ranks else None
    profile, now = _profile_for(
        model,
        goal,
        longest=longest,
        device=device,
        workload=workload,
        on_miss=on_miss,
        policy=_policy(match),
        job=job,
        store=store,
        listen=on_event or _log_event,
    )
    padded = padded_lengths(samples, pad_multiple=pad_multiple, extra_tokens=extra_tokens_per_sample)
    padded_tokens, place = int(padded.sum()), device_of(model, device)

    def solved(free_bytes: int) -> Profile:
        return _less_kept_outputs(_solved_now(profile, free_bytes), padded_tokens)

    return ProfileBatchSampler(
        samples,
        solved(now),
        pad_multiple=pad_multiple,
        extra_tokens_per_sample=extra_tokens_per_sample,
        order=order,
        target_lengths=targets,
        strategy=strategy,
        seed=seed,
        # Ranks of a job have to plan alike, and do not meet again between epochs.
        refresh=(lambda: solved(_free_now(profile, goal, place))) if job is None else None,
    )


def calibrate_token_budget(
    *,
    model: Any,
    lengths: Any,
    pad_multiple: int = 1,
    extra_tokens_per_sample: int = 0,
    floor: int = 256,
    tolerance: int | None = None,
) -> int:
    """The token budget for `TokenBudgetBatchSampler`: `batch_size * (padded_length + extra)` never above it fits.

    It holds at every length up to that of the longest sample, and is a property of the device, not of the data: few
    or short samples do not make it smaller. The profile is stored and found again.

    Args:
        model: the live model, on its device.
        lengths: tokens of each sample.
        pad_multiple: what the collator rounds lengths up to.
        extra_tokens_per_sample: tokens the model adds to every row by itself.
        floor: the smallest budget to accept.
        tolerance: accepted for the sake of existing callers, and ignored.

    Raises:
        ValueError: no lengths, or a `pad_multiple` below 1.
        RuntimeError: not even the shortest sample fits (`DoesNotFitError`), or the budget is below `floor`
            (`BelowFloorError`).
    """
    del tolerance
    samples = read_lengths(lengths)
    if not len(samples):
        raise LengthsError("there are no lengths", next_step="Give the number of tokens of each sample")
    longest = _longest(samples, pad_multiple=pad_multiple, extra_tokens=extra_tokens_per_sample)
    goal = _goal(max_length=longest, pad_multiple=pad_multiple)
    profile, now = _profile_for(
        model,
        goal,
        longest=longest,
        device=None,
        workload=_loss_or_forward(model),
        on_miss="calibrate",
        policy=_policy(None),
        job=current_job(),
        store=None,
        listen=_log_event,
    )
    profile = _solved_now(profile, now)
    solved = solve(
        profile.cost_model,
        usable_bytes=profile.usable_bytes,
        max_length=min(padded_length(longest, pad_multiple), profile.max_length),
        caps=profile.caps,
        pad_multiple=pad_multiple,
    )
    budget = solved.token_budget if solved is not None else 0
    padded = np.sort(padded_lengths(samples, pad_multiple=pad_multiple, extra_tokens=extra_tokens_per_sample))
    rows = profile.caps.rows
    if rows is not None and len(padded) > rows:
        # No batch has more rows than there are samples as short: it binds from the length of the first one too many.
        budget = min(budget, (rows + 1) * int(padded[rows]) - 1)
    if budget < floor:
        raise BelowFloorError(budget, floor)
    return budget


def _longest(samples: Lengths, *, pad_multiple: int, extra_tokens: int) -> int:
    """The longest row as the device sees it: padded, and with what the model adds."""
    if pad_multiple < 1:
        raise UsageError(f"pad_multiple must be at least 1, got {pad_multiple}", next_step="Give a positive number")
    return padded_length(int(samples.max()) if len(samples) else 1, pad_multiple) + extra_tokens


def _goal(
    *,
    max_length: int | None,
    pad_multiple: int,
    memory_limit_bytes: int | None = None,
    headroom_bytes: int | None = None,
    timeout_s: float | None = None,
) -> Goal:
    """The arguments, checked, with the settings where nothing is given."""
    for name, value in (("pad_multiple", pad_multiple), ("max_length", max_length)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}", next_step="Give a positive number")
    settings = read_settings()
    return Goal(
        max_length=max_length,
        pad_multiple=pad_multiple,
        memory_limit_bytes=memory_limit_bytes if memory_limit_bytes is not None else settings.memory_limit,
        headroom_bytes=headroom_bytes if headroom_bytes is not None else settings.headroom,
        timeout_s=timeout_s,
        max_step_s=settings.max_step_s or DEFAULT_MAX_STEP_S,
    )


def _refuse_too_long(longest: int, goal: Goal, subject: Subject) -> None:
    positions = subject.facts.max_positions
    if longest > goal.longest(positions):
        raise LengthsError(
            f"the longest sample takes {longest} tokens once it is padded, and {subject.facts.name} takes "
            f"{goal.longest(positions)}",
            next_step="Truncate the samples when they are tokenised",
        )


def _loss_or_forward(model: Any) -> str:
    """The step to probe for a caller who does not say: with labels where the model has a head that uses them."""
    loss: Workload = WORKLOADS.get("loss")()
    try:
        loss.inputs(model, Shape(1, 8), torch.device("cpu"))
    except UsageError:
        return "forward"
    return "loss"


def _profile_for(
    model: Any,
    goal: Goal,
    *,
    longest: int,
    device: str | None,
    workload: str,
    on_miss: str,
    policy: MatchPolicy,
    job: Job | None,
    store: ProfileStore | None,
    listen: Listener,
) -> tuple[Profile, int]:
    """The profile that answers, found or made, and the bytes that its model may use now.

    In a job, one rank for each kind of hardware finds or makes it, and ranks of one kind go by the least that is free
    on any of them: they must plan the same batches.
    """
    if on_miss not in ON_MISS:
        raise UnknownNameError("on_miss", on_miss, ON_MISS)
    session = open_session(model, device=device, workload=workload)
    subject = session.describe()
    _refuse_too_long(longest, goal, subject)
    answer = partial(
        _found_or_made,
        session,
        subject,
        goal,
        longest=longest,
        on_miss=on_miss,
        policy=policy,
        store=store,
        listen=listen,
        predict=partial(_predicted, model, goal, device=device, workload=workload, listen=listen),
    )
    place = device_of(model, device)
    if job is None:
        profile = answer()
        return profile, _free_now(profile, goal, place)
    hardware = subject.key(goal.pad_multiple).canonical_json() + subject.environment.canonical_json()
    profile = job.agree(hardware, answer)
    return profile, job.least(hardware, _free_now(profile, goal, place))


def _found_or_made(
    session: Session,
    subject: Subject,
    goal: Goal,
    *,
    longest: int,
    on_miss: str,
    policy: MatchPolicy,
    store: ProfileStore | None,
    listen: Listener,
    predict: Callable[[], Profile],
) -> Profile:
    """The profile that answers; a failing store is reported and done without."""
    place = _store_or_default(store)
    notebook = Notebook(place, strict=False)
    known = find_answer(subject, goal, notebook, policy=policy, accept_predicted=on_miss != "calibrate")
    if known is not None:
        listen(CalibrationEvent("known", f"{known.model_name} is known as {known.id}: no forward pass was made"))
        return known
    if on_miss == "error":
        key = subject.key(goal.pad_multiple)
        raise ProfileNotFoundError(
            f"no profile of {subject.facts.name} ({key.workload}, {key.dtype}, {key.attention}, pad multiple "
            f"{key.pad_multiple}) on {key.device_name} up to length {longest} in {place.location} "
            f"(match: {policy.value})",
            next_step='Run `budgetdb.calibrate(model)`, or pass on_miss="calibrate"',
        )
    if on_miss == "predict":
        return predict()
    return make_answer(session, subject, goal, notebook=notebook, listen=listen)


def _predicted(model: Any, goal: Goal, *, device: str | None, workload: str, listen: Listener) -> Profile:
    """A profile from a trace of the live model, for this run only: the next one may as well be made from scratch."""
    place = device_of(model, device)
    profile = predict_for(model, place, goal, workload=parse_workload(workload)).profile
    listen(
        CalibrationEvent(
            "note",
            f"{profile.model_name} was not calibrated here: predicted from a trace, within {profile.error_bound:.0%} "
            f"of what a step adds to the weights",
        )
    )
    served = Served(profile_id=profile.id, source="predicted", policy=MatchPolicy.EXACT.value)
    return profile.as_served(served)


def _policy(match: str | None) -> MatchPolicy:
    return parse_policy(match if match is not None else read_settings().match)


def _free_now(profile: Profile, goal: Goal, device: Device) -> int:
    """Bytes that the profile's model may use at this moment, itself included."""
    others = max(device.allocated_bytes() - profile.resident_bytes, 0)
    # What this process has not loaded yet, its first steps will.
    return max(device.room(goal.memory_limit_bytes).limit_bytes - others - profile.warm_up_bytes, 0)


def _solved_now(profile: Profile, now: int) -> Profile:
    """The profile solved for `now` bytes, never for more than it was made under."""
    if now >= profile.limit_bytes:
        return profile
    _log.log(
        logging.WARNING if now < _NOTABLY_LESS * profile.limit_bytes else logging.INFO,
        "%s is free for %s now, %s when profile %s was made: batches shrink to fit",
        format_bytes(now),
        profile.model_name,
        format_bytes(profile.limit_bytes),
        profile.id,
    )
    return solved_for(profile, now, headroom_bytes=profile.headroom_bytes)


def _less_kept_outputs(profile: Profile, padded_tokens: int) -> Profile:
    """The profile with room for all outputs of the run, where the loop keeps them on the device to the end.

    Raises:
        DoesNotFitError: they leave no room for a single row.
    """
    if parse_workload(profile.key.workload).hold != "all":
        return profile
    per_token = max((probe.held_bytes / probe.shape.tokens for probe in profile.probes if probe.fits), default=0.0)
    kept = int(per_token * padded_tokens)
    _log.info("the outputs of %d padded tokens take %s, kept to the end", padded_tokens, format_bytes(kept))
    try:
        return solved_for(profile, max(profile.limit_bytes - kept, 0), headroom_bytes=profile.headroom_bytes)
    except DoesNotFitError as error:
        raise DoesNotFitError(
            f"the outputs of the whole run take {format_bytes(kept)} of {format_bytes(profile.limit_bytes)}, and leave "
            f"no room for a batch of {profile.model_name}",
            needed_bytes=profile.resident_bytes + kept,
            limit_bytes=profile.limit_bytes,
            next_step="Move each batch's outputs to the CPU, and use hold=previous",
        ) from error


def _store_or_default(store: ProfileStore | None) -> ProfileStore:
    return store if store is not None else ProfileStore()


def _log_event(event: CalibrationEvent) -> None:
    _log.info("%s", event.message)
