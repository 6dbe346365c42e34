"""The contract of a workload, and reading one from its key."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from budgetdb.errors import UnknownNameError, UsageError
from budgetdb.plugins import WORKLOADS
from budgetdb.shapes import Shape

HOLDS = ("all", "none", "previous")


class Workload(ABC):
    """One kind of step: the inputs of a batch of some shape, and what an evaluation loop does with them.

    What every implementation promises:

    - `inputs` depends on the model and the shape only: two calls give equal values, in any process;
    - `inputs` has rows of `shape.length` tokens of which the last is padding, so that a mask has to be made;
    - `step` leaves nothing behind but what it returns, and what it returns is what the loop would keep;
    - `key` tells apart any two workloads that can differ in memory, and `parse_workload(key)` is an equal workload;
    - options of its own are keyword arguments of the constructor that take their text, too, and are in `options`.

    Args:
        hold: whose outputs are alive while a step runs: `none`, the `previous` step's, as in
            `for batch in loader: outputs = model(**batch)`, or `all`, kept to the end of the run.

    Raises:
        UnknownNameError: `hold` is none of these.
    """

    name: ClassVar[str]

    def __init__(self, *, hold: str = "previous") -> None:
        if hold not in HOLDS:
            raise UnknownNameError("hold", hold, HOLDS)
        self.hold = hold

    def options(self) -> dict[str, str]:
        """Every option that can change the memory of a step, by the name the constructor takes it under."""
        return {"hold": self.hold}

    def key(self) -> str:
        """The name with every option, sorted: part of a profile's key.

        >>> from budgetdb.workloads.forward import ForwardWorkload
        >>> ForwardWorkload().key()
        'forward[hold=previous]'
        """
        return f"{self.name}[{','.join(f'{name}={value}' for name, value in sorted(self.options().items()))}]"

    @abstractmethod
    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        """The batch that `step` takes: `shape.batch_size` rows of `shape.length` tokens, on `device`.

        Raises:
            UsageError: the model takes no tokens, or lacks what this workload needs of it.
        """

    @abstractmethod
    def step(self, model: Any, inputs: dict[str, torch.Tensor]) -> object:
        """Run one iteration, without gradients, and return what the loop keeps: tensors in any nesting."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key()}>"


def parse_workload(key_or_name: str, **options: str) -> Workload:
    """The workload of a name or of a whole key; `options` go before those in the key.

    >>> parse_workload("embed").key(), parse_workload("forward[hold=none]", hold="all").key()
    ('embed[hold=previous]', 'forward[hold=all]')

    Raises:
        UnknownNameError: no workload, option or choice of that name.
        UsageError: the key is not written as `name[option=value,...]`.
    """
    written = re.fullmatch(r"([^\[\]]+)(?:\[([^\[\]]*)\])?", key_or_name)
    if written is None:
        raise UsageError(f"{key_or_name!r} names no workload", next_step="Write it like forward[hold=previous]")
    name, listed = written.groups()
    workload_class = WORKLOADS.get(name)
    given = {**_read_options(key_or_name, listed or ""), **options}
    known = workload_class().options()
    for option in given:
        if option not in known:
            raise UnknownNameError(f"option of workload {name!r}", option, known)
    workload: Workload = workload_class(**given)
    return workload


def _read_options(key: str, listed: str) -> dict[str, str]:
    options = {}
    for part in filter(None, listed.split(",")):
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{part!r} in {key!r} is no option", next_step="Write options like hold=previous")
        options[name.strip()] = value.strip()
    return options
