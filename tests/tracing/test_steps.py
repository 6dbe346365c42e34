"""The same step again, made up from the first and really run."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from traced_models import WORKLOADS, small_model

from budgetdb.shapes import Shape
from budgetdb.tracing.fake_models import fake_model
from budgetdb.tracing.lifetimes import Event, Moment
from budgetdb.tracing.steps import Steps
from budgetdb.tracing.tracker import LifetimeTracker

HOLDS = ("none", "previous", "all")
CPU = torch.device("cpu")
# A batch of two tensors, a temporary, and an output; the step also frees one of the batch's tensors.
BATCH = 2
STEP = [Event(0, 10), Event(1, 20), Event(2, 300), Event(3, 7), Event(2, -300)]


def steps(events: list[Event], batch: int = BATCH) -> Steps:
    return Steps(events, [Moment("", "inputs" if i < batch else f"op{i}") for i in range(len(events))])


def alive(events: list[Event]) -> list[int]:
    return list(accumulate(event.nbytes for event in events))


@pytest.mark.parametrize(
    ("hold", "between", "after"),
    [
        ("none", [Event(3, -7)], []),
        ("previous", [], [Event(3, -7)]),
        ("all", [], []),
    ],
)
def test_the_first_outputs_go_when_the_loop_lets_go_of_them(
    hold: str, between: list[Event], after: list[Event]
) -> None:
    twice = steps(STEP).repeated(BATCH, hold=hold)
    again = [Event(4, 300), Event(5, 7), Event(4, -300)]
    assert twice.events == [*STEP, *between, *again, *after]
    assert len(twice.moments) == len(twice.events)
    assert [str(moment) for moment in twice.moments if moment.operation == "free"] == ["free"] * len(between + after)
    first = twice.events.index(Event(4, 300))
    assert twice.moments[first] == Moment("", "op2")


def test_what_is_left_are_the_outputs() -> None:
    assert steps(STEP).left(BATCH) == {3: 7}
    assert steps(STEP).repeated(BATCH, hold="all").left(BATCH) == {3: 7, 5: 7}
    assert steps(STEP).repeated(BATCH, hold="previous").left(BATCH) == {5: 7}
    assert steps([]).left(0) == {}


def test_a_step_that_makes_and_keeps_nothing() -> None:
    only_batch = steps(STEP[:BATCH])
    for hold in HOLDS:
        assert only_batch.repeated(BATCH, hold=hold) == only_batch


@st.composite
def some_steps(draw: st.DrawFn) -> tuple[list[Event], int]:
    """A batch, then births and deaths in any order, each storage of the step freed at most once."""
    batch = draw(st.integers(0, 3))
    events = [Event(number, draw(st.integers(1, 99))) for number in range(batch)]
    living: list[Event] = []
    births = batch
    for is_birth in draw(st.lists(st.booleans(), max_size=20)):
        if is_birth or not living:
            living.append(Event(births, draw(st.integers(1, 99))))
            events.append(living[-1])
            births += 1
        else:
            gone = living.pop(draw(st.integers(0, len(living) - 1)))
            events.append(Event(gone.storage, -gone.nbytes))
    return events, batch


@given(made=some_steps(), hold=st.sampled_from(HOLDS))
def test_storages_are_numbered_in_the_order_of_birth_and_freed_once(made: tuple[list[Event], int], hold: str) -> None:
    events, batch = made
    once = steps(events, batch)
    twice = once.repeated(batch, hold=hold).events
    births = [event.storage for event in twice if event.nbytes > 0]
    assert births == list(range(len(births)))
    living: dict[int, int] = {}
    for event in twice:
        if event.nbytes > 0:
            living[event.storage] = event.nbytes
        else:
            assert living.pop(event.storage) == -event.nbytes
    held = sum(once.left(batch).values())
    kept = {"none": 1, "previous": 1, "all": 2}[hold]
    assert sum(living.values()) == sum(event.nbytes for event in events[:batch]) + kept * held


@given(made=some_steps())
def test_holding_more_takes_no_less(made: tuple[list[Event], int]) -> None:
    events, batch = made
    peaks = [max(alive(steps(events, batch).repeated(batch, hold=hold).events), default=0) for hold in HOLDS]
    assert peaks == sorted(peaks)


def test_steps_are_alike_whichever_of_two_tensors_goes_first() -> None:
    made = [Event(0, 1), Event(1, 2)]
    one = steps([*made, Event(0, -1), Event(1, -2), Event(2, 5)])
    assert one.is_like(steps([*made, Event(1, -2), Event(0, -1), Event(2, 5)]))
    assert not one.is_like(steps([*made, Event(1, -2), Event(2, 5), Event(0, -1)]))
    assert not one.is_like(steps([*made, Event(0, -1), Event(1, -2), Event(2, 6)]))
    assert not one.is_like(steps([*made, Event(0, -1), Event(1, -2)]))


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize(
    ("name", "attention", "workload"),
    [
        ("bert", "eager", ("forward", "padded")),
        ("gpt2", "sdpa", ("loss", "ones")),
        ("llama", "sdpa", ("forward", "none")),
        ("modernbert", "sdpa", ("embed", "padded")),
        ("t5", "eager", ("loss", "padded")),
    ],
)
def test_a_second_step_made_up_is_the_one_really_run(
    name: str, attention: str, workload: tuple[str, str], hold: str
) -> None:
    model, mode = small_model(name, attention=attention), FakeTensorMode(allow_non_fake_inputs=True)
    step = WORKLOADS[workload](hold=hold)
    inputs = step.inputs(model, Shape(2, 24), CPU)
    with fake_model(model, mode, CPU) as (fake, weights):
        tracker = LifetimeTracker("cpu", resident=weights, model=fake)
        with mode, tracker:
            batch = {name: torch.empty_like(tensor, device="cpu") for name, tensor in inputs.items()}
            made = len(tracker.events)
            outputs: Any = step.step(fake, batch)
            once = Steps(list(tracker.events), list(tracker.moments))
            everything = [outputs] if hold == "all" else []
            if hold == "none":
                outputs = None
            outputs = step.step(fake, batch)
            really = Steps(list(tracker.events), list(tracker.moments))
            del everything, outputs
    twice = once.repeated(made, hold=hold)
    assert twice.is_like(really)
    assert max(alive(twice.events)) == max(alive(really.events))
    assert alive(twice.events)[-1] == alive(really.events)[-1]
    assert sorted(once.left(made).values()) == sorted(
        nbytes for storage, nbytes in once.left(0).items() if storage >= made
    )
