"""Which storages are born and die, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as module_hooks

from budgetdb.tracing.lifetimes import Event, Moment
from budgetdb.tracing.tracker import LifetimeTracker
from budgetdb.tracing.values import give_value, value_of


@contextmanager
def tracked(*, model: object = None, resident: tuple[torch.Tensor, ...] = ()) -> Iterator[LifetimeTracker]:
    tracker = LifetimeTracker("cpu", model=model, resident=resident)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), tracker:
        yield tracker


def events_of(step: Callable[[], object]) -> list[tuple[int, int]]:
    """What happens while `step` runs; what it returns is alive to the end."""
    with tracked() as tracker:
        kept = step()
        events = [tuple(event) for event in tracker.events]
        del kept
    return events


def made() -> torch.Tensor:
    return torch.empty(10)  # 40 bytes


@pytest.mark.parametrize(
    "more",
    [
        lambda x: x.view(2, 5),
        lambda x: x[3:],
        lambda x: x.unbind(0),
        lambda x: x.detach(),
        lambda x: x.expand(7, 10),
        lambda x: x.as_strided((2, 3), (1, 1)),
        lambda x: torch.relu_(x),
        lambda x: x.add_(1),
        lambda x: x.t_(),
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float32),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x[2:4].zero_(),
        lambda x: x.set_(x),
        lambda x: x.data,
    ],
)
def test_views_aliases_and_results_in_place_are_no_births(more: Callable[[torch.Tensor], object]) -> None:
    def step() -> object:
        first = made()
        return first, more(first)

    births = [(storage, nbytes) for storage, nbytes in events_of(step) if nbytes > 0]
    # The number in `add` is a tensor to torch, too.
    assert [birth for birth in births if birth[1] > 8] == [(0, 40)]


def test_a_view_keeps_its_storage_alive() -> None:
    with tracked() as tracker:
        whole = made()
        part = whole[:1]
        del whole
        assert tracker.events == [Event(0, 40)]
        del part
        assert tracker.events == [Event(0, 40), Event(0, -40)]


def test_a_storage_is_born_with_all_its_bytes() -> None:
    assert events_of(lambda: torch.empty_strided((2, 3), (100, 1))) == [(0, 4 * 103)]
    assert events_of(lambda: made().to(torch.bfloat16)) == [(0, 40), (1, 20), (0, -40)]


def test_an_address_that_is_used_again_is_another_storage() -> None:
    def step() -> None:
        for _ in range(20):
            made()

    events = events_of(step)
    assert events == [event for number in range(20) for event in ((number, 40), (number, -40))]


def test_bytes_alive_never_fall_below_none_and_end_there() -> None:
    with tracked() as tracker:
        x = torch.randn(8, 16)
        for _ in range(3):
            x = torch.softmax(x @ x.T, dim=-1) @ x
        del x
    alive = list(accumulate(event.nbytes for event in tracker.events))
    assert min(alive) >= 0
    assert alive[-1] == 0


@pytest.mark.parametrize(
    "grow",
    [lambda x: x.resize_(100), lambda x: (x.untyped_storage().resize_(400), x.view(-1))],
    ids=["tensor", "storage"],
)
def test_a_storage_that_is_resized_dies_and_is_born_anew(grow: Callable[[torch.Tensor], object]) -> None:
    with tracked() as tracker:
        x = made()
        grow(x)
        assert tracker.events == [Event(0, 40), Event(0, -40), Event(1, 400)]
        assert tracker.moments[1] == Moment("", "free")
        del x
        assert tracker.events[3:] == [Event(1, -400)]


def test_a_storage_that_is_emptied_is_gone_until_it_is_filled_again() -> None:
    with tracked() as tracker:
        x = made()
        x.untyped_storage().resize_(0)
        tracker.see(x, "resize")
        assert tracker.events == [Event(0, 40), Event(0, -40)]
        x.untyped_storage().resize_(40)
        tracker.see(x, "resize")
        del x
        assert tracker.events[2:] == [Event(1, 40), Event(1, -40)]


def test_what_is_resident_does_not_count() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        weight = torch.empty(4, 10)
        tracker = LifetimeTracker("cpu", resident=[weight])
        with torch.no_grad(), tracker:
            view = weight.view(-1)
            result = weight @ torch.empty(10, 2)
        assert [event.nbytes for event in tracker.events if event.nbytes > 0] == [80, 32]
        del view, result, mode


def test_only_one_kind_of_device_counts() -> None:
    def step() -> object:
        return torch.empty(10, device="meta"), torch.empty(0), made()

    assert events_of(step) == [(0, 40)]


def test_sparse_tensors_are_left_out() -> None:
    def step() -> object:
        places = torch.zeros(1, 2, dtype=torch.int64)
        return torch.sparse_coo_tensor(places, torch.zeros(2), (10,), check_invariants=False)

    assert sum(nbytes for _, nbytes in events_of(step)) == 2 * 8 + 2 * 4


class Layers(nn.Module):
    """Modules within modules, one of which may raise."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(10, 3), Raises(error))
        self.caught = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + x
        try:
            y = self.outer(y)
        except LookupError:
            self.caught = True
        return y * y


