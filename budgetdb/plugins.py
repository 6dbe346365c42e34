"""Named implementations, loaded when first asked for, from this package or any other that is installed.

Five registries, one for each extension point: `COSTS`, `DEVICES`, `WORKLOADS`, `STRATEGIES` (of packing) and
`ATTENTION` (which maps an attention implementation to the name of the cost model that describes it). Another package
adds to one by a decorator::

    @budgetdb.plugins.COSTS.register("ring")
    class RingCost(FittedCost): ...

or, without being imported first, by an entry point of the registry's group name::

    [project.entry-points."budgetdb.costs"]
    ring = "my_package.costs:RingCost"

Plugins run with the rights of the environment they are installed in. A plugin that fails to import is reported and
skipped; it never takes another down. On a collision of names the one that comes with budgetdb wins.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from budgetdb.errors import PluginError, UnknownNameError
from budgetdb.settings import read_settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PluginInfo:
    """One row of `budgetdb plugins`.

    Attributes:
        group: the extension point.
        name: what it is registered under.
        origin: `budgetdb`, `registered` (by a decorator), or the name of the distribution it comes from.
        version: that distribution's version, or None.
        error: why it can't be used, or None.
    """

    group: str
    name: str
    origin: str
    version: str | None
    error: str | None


class Registry:
    """The implementations of one extension point, by name.

    Args:
        group: the entry-point group.
        kind: what one is called in messages.
        builtin: name to either `module:attribute`, imported when first used, or the value itself.
        base: `module:attribute` of the class that implementations derive from; None where they are plain names.
    """

    def __init__(self, group: str, *, kind: str, builtin: Mapping[str, str], base: str | None = None) -> None:
        self.group, self.kind = group, kind
        self._builtin = dict(builtin)
        self._base = base
        self._registered: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """A decorator that registers what it decorates under `name`.

        Raises:
            ValueError: the name is taken.
        """

        def add(implementation: Any) -> Any:
            if name in self._builtin or name in self._registered:
                raise ValueError(f"{self.kind} {name!r} is registered already")
            self._registered[name] = self._checked(name, implementation, origin="registered")
            return implementation

        return add

    def unregister(self, name: str) -> None:
        """Forget what `register` added under `name`."""
        self._registered.pop(name, None)

    def names(self) -> list[str]:
        """Every name, sorted; nothing is imported."""
        return sorted({*self._builtin, *self._registered, *(point.name for point in self._entry_points())})

    def __contains__(self, name: str) -> bool:
        return name in self._builtin or name in self._registered or name in self.names()

    def get(self, name: str) -> Any:
        """The implementation called `name`.

        Raises:
            UnknownNameError: nothing of that name; the message has the nearest one.
            PluginError: it is there and can't be imported.
        """
        if name in self._builtin:
            return self._load_builtin(name)
        if name in self._registered:
            return self._registered[name]
        for point in self._entry_points():
            if point.name == name:
                return self._load_entry_point(point)
        raise UnknownNameError(self.kind, name, self.names())

    def describe(self) -> Iterator[PluginInfo]:
        """What is registered, each loaded to see that it can be."""
        for name in sorted(self._builtin):
            yield PluginInfo(self.group, name, "budgetdb", _version("budgetdb"), None)
        for name in sorted(self._registered):
            yield PluginInfo(self.group, name, "registered", None, None)
        for point in self._entry_points():
            error = None
            try:
                self._load_entry_point(point)
            except PluginError as failure:
                error = str(failure)
            yield PluginInfo(self.group, point.name, *_distribution(point), error)

    def _entry_points(self) -> list[EntryPoint]:
        wanted = read_settings().plugins
        if wanted == "none":
            return []
        names = None if wanted is None else {_normal(part) for part in wanted.split(",")}
        found = []
        for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
            distribution = _distribution(point)[0]
            if point.name in self._builtin:
                _log.warning("%s %r of %s is ignored: budgetdb has one", self.kind, point.name, distribution)
            elif names is None or _normal(distribution) in names:
                found.append(point)
        return found

    def _load_builtin(self, name: str) -> Any:
        value = self._builtin[name]
        return _import(value) if self._base else value

    def _load_entry_point(self, point: EntryPoint) -> Any:
        origin = _distribution(point)[0]
        try:
            loaded = point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may even call sys.exit at import
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise PluginError(
                f"{self.kind} {point.name!r} of {origin} can't be imported ({reason})",
                next_step=f"Upgrade or uninstall {origin}, or set BUDGETDB_PLUGINS=none",
            ) from None
        return self._checked(point.name, loaded, origin=origin)

    def _checked(self, name: str, implementation: Any, *, origin: str) -> Any:
        if self._base is None:
            expected: type = str
            fits = isinstance(implementation, str)
        else:
            expected = _import(self._base)
            fits = isinstance(implementation, type) and issubclass(implementation, expected)
        if not fits:
            raise PluginError(
                f"{self.kind} {name!r} of {origin} is no {expected.__name__}",
                next_step=f"See the contract in {expected.__module__}",
            )
        return implementation


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _distribution(point: EntryPoint) -> tuple[str, str | None]:
    return (point.dist.name, point.dist.version) if point.dist else ("unknown", None)


def _normal(distribution: str) -> str:
    """A distribution's name as packaging tools compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


COSTS = Registry(
    "budgetdb.costs",
    kind="cost model",
    base="budgetdb.costs.base:CostModel",
    builtin={
        "calibrated": "budgetdb.costs.calibrated:CalibratedCost",
        "exact": "budgetdb.costs.exact:ExactCost",
        "linear": "budgetdb.costs.linear:LinearCost",
        "quadratic": "budgetdb.costs.quadratic:QuadraticCost",
    },
)
DEVICES = Registry(
    "budgetdb.devices",
    kind="device",
    base="budgetdb.devices.base:Device",
    builtin={
        "accelerator": "budgetdb.devices.accelerator:AcceleratorDevice",
        "cpu": "budgetdb.devices.cpu:CpuDevice",
    },
)
WORKLOADS = Registry(
    "budgetdb.workloads",
    kind="workload",
    base="budgetdb.workloads.base:Workload",
    builtin={
        "embed": "budgetdb.workloads.embed:EmbedWorkload",
        "forward": "budgetdb.workloads.forward:ForwardWorkload",
        "loss": "budgetdb.workloads.loss:LossWorkload",
    },
)
STRATEGIES = Registry(
    "budgetdb.strategies",
    kind="strategy",
    base="budgetdb.sampling.strategies:Strategy",
    builtin={
        "fastest": "budgetdb.sampling.strategies:Fastest",
        "fewest": "budgetdb.sampling.strategies:Fewest",
    },
)
# FIELD 2: eager attention materialises k*H*L*L scores; sdpa materialises the k*1*L*L mask once a row is padded; flash
# attention and its kin keep neither. `none` is a callable whose attention is unknown: quadratic holds in any case.
ATTENTION = Registry(
    "budgetdb.attention",
    kind="attention implementation",
    builtin={
        "eager": "quadratic",
        "sdpa": "quadratic",
        "none": "quadratic",
        "flex_attention": "linear",
        "flash_attention_2": "linear",
        "flash_attention_3": "linear",
        "flash_attention_4": "linear",
    },
)
REGISTRIES = (COSTS, DEVICES, WORKLOADS, STRATEGIES, ATTENTION)
