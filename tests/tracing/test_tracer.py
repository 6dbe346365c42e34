"""A trace of any model, what it leaves behind (nothing), and what it says where it can't be made."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_hooks
from traced_models import WORKLOADS, small_model
from transformers.utils import import_utils
from transformers.utils import logging as transformers_logging

from budgetdb.errors import UntraceableError, UsageError
from budgetdb.models.facts import resident_bytes
from budgetdb.shapes import Shape
from budgetdb.tracing.attention_call import CardRules
from budgetdb.tracing.lifetimes import Trace
from budgetdb.tracing.targets import Target, card_target, cpu_target
from budgetdb.tracing.tracer import Tracer
from budgetdb.workloads.base import Workload
from budgetdb.workloads.forward import ForwardWorkload

H100 = CardRules(capability=(9, 0), cudnn=92_000)
SHAPE = Shape(2, 16)


def traced(
    model: Any, shape: Shape = SHAPE, *, workload: Workload | None = None, target: Target | None = None
) -> Trace:
    with Tracer(model, workload or ForwardWorkload(), target or cpu_target()) as tracer:
        return tracer.trace(shape)


class Embeds(nn.Module):
    """An embedding, and a module after it that does what it is told."""

    def __init__(self, then: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.inner = Does(then)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> object:
        return self.inner(self.embedding(input_ids))


class Does(nn.Module):
    def __init__(self, then: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.then = then

    def forward(self, x: torch.Tensor) -> object:
        return self.then(x)


HIDDEN = 2 * 16 * 8 * 4
INPUTS = 2 * 2 * 16 * 8


def test_a_step_by_hand() -> None:
    model = Embeds(lambda x: x + x)
    trace = traced(model)
    assert trace.resident_bytes == 100 * 8 * 4
    # The ids, the mask, the first step's output, and in the second step the embeddings and the sum.
    assert trace.transient_bytes == INPUTS + 3 * HIDDEN
    assert trace.peak_bytes == trace.resident_bytes + trace.transient_bytes
    assert str(trace.peak_moment) == "aten.add.Tensor in inner"
    assert trace.held_bytes == HIDDEN
    assert trace.batch_length == 2
    assert [event.nbytes for event in trace.step_events] == [INPUTS // 2, INPUTS // 2, HIDDEN, HIDDEN, -HIDDEN]
    assert traced(model, workload=ForwardWorkload(hold="none")).transient_bytes == INPUTS + 2 * HIDDEN
    assert traced(model, workload=ForwardWorkload(hold="all")).transient_bytes == INPUTS + 3 * HIDDEN


@pytest.mark.parametrize(
    ("then", "births"),
    [
        (lambda x: x.view(-1).relu_().view_as(x), 1),
        (lambda x: x.add_(1).mul_(2), 1),
        (lambda x: (x, x[0], x.transpose(0, 1)), 1),
        (lambda x: {"a": x, "b": x.contiguous()}, 1),
        (lambda x: x.transpose(0, 1).contiguous(), 2),
    ],
)
def test_views_and_results_in_place_count_once(then: Callable[[torch.Tensor], object], births: int) -> None:
    step = traced(Embeds(then)).step_events
    # Numbers in a calculation are tensors to torch, too, of a few bytes.
    assert sum(event.nbytes >= HIDDEN for event in step[2:]) == births


def test_tied_weights_count_once() -> None:
    model = small_model("t5")
    trace = traced(model)
    assert trace.resident_bytes == resident_bytes(model)
    assert trace.resident_bytes < sum(each.nbytes for each in model.state_dict().values())


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_shapes_in_any_order_have_the_trace_of_a_fresh_tracer(name: str) -> None:
    model = small_model(name)
    shapes = [Shape(2, 24), Shape(1, 100), Shape(2, 24), Shape(5, 16)]
    with Tracer(model, ForwardWorkload(), cpu_target()) as tracer:
        traces = [tracer.trace(shape) for shape in shapes]
        assert tracer.repeats
    assert traces[0] == traces[2]
    assert traces == [traced(model, shape) for shape in shapes]


class Caches(nn.Module):
    """Makes a table at its first step, and makes it again where it is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.table: torch.Tensor | None = None

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        length = input_ids.shape[1]
        if self.table is None or len(self.table) < length:
            self.table = torch.zeros(length, 8)
        return self.embedding(input_ids) + self.table[:length]


