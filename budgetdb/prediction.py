"""A profile without running a step: trace it, simulate the allocator, and solve for the card's memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from budgetdb.calibration.calibrator import Goal
from budgetdb.calibration.guess import Guess
from budgetdb.calibration.session import Session
from budgetdb.calibration.subject import Place, Subject, describe_subject
from budgetdb.costs.base import CostModel
from budgetdb.costs.calibrated import ScaledTrace
from budgetdb.costs.exact import ExactCost
from budgetdb.costs.frontier import Solved, max_batch_sizes, solve
from budgetdb.devices.base import Device
from budgetdb.devices.catalogue import CatalogueCard, custom_card, load_catalogue
from budgetdb.devices.choose import choose_device
from budgetdb.devices.simulated import SimulatedCard
from budgetdb.errors import DoesNotFitError, UsageError
from budgetdb.models.facts import display_name, max_positions
from budgetdb.models.load import outline_config, outline_model
from budgetdb.models.spec import ModelSpec
from budgetdb.profiles import Bound, Probe, Profile, Provenance
from budgetdb.settings import format_bytes
from budgetdb.shapes import Shape, padded_length
from budgetdb.tracing.depth import DeepTracer
from budgetdb.tracing.lifetimes import Event
from budgetdb.tracing.targets import Choices, Target, cpu_target
from budgetdb.tracing.traced_cost import TracedCost, traced_cost
from budgetdb.workloads.base import Workload, parse_workload

_log = logging.getLogger(__name__)

# What is not traced on a card: temporaries within kernels, and what another version of them would need. Of what a step
# adds to the weights; see scripts/bench_prediction.py for how far published peaks are from predicted ones.
CARD_ERROR = 0.05
# On a CPU the trace is the allocator's own count, but for buffers within kernels: up to 1.1 % seen of sdpa
# (scripts/gpu_acceptance --device cpu, section 3).
CPU_ERROR = 0.02
# Shares of the longest length whose largest batches are run through the allocator one after another.
_REPLAYED = (1.0, 0.85, 0.7, 0.55, 0.4, 0.28, 0.18, 0.1)
# The margin shrinks the batches, and smaller batches need a smaller one: so often it is halved.
_ROUNDS = 4
# Batches of other lengths than those that are replayed may need a little more.
_SLACK = 1.05
# In a table over many cards fewer batches are replayed, once, and cards whose memory differs by less than this share
# the fragmentation of one of them.
_ALIKE = 0.03
_REPLAYED_IN_TABLES = (1.0, 0.5, 0.125)


@dataclass(frozen=True)
class Margins:
    """What the allocator needs beyond what is alive, in a run of mixed shapes.

    Attributes:
        native_bytes: as it is set.
        expandable_bytes: with `expandable_segments:True`.
    """

    native_bytes: int
    expandable_bytes: int


@dataclass(frozen=True)
class Prediction:
    """A predicted profile, and what it rests on.

    Attributes:
        profile: the profile, of provenance `predicted`.
        traced: the step's cost model before anything was added.
        fragmentation_bytes: what the allocator needs beyond what is alive, in a run of mixed shapes; 0 on a CPU.
        expandable_bytes: the same with `expandable_segments:True`.
        workspace_bytes: what matrix products keep in the allocator.
    """

    profile: Profile
    traced: TracedCost
    fragmentation_bytes: int
    expandable_bytes: int
    workspace_bytes: int

    @property
    def gain_of_expandable(self) -> float:
        """How many more tokens a step would take with `expandable_segments:True`, as a share."""
        room = self.profile.usable_bytes - self.profile.resident_bytes
        saved = self.fragmentation_bytes - self.expandable_bytes
        return max(saved / room, 0.0) if room > 0 else 0.0


def predict(
    model: Any,
    *,
    device: str | None = None,
    memory_bytes: int | None = None,
    capability: str | None = None,
    workload: str = "forward",
    max_length: int | None = None,
    pad_multiple: int = 1,
    dtype: str = "auto",
    attention: str | None = None,
    head: str = "auto",
    trust_remote_code: bool = False,
    memory_limit_bytes: int | None = None,
    headroom_bytes: int | None = None,
) -> Profile:
    """How many tokens `model` takes in one step on a device, without running a step, nor having the device.

    The profile is of provenance `predicted` and says how far it may be off; its headroom covers that. It is not
    stored: give it to `ProfileStore.publish` for that.

    Args:
        model: a name on the hub, a local directory, the path of a `config.json`, a configuration, or a live model.
        device: a card, as torch names it or shorter (`"H100"`); None, `cpu` or `cuda` for this machine's own.
        memory_bytes: all memory of a card that is not in the catalogue.
        capability: its compute capability, like `8.9`.
        workload: kind of step.
        max_length: longest length wanted, in tokens; None for the model's own limit, at most 8 192.
        pad_multiple: what the collator rounds lengths up to.
        dtype: of the weights; not for live models, nor are the next three.
        attention: attention implementation, None for what transformers chooses.
        head: the task, or `auto`.
        trust_remote_code: whether code that comes with the model may run.
        memory_limit_bytes: what the process may use on the device, None for all there is.
        headroom_bytes: what to keep free beside what the prediction's own uncertainty needs.

    Raises:
        UsageError: an argument can't be used, or the card is unknown.
        ModelError: the model can't be found or built; `UntraceableError` when its step can't be traced.
        DoesNotFitError: not even one row fits.
    """
    place = find_place(device, memory_bytes=memory_bytes, capability=capability)
    outline = outline_of(model, dtype=dtype, attention=attention, head=head, trust_remote_code=trust_remote_code)
    goal = Goal(
        max_length=max_length,
        pad_multiple=pad_multiple,
        memory_limit_bytes=memory_limit_bytes,
        headroom_bytes=headroom_bytes,
    )
    return predict_for(outline, place, goal, workload=parse_workload(workload), name=name_of(model)).profile


def name_of(model: Any) -> str | None:
    """What to call a model given by name or path; None for a live one, which knows its own."""
    return display_name(str(model)) if isinstance(model, str | Path) else None


def outline_of(model: Any, *, dtype: str, attention: str | None, head: str, trust_remote_code: bool) -> Any:
    """The model without memory, of a name, a path or a configuration; anything else is a live model and stays.

    Raises:
        ModelError: it can't be found or built.
        UsageError: the options can't be applied to a live model.
    """
    if isinstance(model, str | Path | PretrainedConfig):
        named = model if isinstance(model, str | Path) else getattr(model, "name_or_path", "") or model.model_type
        spec = ModelSpec(
            source=str(named),
            weights="random",
            dtype=dtype,
            attention=attention,
            head=head,
            trust_remote_code=trust_remote_code,
        )
        return outline_config(model, spec) if isinstance(model, PretrainedConfig) else outline_model(spec)
    if dtype != "auto" or attention is not None or head != "auto":
        raise UsageError(
            "dtype, attention and head can't be applied to a live model",
            next_step="Build the model so, or give its name",
        )
    return model


def find_place(device: str | None, *, memory_bytes: int | None = None, capability: str | None = None) -> Place:
    """The device to predict for: a card of the catalogue, one described by its memory, or one of this machine.

    Raises:
        UsageError: neither is known; the message offers the nearest names.
        DeviceError: a device of this machine is asked for that it does not have.
    """
    if memory_bytes is not None or capability is not None:
        if memory_bytes is None or capability is None:
            raise UsageError(
                "a card is described by its memory and its compute capability",
                next_step="Give both: --memory 48GiB --capability 8.9",
            )
        return SimulatedCard(custom_card(memory_bytes, capability, name=device))
    if device is None or device.partition(":")[0] in ("auto", "cpu", "cuda", "accelerator", "xpu", "mps"):
        return place_of(choose_device(device))
    return SimulatedCard.named(device)


def place_of(device: Device) -> Place:
    """A device of this machine, to predict for: what is free on it now counts."""
    return device


def predict_for(
    model: Any,
    place: Place,
    goal: Goal,
    *,
    workload: Workload,
    name: str | None = None,
    traced: TracedCost | None = None,
    margins: Margins | None = None,
    quick: bool = False,
) -> Prediction:
    """Predict the profile of `model`, live or without memory, on `place`.

    Args:
        model: what to trace.
        place: the device, there or only known.
        goal: lengths, limit and headroom.
        workload: the kind of step.
        name: what to call the model.
        traced: its traces for the same kernels, where they were made before.
        margins: what fragmentation takes, where it was simulated for a card much like this.
        quick: simulate the allocator over fewer batches, and not with expandable segments.

    Raises:
        UntraceableError: the model can't be traced.
        DoesNotFitError: not even one row fits.
    """
    subject = describe_subject(model, device=place, workload=workload, name=name)
    longest = goal.longest(subject.facts.max_positions)
    if traced is None:
        traced = trace_for(model, place, workload, longest=longest, pad_multiple=goal.pad_multiple)
    simulated = _simulated(place)
    workspace = sum(simulated.workspaces) if simulated is not None else 0
    room = place.room(goal.memory_limit_bytes)
    solver = _Solver(
        subject, goal, traced, cost=_cost(traced, workspace), longest=longest, limit_bytes=room.limit_bytes
    )
    default = place.default_headroom_bytes(room.limit_bytes) if goal.headroom_bytes is None else goal.headroom_bytes
    error = max(CARD_ERROR if simulated is not None else CPU_ERROR, traced.error)
    base = solver.uncertain_bytes(default, error=error)
    if margins is None:
        margins = solver.margins(base, simulated, workload, quick=quick) if simulated is not None else Margins(0, 0)
    headroom = base + margins.native_bytes
    solved = solver.solve(headroom)
    profile = Profile(
        key=subject.key(goal.pad_multiple),
        environment=subject.environment,
        model_name=subject.facts.name[:512],
        cost=solver.cost.record(),
        caps=subject.caps,
        limit_bytes=room.limit_bytes,
        headroom_bytes=headroom,
        overhead_bytes=room.overhead_bytes,
        resident_bytes=traced.resident_bytes,
        max_length=solved.max_length,
        bound=Bound.MAX_LENGTH if goal.is_cut(subject.facts.max_positions) else solved.bound,
        token_budget=solved.token_budget,
        frontier=solved.frontier,
        provenance=Provenance.PREDICTED,
        error_bound=error,
        flags=subject.facts.flags,
        created_at=datetime.now(UTC),
    )
    return Prediction(profile, traced, margins.native_bytes, margins.expandable_bytes, workspace)


def trace_for(model: Any, place: Place, workload: Workload, *, longest: int, pad_multiple: int) -> TracedCost:
    """The step's cost model as traces of it on `place` give it.

    Raises:
        UntraceableError: the model can't be traced.
    """
    with DeepTracer(model, workload, target_of(place)) as tracer:
        return traced_cost(tracer.trace, longest=longest, pad_multiple=pad_multiple)


def target_of(place: Place) -> Target:
    """What to trace for."""
    simulated = _simulated(place)
    return simulated.target() if simulated is not None else cpu_target()


def predict_everywhere(
    model: Any, goal: Goal, *, workload: Workload, name: str | None = None, cards: Iterable[CatalogueCard] | None = None
) -> list[tuple[CatalogueCard, Prediction | DoesNotFitError]]:
    """The prediction for each card of the catalogue, or why nothing fits it; cards with equal kernels share traces."""
    shared: list[tuple[Choices, TracedCost]] = []
    depth_is_known = False
    simulated: dict[object, Margins] = {}
    rows: list[tuple[CatalogueCard, Prediction | DoesNotFitError]] = []
    for card in cards if cards is not None else load_catalogue().cards:
        place = SimulatedCard(card)
        target = place.target()
        rules = target.card or place.rules()
        known = next((number for number, (choices, _) in enumerate(shared) if choices.hold_for(rules)), None)
        if known is None:
            longest = goal.longest(max_positions(model))
            with DeepTracer(model, workload, target, depth_is_known=depth_is_known) as tracer:
                traced = traced_cost(tracer.trace, longest=longest, pad_multiple=goal.pad_multiple)
            # How depth adds up is the model's affair: it is compared on the first card.
            depth_is_known = tracer.is_shallow
            known = len(shared)
            shared.append((target.choices, traced))
        size = (known, round(math.log(card.total_bytes) / math.log1p(_ALIKE)))
        try:
            found = predict_for(
                model,
                place,
                goal,
                workload=workload,
                name=name,
                traced=shared[known][1],
                margins=simulated.get(size),
                quick=True,
            )
        except DoesNotFitError as error:
            rows.append((card, error))
            continue
        simulated.setdefault(size, Margins(found.fragmentation_bytes, found.expandable_bytes))
        rows.append((card, found))
    return rows


def guess_for(session: Session, subject: Subject, goal: Goal) -> Guess | None:
    """What a trace of the session's model says before anything is probed; None where it can't be traced, or need not.

    A trace is a help and no condition: whatever goes wrong with it is logged, and the calibration does without.
    """
    try:
        outline = session.outline()
        if outline is None:
            return None
        model, device = outline
        workload, longest = parse_workload(subject.workload), goal.longest(subject.facts.max_positions)
        traced = trace_for(model, device, workload, longest=longest, pad_multiple=goal.pad_multiple)
        margin = 0
        if _simulated(device) is not None:
            margin = predict_for(model, device, goal, workload=workload, traced=traced).fragmentation_bytes
    except Exception as error:  # a model's own code runs here, on tensors it was not written for
        _log.info("calibrating without a trace: %s", error)
        return None
    if not isinstance(traced.cost, ExactCost):
        return Guess(traced.cost, None, f"traced {traced.traces} shapes: {traced.reason}")
    trace = ScaledTrace.of(traced.cost, traced.resident_bytes)
    return Guess.of(trace, margin_bytes=margin, note=f"traced exactly, from {traced.traces} shapes")


def _simulated(place: Place) -> SimulatedCard | None:
    """The card to simulate for `place`, None for a CPU."""
    if isinstance(place, SimulatedCard):
        return place
    is_card = isinstance(place, Device) and place.torch_device.type == "cuda"
    return SimulatedCard.like(place) if is_card and isinstance(place, Device) else None


def _cost(traced: TracedCost, workspace_bytes: int) -> CostModel:
    """The trace's cost model, with what matrix products keep."""
    if isinstance(traced.cost, ExactCost):
        return ScaledTrace.of(traced.cost, traced.resident_bytes).unscaled(beside_bytes=workspace_bytes)
    return traced.cost


