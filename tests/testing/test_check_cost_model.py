"""The check finds each broken promise: a model that keeps all but one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import pytest

from budgetdb.costs.base import CostModel
from budgetdb.costs.forms import UNLIMITED
from budgetdb.costs.linear import LinearCost
from budgetdb.profiles import Probe
from budgetdb.shapes import Shape
from budgetdb.testing.contract import ContractError
from budgetdb.testing.costs import check_cost_model


class Good(LinearCost):
    """Keeps every promise, by the slower defaults of the base class."""

    kind = "good"

    def max_batch_sizes(self, lengths: Iterable[int], limit_bytes: int) -> Any:
        return CostModel.max_batch_sizes(self, lengths, limit_bytes)


class WithoutKind(LinearCost):
    kind = ""


class FitsToNothing(LinearCost):
    @classmethod
    def fit(cls, probes: Sequence[Probe]) -> Self:
        return super().fit(probes) if any(probe.fits for probe in probes) else cls(c=0, a=1)


class FailsOnNothingOtherwise(LinearCost):
    @classmethod
    def fit(cls, probes: Sequence[Probe]) -> Self:
        if not probes:
            raise IndexError("no probes")
        return super().fit(probes)


class Unsafe(LinearCost):
    @classmethod
    def fit(cls, probes: Sequence[Probe]) -> Self:
        safe = super().fit(probes).parameters()
        return cls.from_parameters({**safe, "a": safe["a"] * 0.9999})  # type: ignore[operator]  # a number here


class Falling(LinearCost):
    """Long rows cost less: an average over padding gone wrong."""

    def peak_bytes(self, shape: Shape) -> int:
        return super().peak_bytes(Shape(shape.batch_size, min(shape.length, 5000 - shape.length // 64)))

    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        return super().max_batch_size(min(length, 5000 - length // 64), limit_bytes)

    def max_batch_sizes(self, lengths: Iterable[int], limit_bytes: int) -> Any:
        return CostModel.max_batch_sizes(self, lengths, limit_bytes)


class OneTooMany(LinearCost):
    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        return min(super().max_batch_size(length, limit_bytes) + 1, UNLIMITED)


class OneTooFew(LinearCost):
    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        return max(super().max_batch_size(length, limit_bytes) - 1, 0)


class StrictlyBelow(LinearCost):
    """Takes the limit itself for too much."""

    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        return super().max_batch_size(length, max(limit_bytes - 1, 0))


class Negative(LinearCost):
    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        return super().max_batch_size(length, limit_bytes) or -1


class Fractional(LinearCost):
    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        return float(super().max_batch_size(length, limit_bytes))  # type: ignore[return-value]  # what is tested


class FractionalPeak(LinearCost):
    def peak_bytes(self, shape: Shape) -> int:
        return float(super().peak_bytes(shape))  # type: ignore[return-value]  # what is tested


class ManyDiffer(LinearCost):
    def max_batch_sizes(self, lengths: Iterable[int], limit_bytes: int) -> Any:
        sizes = super().max_batch_sizes(lengths, limit_bytes)
        return np.where(sizes > 1000, sizes + 1, sizes)


class ManyAreFloats(LinearCost):
    def max_batch_sizes(self, lengths: Iterable[int], limit_bytes: int) -> Any:
        return super().max_batch_sizes(lengths, limit_bytes).astype(float)


class ManyTakeOnlyLists(LinearCost):
    def max_batch_sizes(self, lengths: Iterable[int], limit_bytes: int) -> Any:
        list(lengths)
        return super().max_batch_sizes(lengths, limit_bytes)


class Rounded(LinearCost):
    def parameters(self) -> dict[str, Any]:
        return {name: round(value, 2) for name, value in super().parameters().items()}  # type: ignore[call-overload]


class NotJson(LinearCost):
    def parameters(self) -> dict[str, Any]:
        return {name: np.float32(value) for name, value in super().parameters().items()}  # type: ignore[arg-type]

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        return super().from_parameters({name: float(value) for name, value in parameters.items()})


class TakesAnything(LinearCost):
    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        return super().from_parameters({name: parameters[name] for name in ("c", "a")})


class MissesNothing(LinearCost):
    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        return super().from_parameters({"c": 0.0, **parameters})


class TakesNegative(LinearCost):
    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        return super().from_parameters(
            {name: 0.0 if value in (-1.0, -1) else value for name, value in parameters.items()}
        )


class Forgetful(LinearCost):
    """Its answers depend on what it was asked before."""

    def peak_bytes(self, shape: Shape) -> int:
        if shape.batch_size == 65_537:
            self.__init__(c=self.parameters()["c"], a=1.0)  # type: ignore[misc]  # what is tested
        return super().peak_bytes(shape)


class Fickle(LinearCost):
    calls: ClassVar[int] = 0

    @classmethod
    def fit(cls, probes: Sequence[Probe]) -> Self:
        Fickle.calls += 1
        found = super().fit(probes).parameters()
        return cls.from_parameters({**found, "c": found["c"] + Fickle.calls})  # type: ignore[operator]  # a number here


class Misnamed(LinearCost):
    def record(self) -> Any:
        return super().record().model_copy(update={"kind": "flash"})


BROKEN = [
    (WithoutKind, "has no `kind`"),
    (FitsToNothing, "fit to no probes must raise a ValueError, and returned"),
    (FailsOnNothingOtherwise, "fit to no probes must raise a ValueError, and raised IndexError: no probes"),
    (Unsafe, "unsafe: "),
    (Falling, "the peak falls from"),
    (OneTooMany, "whose peak is"),
    (OneTooFew, "one row more fits too"),
    (StrictlyBelow, "one row more fits too"),
    (Negative, "must be an int of at least 0, got -1"),
    (Fractional, "must be an int of at least 0"),
    (FractionalPeak, "must be an int, got"),
    (ManyDiffer, "one by one it is"),
    (ManyAreFloats, "must be an array of int64"),
    (ManyTakeOnlyLists, "one by one it is"),
    (Rounded, "read back"),
    (NotJson, "not finite numbers that JSON holds"),
    (TakesAnything, "from_parameters with an unknown coefficient must raise a ValueError"),
    (MissesNothing, "from_parameters without c must raise a ValueError"),
    (TakesNegative, "from_parameters with c=-1.0 must raise a ValueError"),
    (Forgetful, ""),
    (Fickle, "two fits to equal probes differ"),
    (Misnamed, "the record of a linear model is of kind flash"),
]


def test_a_model_that_keeps_every_promise_passes() -> None:
    check_cost_model(Good, cases=10)


@pytest.mark.parametrize(("cost", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_each_broken_promise_is_found(cost: type[CostModel], words: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_cost_model(cost)
    assert words in str(caught.value)
    assert isinstance(caught.value, AssertionError)


@pytest.mark.parametrize("seed", range(5))
def test_any_seed_finds_a_model_that_is_hardly_unsafe(seed: int) -> None:
    with pytest.raises(ContractError, match="unsafe"):
        check_cost_model(Unsafe, seed=seed)
