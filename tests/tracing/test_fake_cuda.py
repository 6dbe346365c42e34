"""CUDA tensors on a machine that has none."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from budgetdb.tracing import fake_cuda
from budgetdb.tracing.attention_call import CardRules
from budgetdb.tracing.fake_cuda import can_fake_cuda
from budgetdb.tracing.targets import card_target


def test_fake_tensors_can_be_on_a_card() -> None:
    if not can_fake_cuda():
        pytest.skip("this torch can't be lent a guard")
    with FakeTensorMode(), torch.no_grad():
        x = torch.randn(3, 4, device="cuda")
        y = (x[1:].half() @ x.half().t()).softmax(-1)
        parts = torch.cat([y, y.contiguous()]).cpu(), torch.arange(3, device="cuda:0")[[0, 2]]
        assert y.device == torch.device("cuda", 0)
        assert parts[0].device.type == "cpu"
        assert parts[1].shape == (2,)


def test_it_is_found_out_once() -> None:
    can_fake_cuda.cache_clear()
    assert can_fake_cuda() == can_fake_cuda()
    assert can_fake_cuda.cache_info().hits == 1


def test_real_tensors_are_as_before() -> None:
    can_fake_cuda()
    assert torch.cuda.is_available() == (torch.version.cuda is not None and torch.cuda.device_count() > 0)
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError, NotImplementedError)):
            torch.zeros(1, device="cuda")
    assert torch.zeros(2).add_(1).tolist() == [1, 1]


def test_where_no_guard_can_be_lent_a_card_is_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cuda, "_works", lambda: False)
    monkeypatch.setattr(fake_cuda, "_lend_guard", lambda: False)
    can_fake_cuda.cache_clear()
    try:
        target = card_target(CardRules(capability=(9, 0)))
        assert target.torch_device == torch.device("cpu")
        assert target.stands_in
    finally:
        can_fake_cuda.cache_clear()


@pytest.mark.parametrize("missing", ["library", "symbol"])
def test_a_torch_laid_out_otherwise_is_left_alone(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "library":
        monkeypatch.setattr(fake_cuda.torch, "__file__", str(Path("/no/such/place/__init__.py")))
    else:
        monkeypatch.setattr(fake_cuda, "_REGISTRY", "no_such_symbol")
    assert fake_cuda._lend_guard() is False


def test_a_guard_that_is_there_is_never_replaced() -> None:
    can_fake_cuda()  # lends one where there was none
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * fake_cuda._KINDS).in_dll(library, fake_cuda._REGISTRY)
    before = list(registry)
    assert fake_cuda._lend_guard() is False
    assert list(registry) == before
    # The kinds of devices beside it in the registry: the CPU, the one that lent its guard, and no CUDA's own.
    assert registry[0]
    assert registry[fake_cuda._META]


def test_importing_changes_nothing() -> None:
    program = (
        "import ctypes, pathlib, torch\n"
        "from budgetdb.tracing import fake_cuda\n"
        "library = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / 'lib' / 'libc10.so'))\n"
        "registry = (ctypes.c_void_p * fake_cuda._KINDS).in_dll(library, fake_cuda._REGISTRY)\n"
        "print(bool(registry[fake_cuda._CUDA]) == (torch.version.cuda is not None or torch.version.hip is not None))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "True", ran.stderr