@dataclass(frozen=True)
class _Solver:
    subject: Subject
    goal: Goal
    traced: TracedCost
    cost: CostModel
    longest: int
    limit_bytes: int

    def solve(self, headroom_bytes: int, probes: Sequence[Probe] = ()) -> Solved:
        """The frontier with so much kept free."""
        solved = solve(
            self.cost,
            usable_bytes=max(self.limit_bytes - headroom_bytes, 0),
            max_length=self.longest,
            caps=self.subject.caps,
            pad_multiple=self.goal.pad_multiple,
            probes=probes,
        )
        if solved is None:
            raise DoesNotFitError(
                f"{self.subject.facts.name} takes {format_bytes(self.traced.resident_bytes)} for its weights, and "
                f"{self.subject.device_name} has {format_bytes(max(self.limit_bytes - headroom_bytes, 0))} to use",
                needed_bytes=self.traced.resident_bytes,
                limit_bytes=self.limit_bytes,
                next_step="Use a smaller dtype, or a card with more memory",
            )
        return solved

    def uncertain_bytes(self, default_bytes: int, *, error: float) -> int:
        """What to keep free when a step's peak above the weights may be `error` higher than predicted."""
        above = max(self.limit_bytes - default_bytes - self.cost.peak_bytes(Shape(0, 1)), 0)
        return default_bytes + int(error * above / (1 + error))

    def margins(self, base_bytes: int, simulated: SimulatedCard, workload: Workload, *, quick: bool) -> Margins:
        """What fragmentation takes of a run of the largest batches, with the allocator as it is set and expandable."""

        def taken(steps: Sequence[Sequence[Event]], *, expandable: bool | None = None) -> int:
            return simulated.fragmentation_bytes(
                steps, resident_bytes=self.traced.resident_bytes, hold=workload.hold, expandable=expandable
            )

        if quick:
            margin = taken(self._worst_steps(base_bytes, _REPLAYED_IN_TABLES))
            return Margins(margin, margin)

        def is_enough(margin: int) -> bool:
            steps = self._worst_steps(base_bytes + margin, _REPLAYED)
            return simulated.is_enough(margin, steps, resident_bytes=self.traced.resident_bytes, hold=workload.hold)

        # The more is kept free, the smaller are the batches, and the less they need, as a rule.
        least, margin = 0, taken(self._worst_steps(base_bytes, _REPLAYED))
        while not is_enough(margin):
            least, margin = margin, margin + margin // 4 + 1
        for _ in range(_ROUNDS):
            middle = (least + margin) // 2
            if is_enough(middle):
                margin = middle
            else:
                least = middle
        margin = int(_SLACK * margin)
        steps = self._worst_steps(base_bytes + margin, _REPLAYED)
        return Margins(margin, min(int(_SLACK * taken(steps, expandable=True)), margin))

    def _worst_steps(self, headroom_bytes: int, shares: Sequence[float]) -> list[list[Event]]:
        """The largest batches of a run of mixed lengths, longest first."""
        import numpy as np

        longest = self.solve(headroom_bytes).max_length
        padded = (min(padded_length(int(share * longest), self.goal.pad_multiple), longest) for share in shares)
        lengths = sorted({self.traced.scripted_length(length) for length in padded}, reverse=True)
        sizes = max_batch_sizes(
            self.cost,
            np.array(lengths, dtype=np.int64),
            usable_bytes=max(self.limit_bytes - headroom_bytes, 0),
            caps=self.subject.caps,
        )
        return [self.traced.step(Shape(int(size), length)) for size, length in zip(sizes, lengths, strict=True) if size]