def test_what_a_step_keeps_in_the_model_is_gone_in_the_next_trace() -> None:
    model, shapes = Caches(), [Shape(2, 64), Shape(2, 16)]
    with Tracer(model, ForwardWorkload(), cpu_target()) as tracer:
        traces = [tracer.trace(shape) for shape in shapes]
        assert not tracer.repeats
    assert traces == [traced(model, shape) for shape in shapes]
    for trace, shape in zip(traces, shapes, strict=True):
        sizes = [event.nbytes for event in trace.events]
        table, rest = shape.length * 8 * 4, trace.events[trace.step_length :]
        assert sizes.count(table) == 1, "the second step makes no table"
        assert -table not in sizes, "and it is not freed"
        assert sum(event.nbytes > 0 for event in rest) == 2
    assert model.table is None


def everything_in(model: nn.Module) -> list[tuple[object, ...]]:
    """Each attribute, weight, buffer and module by its identity."""
    return [
        (path, id(module), name, id(value))
        for path, module in model.named_modules(remove_duplicate=False)
        for held in (vars(module), module._parameters, module._buffers, module._modules)
        for name, value in held.items()
    ]


class Restless(Caches):
    """Changes itself in every way that a step can."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("kept", None)
        self.error = error

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        self.seen = self.seen + 1
        self.kept = torch.ones(3)
        self.embedding.weight = nn.Parameter(torch.zeros(100, 8), requires_grad=False)
        self.head = nn.Linear(8, 8)
        hidden = super().forward(input_ids, attention_mask)
        if self.error is not None:
            raise self.error
        return self.head(hidden)  # type: ignore[no-any-return]


def as_module(model: nn.Module) -> Any:
    return model


def as_closure(model: nn.Module) -> Any:
    def step(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return model(input_ids, attention_mask)

    return step


def as_method(model: nn.Module) -> Any:
    return model.forward


def as_partial(model: nn.Module) -> Any:
    return partial(lambda given, input_ids, attention_mask: given(input_ids, attention_mask), model)


@pytest.mark.parametrize("wrap", [as_module, as_closure, as_method, as_partial])
@pytest.mark.parametrize("error", [None, KeyError("missing"), KeyboardInterrupt()], ids=["no-error", "error", "ctrl-c"])
def test_the_model_is_as_it_was(wrap: Callable[[nn.Module], Any], error: BaseException | None) -> None:
    model = Restless(error)  # type: ignore[arg-type]  # an interrupt is none, and must be met as well
    model.train()
    before, values = everything_in(model), [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    if error is None:
        assert traced(wrap(model)).transient_bytes > 0
    else:
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UntraceableError):
            traced(wrap(model))
    assert everything_in(model) == before
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(isinstance(tensor, FakeTensor) for tensor in tensors)
    assert all(torch.equal(mine, copied) for mine, copied in zip(tensors, values, strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.training


def test_no_fake_outlives_the_tracer() -> None:
    def fakes() -> int:
        gc.collect()
        return sum(issubclass(type(thing), FakeTensor) for thing in gc.get_objects())

    before = fakes()
    trace = traced(small_model("bert"))
    assert trace.transient_bytes > 0
    assert fakes() == before


@pytest.mark.parametrize("wrap", [as_closure, as_method, as_partial])
def test_a_callable_has_the_trace_of_its_model(wrap: Callable[[nn.Module], Any]) -> None:
    model = small_model("bert", head="Model")
    mine, whole = traced(wrap(model)), traced(model)
    assert mine.resident_bytes == whole.resident_bytes
    assert mine.events == whole.events
    name = {as_closure: "model", as_method: "self", as_partial: "0"}[wrap]
    assert str(mine.peak_moment) == str(whole.peak_moment).replace(" in ", f" in {name}.")


def test_a_callable_without_modules() -> None:
    def step(input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids.float().unsqueeze(-1).expand(-1, -1, 8) * torch.arange(8)

    trace = traced(step)
    assert trace.resident_bytes == 0
    assert trace.held_bytes == HIDDEN
    assert trace.peak_moment.operation == "aten.mul.Tensor"


def test_a_model_on_meta_has_the_trace_of_a_live_one() -> None:
    model = small_model("llama")
    with torch.device("meta"):
        outlined = type(model)(model.config).eval()
    assert traced(outlined).events == traced(model).events


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")  # of torch.compile's own imports
def test_wrapped_models_have_the_trace_of_what_they_wrap() -> None:
    model = small_model("bert")
    expected = traced(model)
    assert traced(torch.compile(model)) == expected
    assert traced(nn.DataParallel(model)) == expected


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_adapters_are_part_of_the_step() -> None:
    peft = pytest.importorskip("peft")
    model = small_model("llama")
    plain = traced(model)
    adapted = peft.get_peft_model(
        small_model("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    ).eval()
    trace = traced(adapted)
    assert trace.resident_bytes == resident_bytes(adapted) > plain.resident_bytes
    assert len(trace.events) > len(plain.events)
    assert any("lora_A" in moment.module for moment in trace.moments)


UNTRACEABLE: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "a branch": (lambda x: x * 2 if x.sum() > 0 else x, "DataDependentOutputException of aten._local_scalar_dense"),
    "a number": (lambda x: x * x.max().item(), "DataDependentOutputException of aten._local_scalar_dense"),
    "a list": (lambda x: torch.tensor(x.flatten().tolist()), "aten._local_scalar_dense"),
    "a selection": (lambda x: x[x > 0], "DynamicOutputShapeException of aten.index.Tensor"),
    "places": (lambda x: x.nonzero(), "DynamicOutputShapeException of aten.nonzero"),
    "numpy": (lambda x: torch.from_numpy(np.tanh(x.numpy())), r"RuntimeError: .numpy\(\)"),
    "an array": (lambda x: torch.from_numpy(np.asarray(x)), r"RuntimeError: .numpy\(\)"),
    "an address": (lambda x: torch.zeros(x.data_ptr() % 7), "RuntimeError: Cannot access data pointer"),
    "shapes that don't fit": (lambda x: x @ torch.zeros(7, 7), "of aten.mm.default"),
    "its own error": (lambda x: {}["key"], "KeyError: 'key'"),
    "an error without words": (lambda x: [].pop(1) if x is None else raise_it(), "RuntimeError: no message"),
}


def raise_it() -> None:
    raise RuntimeError


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_can_t_be_traced_is_named(name: str) -> None:
    then, words = UNTRACEABLE[name]
    with pytest.raises(UntraceableError, match=rf"Embeds\.inner can't be traced \(.*{words}") as caught:
        traced(Embeds(then))
    assert caught.value.next_step
    assert caught.value.__cause__ is not None


@torch.library.custom_op("budgetdb_tests::outside", mutates_args=())
def outside(x: torch.Tensor) -> torch.Tensor:
    """A kernel that nobody told torch the shapes of."""
    return torch.from_numpy(np.tanh(x.numpy()))


def test_a_kernel_from_outside_without_shapes_is_named() -> None:
    with pytest.raises(UntraceableError, match=r"Embeds\.inner can't be traced \(.*budgetdb_tests.outside"):
        traced(Embeds(outside))


def test_a_tracer_goes_on_after_a_shape_that_failed() -> None:
    def then(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            raise ValueError("three rows")
        return x * 1.5

    with Tracer(Embeds(then), ForwardWorkload(), cpu_target()) as tracer:
        before = tracer.trace(SHAPE)
        with pytest.raises(UntraceableError, match="three rows"):
            tracer.trace(Shape(3, 16))
        assert tracer.trace(SHAPE) == before


def test_a_model_that_the_workload_is_not_for() -> None:
    class Listens(small_model("bert", head="Model").__class__):  # type: ignore[misc]  # made where it is used
        main_input_name = "input_values"

    model = Listens(small_model("bert", head="Model").config)
    with Tracer(model, ForwardWorkload(), cpu_target()) as tracer, pytest.raises(UsageError, match="input_values"):
        tracer.trace(SHAPE)


class Locked(Restless):
    """What can't be copied is traced as it is, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_module_that_can_t_be_copied_is_traced_as_it_is() -> None:
    model = Locked()
    before = everything_in(model)
    assert traced(model) == traced(Restless())
    assert everything_in(model) == before


