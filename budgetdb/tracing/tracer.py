"""Run a step on fake tensors, and see what it allocates."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.utils import import_utils

from budgetdb.errors import UntraceableError
from budgetdb.models.anatomy import modules_behind
from budgetdb.models.facts import resident_bytes
from budgetdb.models.quiet import quiet_transformers
from budgetdb.shapes import Shape
from budgetdb.tracing.fake_models import fake_model, state_kept
from budgetdb.tracing.lifetimes import Moment, Trace
from budgetdb.tracing.steps import Steps
from budgetdb.tracing.targets import Target
from budgetdb.tracing.tracker import LifetimeTracker
from budgetdb.tracing.values import give_value
from budgetdb.workloads.base import Workload
from budgetdb.workloads.held import held_bytes


class Tracer:
    """Traces steps of one model doing one workload, as a target device would run them.

    The step runs as the prober runs it: twice in a row, on the workload's own inputs, with outputs held as the loop
    holds them. Nothing is computed but what the model asks of its mask and positions, and no memory is taken, whatever
    the model's size. The model itself is left as it is.

    Args:
        model: a live model, one outlined on `meta`, or any callable that runs on tensors.
        workload: the kind of step.
        target: the device to trace for.
        layers: for each path of a list of layers, how many of them to keep; all of them where it is not named.

    Attributes:
        repeats: whether a second step was seen to be the first one over again, so that one is run for both.
    """

    def __init__(
        self, model: Any, workload: Workload, target: Target, *, layers: Mapping[str, int] | None = None
    ) -> None:
        self._real, self._workload, self._target = _plain(model), workload, target
        # A kernel from outside torch that asks a fake tensor for its memory gets an error, and not address 0.
        with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._stack = ExitStack()
        self._layers = dict(layers or {})
        self.repeats = False
        self.is_open = False
        self.resident_bytes = resident_bytes(model)

    def __enter__(self) -> Self:
        try:
            self._model, self._weights = self._stack.enter_context(
                fake_model(self._real, self._mode, self._target.torch_device)
            )
            self._cut_layers()
        except Exception as error:
            self._stack.close()
            raise self._untraceable(error, Moment("", "")) from error
        is_module = isinstance(self._model, nn.Module)
        self._modules = [self._model] if is_module else list(modules_behind(self._model).values())
        self.is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self.is_open = False

    def _cut_layers(self) -> None:
        if self._layers and self._model is self._real:
            raise TypeError("a model that can't be copied can't be cut")  # other tracers may be using it
        for path, count in self._layers.items():
            parent, _, name = path.rpartition(".")
            kept = list(self._model.get_submodule(path))[:count]
            self._model.get_submodule(parent)._modules[name] = nn.ModuleList(kept)

    def trace(self, shape: Shape) -> Trace:
        """What a step at `shape` allocates.

        Raises:
            UntraceableError: the model can't run on fake tensors; it says where and why.
            UsageError: the workload does not suit the model.
        """
        if not self.is_open:  # traced again later, by a cost model that follows no rule
            with self:
                return self.trace(shape)
        inputs = self._workload.inputs(self._real, shape, torch.device("cpu"))
        tracker = LifetimeTracker(self._target.torch_device.type, resident=self._weights, model=self._model)
        # What a step keeps in the model, a cached mask for one, must not be there in the next trace.
        with (
            state_kept(self._modules),
            _no_collector(),
            quiet_transformers(),
            _as_if_real(),
            self._mode,
            self._target.kernels(),
            tracker,
        ):
            fakes = {name: self._fake_input(tensor, tracker) for name, tensor in inputs.items()}
            try:
                steps, held, step_length = self._run(fakes, tracker)
            except Exception as error:
                raise self._untraceable(error, tracker.where_raised(error)) from error
        return Trace(
            resident_bytes=self.resident_bytes,
            events=tuple(steps.events),
            moments=tuple(steps.moments),
            held_bytes=held,
            batch_length=sum(tensor.numel() > 0 for tensor in inputs.values()),
            step_length=step_length,
        )

    def _run(self, inputs: dict[str, torch.Tensor], tracker: LifetimeTracker) -> tuple[Steps, int, int]:
        """Two steps, outputs held as the loop holds them; the bytes one step's outputs keep; the events of one step.

        The first trace runs both; when the second step was the first one over again, later traces run one.
        """
        batch = len(tracker.events)
        outputs: object = self._workload.step(self._model, inputs)
        held, once = held_bytes(outputs), Steps(list(tracker.events), list(tracker.moments))
        twice = once.repeated(batch, hold=self._workload.hold)
        if self.repeats:
            return twice, held, len(once.events)
        everything = [outputs] if self._workload.hold == "all" else []
        if self._workload.hold == "none":
            outputs = None
        outputs = self._workload.step(self._model, inputs)
        really = Steps(list(tracker.events), list(tracker.moments))
        self.repeats = twice.is_like(really)
        del everything
        return (twice if self.repeats else really), held, len(once.events)

    def _fake_input(self, tensor: torch.Tensor, tracker: LifetimeTracker) -> torch.Tensor:
        plain = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = FakeTensor(self._mode, plain, self._target.torch_device)
        tracker.see(fake, "inputs")
        return give_value(fake, tensor)

    def _untraceable(self, error: Exception, raised: Moment) -> Exception:
        name = type(self._real).__name__ if isinstance(self._real, nn.Module) else str(self._real)
        where = f"{name}.{raised.module}" if raised.module else name
        kind = f"{type(error).__name__} of {raised.operation}" if raised.operation else type(error).__name__
        reason = " ".join(str(error).split())[:300] or "no message"
        return UntraceableError(
            f"{where} can't be traced ({kind}: {reason})",
            next_step="Calibrate on the device itself: it falls back to small probes",
        )


def _plain(model: Any) -> Any:
    """The model inside what torch.compile and data parallelism wrap around it; adapters stay."""
    while hasattr(model, "_orig_mod") or isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


@contextmanager
def _no_collector() -> Iterator[None]:
    """No cyclic garbage collection inside, so that a trace is the same each time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _as_if_real() -> Iterator[None]:
    """Fake tensors pass for real ones with transformers, and torch's notes on them stay unsaid.

    Told that a tensor is fake, transformers no longer looks at the mask and builds one where it would do without
    (`import_utils.is_tracing`). Here the mask has values to look at.
    """
    fake_log = logging.getLogger("torch._subclasses.fake_tensor")
    level, is_fake = fake_log.level, import_utils.is_fake_tensor
    fake_log.setLevel(logging.CRITICAL)
    import_utils.is_fake_tensor = lambda tensor: False  # noqa: ARG005 (transformers' own signature)
    try:
        yield
    finally:
        import_utils.is_fake_tensor = is_fake
        fake_log.setLevel(level)
