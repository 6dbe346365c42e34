from __future__ import annotations

import logging
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from budgetdb.costs.base import CostModel
from budgetdb.costs.linear import LinearCost
from budgetdb.errors import PluginError, UnknownNameError
from budgetdb.plugins import ATTENTION, COSTS, DEVICES, REGISTRIES, STRATEGIES, WORKLOADS, PluginInfo, Registry
from budgetdb.testing.costs import check_cost_model

EXAMPLE = Path(__file__).parent / "plugin_example"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs distributions as an installer leaves them behind: packages, and metadata beside them."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    before = set(sys.modules)

    def add(name: str, *, version: str = "1.0", groups: Mapping[str, Mapping[str, str]], **modules: str) -> None:
        for module, code in modules.items():
            (site / f"{module}.py").write_text(code)
        metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [
            line
            for group, points in groups.items()
            for line in (f"[{group}]", *(f"{n} = {v}" for n, v in points.items()))
        ]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")

    yield add
    for module in set(sys.modules) - before:
        if str(site) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


@pytest.fixture
def example(install: Install, tmp_path: Path) -> None:
    """The distribution in tests/plugin_example, installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    for package in EXAMPLE.glob("*/__init__.py"):
        shutil.copytree(package.parent, tmp_path / "site-packages" / package.parent.name)
    install(project["name"], version=project["version"], groups=project["entry-points"])


def install_broken(install: Install) -> None:
    """Four distributions, each with a cost model that can't be used."""
    for name, code, attribute in (
        ("raises-at-import", "raise RuntimeError('no license\\nfor this machine')", "Cost"),
        ("exits-at-import", "import sys\nsys.exit('bye')", "Cost"),
        ("wrong-type", "class Cost: pass", "Cost"),
        ("without-it", "", "Cost"),
    ):
        module = name.replace("-", "_")
        install(name, groups={"budgetdb.costs": {name: f"{module}:{attribute}"}}, **{module: code})


def own(group: str) -> list[PluginInfo]:
    (registry,) = (registry for registry in REGISTRIES if registry.group == group)
    return [info for info in registry.describe() if info.origin != "budgetdb"]


def test_what_comes_with_budgetdb() -> None:
    assert COSTS.names() == ["calibrated", "exact", "linear", "quadratic"]
    assert DEVICES.names() == ["accelerator", "cpu"]
    assert WORKLOADS.names() == ["embed", "forward", "loss"]
    assert STRATEGIES.names() == ["fastest", "fewest"]
    assert {"eager", "sdpa", "none", "flash_attention_2"} <= set(ATTENTION.names())


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.group)
def test_everything_that_comes_with_budgetdb_loads(registry: Registry) -> None:
    for name in registry.names():
        assert registry.get(name) is not None
        assert name in registry
    assert all(
        info == PluginInfo(registry.group, info.name, "budgetdb", info.version, None) for info in registry.describe()
    )
    assert [info.name for info in registry.describe()] == registry.names()


def test_builtin_kinds_are_registered_under_their_own_names() -> None:
    assert all(COSTS.get(name).kind == name for name in COSTS.names())
    assert all(DEVICES.get(name).name == name for name in DEVICES.names())
    assert all(WORKLOADS.get(name).name == name for name in WORKLOADS.names())
    assert all(STRATEGIES.get(name).name == name for name in STRATEGIES.names())
    assert {ATTENTION.get(name) for name in ATTENTION.names()} <= set(COSTS.names())


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown cost model 'quadratc'\. Did you mean 'quadratic'\?"):
        COSTS.get("quadratc")
    assert "quadratc" not in COSTS


class RingCost(LinearCost):
    kind = "ring"


def test_register_and_forget() -> None:
    assert COSTS.register("ring")(RingCost) is RingCost
    try:
        assert COSTS.get("ring") is RingCost
        assert "ring" in COSTS.names()
        assert own("budgetdb.costs") == [PluginInfo("budgetdb.costs", "ring", "registered", None, None)]
        with pytest.raises(ValueError, match="cost model 'ring' is registered already"):
            COSTS.register("ring")(RingCost)
    finally:
        COSTS.unregister("ring")
    assert "ring" not in COSTS
    COSTS.unregister("ring")


def test_a_builtin_name_can_not_be_taken() -> None:
    with pytest.raises(ValueError, match="cost model 'linear' is registered already"):
        COSTS.register("linear")(RingCost)
    assert COSTS.get("linear") is LinearCost


@pytest.mark.parametrize("thing", [object, RingCost(c=1, a=1), "linear"])
def test_only_the_right_type_is_registered(thing: object) -> None:
    with pytest.raises(
        PluginError, match=r"cost model 'ring' of registered is no CostModel. See .*budgetdb\.costs\.base"
    ):
        COSTS.register("ring")(thing)
    assert "ring" not in COSTS