def test_a_module_that_can_t_be_copied_is_not_cut() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(6)))
    model.lock = threading.Lock()  # type: ignore[assignment]  # an attribute like any other
    before = everything_in(model)
    with (
        pytest.raises(UntraceableError, match=r"Sequential can't be traced \(TypeError: a model that can't be copied"),
        Tracer(model, ForwardWorkload(), cpu_target(), layers={"1": 2}),
    ):
        pass
    assert everything_in(model) == before


def global_state() -> dict[str, object]:
    return {
        "fake test": import_utils.is_fake_tensor,
        "collector": gc.isenabled(),
        "capability": torch.cuda.get_device_capability,
        "fake log": logging.getLogger("torch._subclasses.fake_tensor").level,
        "transformers log": transformers_logging.get_verbosity(),
        "hooks": [
            len(held)
            for held in (
                module_hooks._global_forward_pre_hooks,
                module_hooks._global_forward_hooks,
                module_hooks._global_forward_hooks_always_called,
            )
        ],
        "modes": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
        "gradients": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "data pointers": torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access,
    }


@contextmanager
def unusual_state() -> Iterator[None]:
    """Settings as a user may have them, to see that it is these that are put back."""
    fake_log = logging.getLogger("torch._subclasses.fake_tensor")
    level, verbosity = fake_log.level, transformers_logging.get_verbosity()
    fake_log.setLevel(logging.DEBUG)
    transformers_logging.set_verbosity_info()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        transformers_logging.set_verbosity(verbosity)
        fake_log.setLevel(level)


