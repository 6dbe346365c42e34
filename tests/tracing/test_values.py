"""What is known of small tensors, and what is not believed any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from budgetdb.tracing import values
from budgetdb.tracing.tracker import LifetimeTracker
from budgetdb.tracing.values import give_value, value_of

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.fixture(autouse=True)
def _tracing() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), LifetimeTracker("cpu"):
        yield


def known(tensor: torch.Tensor) -> list[object]:
    found = value_of(tensor)
    assert found is not None
    assert found.shape == tensor.shape
    return found.tolist()  # type: ignore[no-any-return]


def mask() -> torch.Tensor:
    with no_dispatch():  # a value is a real tensor
        value = MASK.clone()
    return give_value(torch.empty_like(MASK), value)


def unknown(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of which nothing is known, such as an activation."""
    tensor = torch.randn(*size).to(dtype)
    assert value_of(tensor) is None
    return tensor


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda m: m.all().item(), False),
        (lambda m: bool(m.any()), True),
        (lambda m: m.sum().item(), 3),
        (lambda m: int(m.sum(dim=-1).max()), 2),
        (lambda m: (m == 1).all().item(), False),
        (lambda m: torch.equal(m, m.clone()), True),
        (lambda m: m[0, 1].item(), 1),
        (lambda m: m.tolist(), MASK.tolist()),
        (lambda m: float(m.to(torch.float16).mean()), 0.5),
        (lambda m: bool((m.cumsum(-1).diff(dim=-1) < 0).any()), False),
        (lambda m: torch.is_nonzero(m.max()), True),
    ],
)
def test_a_question_about_a_mask_is_answered(question: Callable[[torch.Tensor], object], answer: object) -> None:
    assert question(mask()) == answer


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (lambda m: m.nonzero(), [[0, 0], [0, 1], [1, 0]]),
        (lambda m: m[m > 0], [1, 1, 1]),
        (lambda m: m.flatten().nonzero(as_tuple=True)[0], [0, 1, 3]),
        (lambda m: torch.unique(m), [0, 1]),
        (lambda m: torch.masked_select(m, m == 0), [0, 0, 0]),
        (lambda m: torch.repeat_interleave(torch.arange(3), m[0]), [0, 1]),
    ],
)
def test_a_shape_that_depends_on_values_is_the_real_one(
    select: Callable[[torch.Tensor], torch.Tensor], expected: list[object]
) -> None:
    assert known(select(mask())) == expected


def test_what_is_made_from_nothing_is_known() -> None:
    assert known(torch.arange(3) + 1) == [1, 2, 3]
    assert known(torch.zeros(2).bool()) == [False, False]
    assert known(torch.ones(2, 2).tril()) == [[1, 0], [1, 1]]
    assert known(torch.full((2,), 7, device="cpu")) == [7, 7]


def test_what_is_random_or_of_an_activation_is_unknown() -> None:
    for tensor in (torch.randn(3), torch.randint(5, (3,)), torch.zeros(3).bernoulli_(0.5), unknown(3) * 0):
        assert value_of(tensor) is None
        with pytest.raises(DataDependentOutputException):
            tensor.sum().item()


def test_real_tensors_have_no_value_of_their_own() -> None:
    assert value_of(MASK) is None
    assert value_of("text") is None
    assert value_of(None) is None


def test_large_tensors_are_not_followed() -> None:
    most = values._MOST_ELEMENTS
    assert value_of(torch.zeros(most)) is not None
    assert value_of(torch.zeros(most + 1)) is None
    assert value_of(mask()[0, :2].expand(most, 2)) is None


def test_known_writes_are_followed_through_views() -> None:
    whole = mask()
    row, transposed = whole[1], whole.t()
    row.fill_(5)
    whole[0, 0] += 8
    assert known(whole) == [[9, 1, 0], [5, 5, 5]]
    assert known(transposed) == [[9, 5], [1, 5], [0, 5]]
    whole.masked_fill_(whole == 5, 0)
    assert known(row) == [0, 0, 0]
    torch._foreach_add_([whole], 1)
    assert known(row) == [1, 1, 1]


def test_what_the_caller_gave_is_the_value_that_changes() -> None:
    tensor = mask()
    given = value_of(tensor)
    tensor.zero_()
    assert given is value_of(tensor)
    assert known(tensor) == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.copy_(unknown(2, 3)),
        lambda m: m.add_(unknown(2, 3)),
        lambda m: m[0].mul_(unknown(3)),
        lambda m: m.t().copy_(unknown(3, 2)),
        lambda m: m.masked_fill_(unknown(2, 3, dtype=torch.bool), 0),
        lambda m: m.index_put_((torch.tensor([0]),), unknown(1, 3)),
        lambda m: m.scatter_(1, unknown(2, 3), 0),
        lambda m: torch.add(unknown(2, 3), 1, out=m),
        lambda m: torch._foreach_add_([m], [unknown(2, 3)]),
        lambda m: m.random_(5),
        lambda m: m.expand(values._MOST_ELEMENTS, 2, 3)[0].copy_(unknown(2, 3)),
        lambda m: write_twice(m, unknown(2, 3)),
    ],
)
def test_what_something_unknown_was_written_into_is_forgotten(write: Callable[[torch.Tensor], object]) -> None:
    tensor, other = mask(), mask()
    view, copied = tensor[:, :1], tensor.clone()
    write(tensor)
    for forgotten in (tensor, view, tensor[0], tensor + 1, view.flatten()):
        assert value_of(forgotten) is None
    with pytest.raises(DataDependentOutputException):
        view.sum().item()
    assert known(copied) == MASK.tolist()
    assert known(other) == MASK.tolist()


@torch.library.custom_op("budgetdb_tests::write_twice", mutates_args=("target",))
def write_twice(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source * 2)


@write_twice.register_fake
def _(target: torch.Tensor, source: torch.Tensor) -> None: ...


def test_a_kernel_from_outside_runs_on_what_is_known() -> None:
    tensor = mask()
    write_twice(tensor, mask())
    assert known(tensor) == [[2, 2, 0], [2, 0, 0]]


@torch.library.custom_op("budgetdb_tests::fails", mutates_args=("target",))
def fails(target: torch.Tensor) -> None:
    raise AssertionError("not on this machine")


@fails.register_fake
def _(target: torch.Tensor) -> None: ...


def test_a_kernel_that_fails_leaves_its_target_unknown() -> None:
    tensor = mask()
    fails(tensor)
    assert value_of(tensor) is None


def test_sparse_results_are_unknown() -> None:
    sparse = mask().to_sparse()
    assert value_of(sparse) is None
    assert sparse._nnz() == 3 or value_of(sparse) is None


def test_values_are_no_part_of_the_random_state() -> None:
    before = torch.random.get_rng_state()
    torch.randn(3)
    mask().float().uniform_()
    torch.dropout(mask().float(), 0.5, train=True)
    after = torch.random.get_rng_state()
    with no_dispatch():
        assert torch.equal(before, after)