class Raises(nn.Module):
    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return -x


def test_a_moment_is_an_operation_in_the_innermost_module() -> None:
    model = Layers()
    with tracked(model=model) as tracker:
        model(torch.empty(2, 10))
    births = [moment for moment, event in zip(tracker.moments, tracker.events, strict=True) if event.nbytes > 0]
    wanted = [
        Moment("", "aten.empty.memory_format"),
        Moment("", "aten.add.Tensor"),
        Moment("outer.0", "aten.addmm.default"),
        Moment("outer.1", "aten.neg.default"),
        Moment("", "aten.mul.Tensor"),
    ]
    # The weights are no fakes here, and are born where they are first seen.
    assert [moment for moment in births if moment in wanted] == wanted
    assert str(births[-1]) == "aten.mul.Tensor"
    assert str(wanted[2]) == "aten.addmm.default in outer.0"


def test_an_error_that_the_model_catches_leaves_the_module_it_was_in() -> None:
    model = Layers(LookupError("no such thing"))
    with tracked(model=model) as tracker:
        model(torch.empty(2, 10))
        assert tracker.module == ""
    assert model.caught
    assert Moment("", "aten.mul.Tensor") in tracker.moments


def test_where_an_error_comes_from() -> None:
    error = ZeroDivisionError("deep inside")
    model = Layers(error)
    with tracked(model=model) as tracker:
        with pytest.raises(ZeroDivisionError):
            model(torch.empty(2, 10))
        assert tracker.where_raised(error) == Moment("outer.1", "")
        assert tracker.where_raised(ValueError("another")) == Moment("", "")
        with pytest.raises(RuntimeError) as caught:
            model(torch.empty(2, 11))
        assert tracker.where_raised(caught.value) == Moment("outer.0", "aten.addmm.default")


def test_nothing_is_left_behind_that_runs_with_other_modules() -> None:
    def hooks() -> tuple[int, ...]:
        return (
            len(module_hooks._global_forward_pre_hooks),
            len(module_hooks._global_forward_hooks),
            len(module_hooks._global_forward_hooks_always_called),
        )

    before = hooks()
    with tracked() as tracker:
        assert hooks() != before
        made()
    assert hooks() == before
    with pytest.raises(ZeroDivisionError), tracked():
        raise ZeroDivisionError
    assert hooks() == before
    known = len(tracker.events)
    torch.empty(3)
    assert len(tracker.events) == known


def test_an_operation_that_depends_on_values_is_answered_where_they_are_known() -> None:
    value = torch.tensor([[1, 1, 0], [1, 0, 0]])
    with tracked():
        mask = give_value(torch.empty(2, 3, dtype=torch.int64), value)
        places = mask.nonzero()
        assert places.shape == (3, 2)
        known = value_of(places)
        assert known is not None
        assert known.tolist() == [[0, 0], [0, 1], [1, 0]]
        assert places.sum().item() == 2
        with pytest.raises(Exception, match=r"aten\.nonzero\.default"):
            torch.randn(4).nonzero()


def test_an_answer_is_born_like_any_other_tensor() -> None:
    def step() -> Any:
        mask = torch.ones(5, dtype=torch.int64)
        return mask, mask.nonzero()

    assert events_of(step) == [(0, 40), (1, 40)]