@contextmanager
def usual_state() -> Iterator[None]:
    yield


@pytest.mark.parametrize("target", [cpu_target, lambda: card_target(H100)], ids=["cpu", "h100"])
@pytest.mark.parametrize("surroundings", [usual_state, unusual_state])
@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
def test_the_process_is_as_it_was(
    target: Callable[[], Target], surroundings: Callable[[], Any], *, fails: bool
) -> None:
    def then(x: torch.Tensor) -> torch.Tensor:
        during.append(global_state())
        if fails:
            raise ValueError("on purpose")
        return torch.dropout(x, 0.5, train=True)

    during: list[dict[str, object]] = []
    model = Embeds(then)
    with surroundings():
        before = global_state()
        if fails:
            with pytest.raises(UntraceableError, match="on purpose"):
                traced(model, target=target())
        else:
            traced(model, target=target())
        assert global_state() == before
    changed = {name for name, value in before.items() if during[0][name] != value}
    assert {"fake test", "hooks", "modes", "gradients"} <= changed
    assert ("capability" in changed) == (target is not cpu_target)


def test_masks_decide_as_they_do_in_a_real_step() -> None:
    model = small_model("llama", attention="sdpa")
    sizes = {
        mask: [event.nbytes for event in traced(model, Shape(2, 40), workload=WORKLOADS["forward", mask]()).events]
        for mask in ("padded", "ones", "none")
    }
    square = 2 * 40 * 40
    assert square in sizes["padded"], "a mask of each row's tokens by its tokens"
    assert square not in sizes["ones"]
    assert square not in sizes["none"]
