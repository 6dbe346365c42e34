"""A model with fake weights, and the real one as it was."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from traced_models import small_model

from budgetdb.models.anatomy import modules_behind
from budgetdb.tracing.fake_models import fake_model, state_kept

CPU = torch.device("cpu")


class Remembers(nn.Module):
    """Weights, a buffer, one that is empty, and state that its steps change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4).t(), requires_grad=True)
        self.register_parameter("bias", None)
        self.register_buffer("table", torch.arange(4), persistent=False)
        self.register_buffer("nothing", None)
        self.inner = nn.Linear(4, 4)
        self.steps = 0
        self.cache: torch.Tensor | None = None
        self.plain = torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.cache = torch.zeros_like(x)
        self.table = self.table + 1
        self.inner.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.register_buffer("grown", torch.zeros(2))
        self.add_module("new", nn.Linear(2, 2))
        return x @ self.weight


def everything_in(model: nn.Module) -> list[tuple[object, ...]]:
    """Each attribute and tensor of each module by its identity."""
    return [
        (path, id(module), name, id(value))
        for path, module in model.named_modules(remove_duplicate=False)
        for held in (vars(module), module._parameters, module._buffers, module._modules)
        for name, value in held.items()
    ]


def tensors_in(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def test_every_weight_is_fake_and_laid_out_as_the_real_one() -> None:
    model, mode = Remembers(), FakeTensorMode()
    with fake_model(model, mode, torch.device("cpu")) as (fake, weights):
        assert type(fake) is Remembers
        assert fake is not model
        assert [id(tensor) for tensor in tensors_in(fake)] == [id(tensor) for tensor in weights] or (
            {id(tensor) for tensor in tensors_in(fake)} == {id(tensor) for tensor in weights}
        )
        for mine, real in zip(tensors_in(fake), tensors_in(model), strict=True):
            assert isinstance(mine, FakeTensor)
            assert isinstance(mine, nn.Parameter) == isinstance(real, nn.Parameter)
            assert (mine.shape, mine.stride(), mine.dtype, mine.device) == (real.shape, real.stride(), real.dtype, CPU)
        assert fake.bias is None
        assert fake.nothing is None
        assert (fake.steps, fake.plain.tolist()) == (0, [1, 1])


def test_tied_weights_stay_tied() -> None:
    model = small_model("t5", head="ForConditionalGeneration")
    assert model.shared.weight is model.encoder.embed_tokens.weight
    with fake_model(model, FakeTensorMode(), CPU) as (fake, weights):
        assert fake.shared.weight is fake.encoder.embed_tokens.weight is fake.decoder.embed_tokens.weight
        assert (fake.lm_head.weight is fake.shared.weight) == (model.lm_head.weight is model.shared.weight)
        assert len(weights) == len({id(tensor) for tensor in tensors_in(model)})


def test_what_a_step_does_to_a_module_stays_in_the_copy() -> None:
    model, mode = Remembers(), FakeTensorMode(allow_non_fake_inputs=True)
    before = everything_in(model)
    with fake_model(model, mode, CPU) as (fake, _), mode:
        fake(torch.empty(2, 4))
        assert fake.steps == 1
    assert everything_in(model) == before
    assert not any(isinstance(tensor, FakeTensor) for tensor in tensors_in(model))


CALLABLES: dict[str, Callable[[Remembers], Any]] = {
    "closure": lambda model: lambda x: model(x),
    "bound method": lambda model: model.forward,
    "partial": lambda model: partial(model.forward),
    "partial of a closure": lambda model: partial(lambda scale, x: model(x) * scale, 2),
    "partial with the model": lambda model: partial(lambda given, x: given(x), model),
}


@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.parametrize("fails", [False, True])
def test_a_callable_holds_fakes_while_the_block_runs_and_no_longer(name: str, fails: bool) -> None:
    model, mode = Remembers(), FakeTensorMode(allow_non_fake_inputs=True)
    call = CALLABLES[name](model)
    before = everything_in(model)

    def use() -> None:
        with fake_model(call, mode, CPU) as (same, weights), mode, torch.no_grad():
            assert same is call
            assert len(weights) == 4
            assert all(isinstance(tensor, FakeTensor) for tensor in tensors_in(model))
            assert isinstance(call(torch.empty(2, 4)), FakeTensor)
            assert model.steps == 1
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            use()
    else:
        use()
    assert everything_in(model) == before
    assert (model.steps, model.cache) == (0, None)
    assert model.weight.requires_grad


def test_modules_that_share_a_part_are_both_put_back() -> None:
    shared = nn.Linear(4, 4)
    first, second = nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared)

    def call(x: torch.Tensor) -> torch.Tensor:
        return first(x) + second(x)  # type: ignore[no-any-return]

    assert len(modules_behind(call)) == 2
    before = everything_in(first) + everything_in(second)
    with fake_model(call, FakeTensorMode(), CPU) as (_, weights):
        assert len(weights) == 2
        assert first[0].weight is weights[0]
    assert everything_in(first) + everything_in(second) == before


def test_a_model_on_meta_has_fakes_on_the_device_asked_for() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with fake_model(model, FakeTensorMode(), CPU) as (fake, _):
        assert {tensor.device for tensor in tensors_in(fake)} == {CPU}


def test_state_is_kept_where_a_block_changes_it_and_fails() -> None:
    model = Remembers()
    before = everything_in(model)

    def change() -> None:
        with state_kept([model]):
            model(torch.zeros(2, 4))
            del model.inner
            assert everything_in(model) != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change()
    assert everything_in(model) == before