def test_attention_maps_to_names() -> None:
    ATTENTION.register("ring")("linear")
    try:
        assert ATTENTION.get("ring") == "linear"
    finally:
        ATTENTION.unregister("ring")
    with pytest.raises(PluginError, match="attention implementation 'ring' of registered is no str"):
        ATTENTION.register("ring")(RingCost)


def test_a_name_is_not_imported_before_it_is_asked_for(example: None) -> None:
    assert "window" in COSTS.names()
    assert "window" in COSTS
    assert "budgetdb_window" not in sys.modules
    COSTS.get("window")
    assert "budgetdb_window" in sys.modules


def test_an_installed_distribution_is_found(example: None) -> None:
    window = COSTS.get("window")
    assert issubclass(window, CostModel)
    assert ATTENTION.get("sliding") == "window"
    assert own("budgetdb.costs") == [PluginInfo("budgetdb.costs", "window", "budgetdb-window", "1.2", None)]
    assert own("budgetdb.attention") == [PluginInfo("budgetdb.attention", "sliding", "budgetdb-window", "1.2", None)]
    check_cost_model(window, cases=10)


def test_broken_plugins_are_reported_and_the_others_go_on(example: None, install: Install) -> None:
    install_broken(install)
    errors = {info.name: info.error for info in own("budgetdb.costs")}
    assert errors.keys() == {"window", "raises-at-import", "exits-at-import", "wrong-type", "without-it"}
    assert errors["window"] is None
    assert errors["raises-at-import"] == (
        "cost model 'raises-at-import' of raises-at-import can't be imported (RuntimeError: no license). "
        "Upgrade or uninstall raises-at-import, or set BUDGETDB_PLUGINS=none"
    )
    assert "of exits-at-import can't be imported (SystemExit: bye)" in str(errors["exits-at-import"])
    assert errors["wrong-type"] == (
        "cost model 'wrong-type' of wrong-type is no CostModel. See the contract in budgetdb.costs.base"
    )
    assert "of without-it can't be imported (AttributeError: " in str(errors["without-it"])
    assert {info.origin for info in own("budgetdb.costs")} == {"budgetdb-window", *errors} - {"window"}
    assert COSTS.get("linear") is LinearCost
    assert COSTS.get("window").kind == "window"


@pytest.mark.parametrize("name", ["raises-at-import", "exits-at-import", "wrong-type", "without-it"])
def test_a_broken_plugin_asked_for_is_an_error_with_its_distribution(name: str, install: Install) -> None:
    install_broken(install)
    with pytest.raises(PluginError) as caught:
        COSTS.get(name)
    assert f" of {name} " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_interrupt_is_no_fault_of_a_plugin(install: Install) -> None:
    install("slow", groups={"budgetdb.costs": {"slow": "slow_module:Cost"}}, slow_module="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        COSTS.get("slow")


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("none", []),
        ("budgetdb-window", ["window"]),
        ("Budgetdb_Window", ["window"]),
        ("other, budgetdb.window ", ["other", "window"]),
        ("other", ["other"]),
        ("absent", []),
    ],
)
def test_settings_choose_distributions(
    wanted: str, names: list[str], example: None, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("other", groups={"budgetdb.costs": {"other": "other_module:Cost"}}, other_module="raise ValueError")
    assert [info.name for info in own("budgetdb.costs")] == ["other", "window"]
    monkeypatch.setenv("BUDGETDB_PLUGINS", wanted)
    assert [info.name for info in own("budgetdb.costs")] == names
    assert COSTS.names() == sorted({"calibrated", "exact", "linear", "quadratic", *names})
    if "window" not in names:
        with pytest.raises(UnknownNameError, match="unknown cost model 'window'"):
            COSTS.get("window")


def test_on_a_collision_budgetdb_wins(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    code = "from budgetdb.costs.linear import LinearCost\nclass Cost(LinearCost): kind = 'linear'"
    install("taker", groups={"budgetdb.costs": {"linear": "taker_module:Cost"}}, taker_module=code)
    with caplog.at_level(logging.WARNING, logger="budgetdb.plugins"):
        assert COSTS.names() == ["calibrated", "exact", "linear", "quadratic"]
    assert caplog.messages == ["cost model 'linear' of taker is ignored: budgetdb has one"]
    assert COSTS.get("linear") is LinearCost


def test_what_is_registered_goes_before_what_is_installed(example: None) -> None:
    COSTS.register("window")(RingCost)
    try:
        assert COSTS.get("window") is RingCost
    finally:
        COSTS.unregister("window")
    assert COSTS.get("window") is not RingCost


def test_the_example_is_a_project_that_can_be_installed() -> None:
    project: dict[str, Any] = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"] == [path.parent.name for path in EXAMPLE.glob("*/__init__.py")]
    assert set(project["project"]["entry-points"]) <= {registry.group for registry in REGISTRIES}
