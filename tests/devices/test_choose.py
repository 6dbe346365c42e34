from __future__ import annotations

import pytest
import torch

from budgetdb.devices import nvml
from budgetdb.devices.accelerator import AcceleratorDevice
from budgetdb.devices.choose import choose_device
from budgetdb.devices.cpu import CpuDevice
from budgetdb.errors import DeviceError, UnknownNameError
from budgetdb.plugins import DEVICES

no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@pytest.mark.parametrize("name", ["cpu", torch.device("cpu"), "cpu:0"])
def test_the_cpu(name: str | torch.device) -> None:
    device = choose_device(name)
    assert isinstance(device, CpuDevice)
    assert device.torch_device == torch.device("cpu")


@no_accelerator
@pytest.mark.parametrize("name", [None, "auto"])
def test_the_default_without_an_accelerator(name: str | None) -> None:
    assert isinstance(choose_device(name), CpuDevice)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "auto", "accelerator", "accelerator:0"])
def test_the_default_with_an_accelerator(name: str | None) -> None:
    device = choose_device(name)
    assert isinstance(device, AcceleratorDevice)
    assert device.torch_device.index is not None


@pytest.mark.gpu
def test_an_index_that_is_not_there() -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    count = torch.accelerator.device_count()
    with pytest.raises(DeviceError, match=rf"there is no {accelerator.type}:{count}, only {count} device"):
        choose_device(f"{accelerator.type}:{count}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cude", "unknown device 'cude'. Did you mean 'cuda'?"),
        ("cuda0", "unknown device 'cuda0'. Did you mean 'cuda'?"),
        ("acelerator", "unknown device 'acelerator'. Did you mean 'accelerator'?"),
        ("quantum", "unknown device 'quantum'. Known: accelerator, auto, cpu, cuda, mps, xpu"),
        ("", "unknown device ''. Known: accelerator, auto, cpu, cuda, mps, xpu"),
    ],
)
def test_an_unknown_name(name: str, message: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        choose_device(name)
    assert str(caught.value) == message


@no_accelerator
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps", "xpu"])
def test_a_device_that_this_machine_has_not(name: str) -> None:
    with pytest.raises(DeviceError) as caught:
        choose_device(name)
    kind = name.partition(":")[0]
    assert str(caught.value) == f"no {kind} device on this machine (accelerator: none). Use --device cpu"


@no_accelerator
def test_no_accelerator_at_all() -> None:
    with pytest.raises(DeviceError, match=r"this machine has no accelerator that torch can use\. Use --device cpu"):
        choose_device("accelerator")


@pytest.mark.parametrize("name", ["cuda:x", "cpu:-1", "cpu:"])
def test_a_name_that_torch_can_not_read(name: str) -> None:
    with pytest.raises(DeviceError) as caught:
        choose_device(name)
    kind = name.partition(":")[0]
    assert str(caught.value) == f"{name!r} names no device. Write it like {kind} or {kind}:0"


def test_a_plugin_is_chosen_by_its_name() -> None:
    class Drawer(CpuDevice):
        name = "drawer"

    DEVICES.register("drawer")(Drawer)
    try:
        assert isinstance(choose_device("drawer"), Drawer)
        with pytest.raises(UnknownNameError, match=r"unknown device 'drawr'\. Did you mean 'drawer'\?"):
            choose_device("drawr")
    finally:
        DEVICES.unregister("drawer")


@pytest.mark.skipif(torch.cuda.is_available(), reason="NVML has somebody to ask")
def test_without_a_driver_nvml_says_nothing() -> None:
    assert nvml.driver_version() is None
    assert nvml.other_processes_bytes(torch.device("cuda", 0)) is None
