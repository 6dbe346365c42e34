"""Does a cost model keep its contract?"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from budgetdb.costs.base import CostModel, FittedCost
from budgetdb.costs.forms import UNLIMITED
from budgetdb.profiles import CostRecord, Outcome, Probe
from budgetdb.shapes import Shape
from budgetdb.testing.contract import ContractError, require, require_value_error

_LENGTHS = (1, 7, 8, 64, 511, 512, 4096, 100_000)
_ROWS = (0, 1, 2, 3, 17, 256, 65_537, 10**6)
_MIB = 2**20


def check_cost_model(cost: type[FittedCost], *, cases: int = 40, seed: int = 0) -> None:
    """Hold a kind of cost model to every promise of `CostModel`, over generated probes.

    >>> from budgetdb.costs.linear import LinearCost
    >>> check_cost_model(LinearCost)

    Args:
        cost: the class.
        cases: how many sets of probes it is fitted to.
        seed: of the probes; equal seeds give equal probes.

    Raises:
        ContractError: a promise is broken; the message says which one, and at what values.
    """
    require(isinstance(getattr(cost, "kind", None), str) and cost.kind != "", f"{cost.__name__} has no `kind`")
    failed = Probe(batch_size=1, length=8, outcome=Outcome.OOM, baseline_bytes=_MIB)
    require_value_error(lambda: cost.fit([]), "fit to no probes")
    require_value_error(lambda: cost.fit([failed]), "fit to failed probes only")
    # The search fits a model before it knows anything, to a probe that took nothing.
    check_fitted(cost, (Probe(batch_size=1, length=8, outcome=Outcome.FITS),))
    rng = random.Random(seed)  # noqa: S311 (no secret)
    for _ in range(cases):
        check_fitted(cost, random_probes(rng))


def check_fitted(cost: type[FittedCost], probes: Sequence[Probe]) -> None:
    """Hold the model that `cost` fits to `probes`, at least one of which fitted, to every promise.

    Raises:
        ContractError: a promise is broken.
    """
    model = cost.fit(probes)
    require(cost.fit(probes) == model, f"two fits to equal probes differ: {json.dumps(_finite(model))}")
    _check_safe_side(model, probes)
    check_model(model, shapes=[probe.shape for probe in probes])


def check_model(model: CostModel, *, shapes: Sequence[Shape] = ()) -> None:
    """Hold one cost model, however it was made, to every promise of `CostModel`.

    >>> from budgetdb.costs.exact import ExactCost, Form
    >>> check_model(ExactCost([Form(1, 0, c=2**20, k=0, l=0, kl=512, ll=0, kll=4)]))

    Args:
        model: the model.
        shapes: batches to look at beside the usual ones.

    Raises:
        ContractError: a promise is broken; the message says which one, and at what values.
    """
    written = json.dumps(_finite(model))
    lengths = sorted({*_LENGTHS, *(shape.length for shape in shapes)})
    _check_monotone(model, lengths)
    for limit_bytes in sorted({0, 2**33, 2**50, *_limits(model, shapes)}):
        _check_inverse(model, lengths, limit_bytes)
        _check_vectorised(model, lengths, limit_bytes)
    _check_stored(model, lengths)
    for what, parameters in _spoiled(model.parameters()):
        require_value_error(lambda parameters=parameters: model.from_parameters(parameters), f"from_parameters {what}")  # type: ignore[misc] # mypy infers no default of a lambda
    require(json.dumps(_finite(model)) == written, f"the model changed while it was asked: {written}")


def random_probes(rng: random.Random) -> tuple[Probe, ...]:
    """What a calibration might hand to `fit`: one to four lengths, some noise or steps, failures above a limit.

    At least one of the probes fitted.
    """
    token, fixed = 10 ** rng.uniform(2, 6), rng.choice([0.0, 10 ** rng.uniform(6, 10.5)])
    second, square = token * rng.uniform(0, 1), rng.choice([0.0, token / rng.uniform(100, 5000)])
    step, noise = rng.choice([1, 2 * _MIB, 20 * _MIB]), rng.choice([0.0, 0.03])
    peaks: dict[Shape, int] = {}
    for length in rng.sample(range(8, 4097, 8), rng.randint(1, 4)):
        for rows in {1, rng.randint(1, 40), rng.randint(1, 2000)}:
            grown = rows * length * max(token, second + square * length) * (1 + rng.uniform(-noise, noise))
            peaks[Shape(rows, length)] = int(fixed) + math.ceil(grown / step) * step
    limit = rng.choice(sorted(peaks.values()))
    return tuple(
        Probe(
            batch_size=shape.batch_size,
            length=shape.length,
            outcome=Outcome.FITS if peak <= limit else Outcome.OOM,
            peak_allocated_bytes=peak if peak <= limit else None,
            baseline_bytes=int(fixed * 0.9),
        )
        for shape, peak in peaks.items()
    )


def _finite(model: CostModel) -> dict[str, Any]:
    parameters = model.parameters()
    try:
        json.dumps(parameters, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ContractError(f"the parameters {parameters!r} are not finite numbers that JSON holds: {error}") from error
    return dict(parameters)


def _check_safe_side(model: CostModel, probes: Sequence[Probe]) -> None:
    for probe in probes:
        predicted = model.peak_bytes(probe.shape)
        require(
            not probe.fits or predicted >= probe.peak_bytes,
            f"unsafe: {probe.shape} took {probe.peak_bytes} bytes, and the fitted model says {predicted}",
        )


def _check_monotone(model: CostModel, lengths: Sequence[int]) -> None:
    shapes = [[Shape(rows, length) for rows in _ROWS] for length in lengths]
    for line in (*shapes, *(list(column) for column in zip(*shapes, strict=True))):
        for small, large in pairwise(line):
            lower, upper = model.peak_bytes(small), model.peak_bytes(large)
            require(isinstance(lower, int), f"peak_bytes({small}) must be an int, got {lower!r}")
            require(lower <= upper, f"the peak falls from {lower} at {small} to {upper} at {large}")


def _limits(model: CostModel, shapes: Sequence[Shape]) -> Iterator[int]:
    """Limits at which an inverse goes wrong first: just on a peak, and one byte to either side."""
    for shape in (Shape(0, 8), Shape(1, 8), Shape(1, 512), Shape(256, 64), *shapes[:4]):
        peak = model.peak_bytes(shape)
        yield from (max(peak - 1, 0), peak, peak + 1)


def _check_inverse(model: CostModel, lengths: Sequence[int], limit_bytes: int) -> None:
    for length in lengths:
        size = model.max_batch_size(length, limit_bytes)
        asked = f"max_batch_size({length}, {limit_bytes})"
        require(isinstance(size, int) and size >= 0, f"{asked} must be an int of at least 0, got {size!r}")
        peak = model.peak_bytes(Shape(size, length))
        require(size == 0 or peak <= limit_bytes, f"{asked} is {size}, whose peak is {peak}")
        if size < UNLIMITED:
            peak = model.peak_bytes(Shape(size + 1, length))
            require(peak > limit_bytes, f"{asked} is {size}, and one row more fits too, with a peak of {peak}")


def _check_vectorised(model: CostModel, lengths: Sequence[int], limit_bytes: int) -> None:
    expected = [model.max_batch_size(length, limit_bytes) for length in lengths]
    for given in (lengths, iter(lengths)):
        sizes = model.max_batch_sizes(given, limit_bytes)
        asked = f"max_batch_sizes({list(lengths)}, {limit_bytes})"
        require(isinstance(sizes, np.ndarray) and sizes.dtype == np.int64, f"{asked} must be an array of int64")
        require(sizes.tolist() == expected, f"{asked} is {sizes.tolist()}, one by one it is {expected}")
    require(model.max_batch_sizes([], limit_bytes).shape == (0,), "max_batch_sizes of no lengths must be empty")


def _check_stored(model: CostModel, lengths: Sequence[int]) -> None:
    record = CostRecord.model_validate_json(model.record().model_dump_json())
    require(record.kind == model.kind, f"the record of a {model.kind} model is of kind {record.kind}")
    for parameters in (model.parameters(), json.loads(json.dumps(model.parameters())), record.parameters):
        again = model.from_parameters(parameters)
        require(again == model, f"from_parameters({parameters}) is not the model they came from")
        for shape in (Shape(rows, length) for rows in _ROWS for length in lengths):
            require(again.peak_bytes(shape) == model.peak_bytes(shape), f"read back, the peak at {shape} is another")


def _spoiled(parameters: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parameters with one fault each, and what it is."""
    yield "with an unknown coefficient", {**parameters, "of_no_such_name": 1.0}
    for name, value in parameters.items():
        yield f"without {name}", {other: kept for other, kept in parameters.items() if other != name}
        numbers: tuple[Any, ...] = (-1.0, math.nan, math.inf)
        bad = (*([[number]] for number in numbers[1:]),) if isinstance(value, list) else numbers
        for wrong in ("many", None, *bad):
            yield f"with {name}={wrong!r}", {**parameters, name: wrong}
