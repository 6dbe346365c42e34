"""Workspaces of cuBLAS and cuBLASLt, by device and by what the environment sets."""

from __future__ import annotations

import logging

import pytest

from budgetdb.errors import UsageError
from budgetdb.tracing.workspaces import cublas_workspace_bytes, cublaslt_workspace_bytes, workspace_allocations

MIB = 2**20
DEFAULT = 8_519_680  # :4096:2:16:8, that is 2 * 4096 + 8 * 16 KiB
APART = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}


@pytest.mark.parametrize(
    ("compute_capability", "nbytes"),
    [
        ("7.0", DEFAULT),
        ("8.0", DEFAULT),
        ("8.9", DEFAULT),
        ("9.0", 32 * MIB),
        ("10.0", 32 * MIB),
        ("12.1", 32 * MIB),
        (None, DEFAULT),
        ("gfx942", DEFAULT),
    ],
)
def test_by_device(compute_capability: str | None, nbytes: int) -> None:
    assert cublas_workspace_bytes(compute_capability, {}) == nbytes
    assert cublaslt_workspace_bytes(compute_capability, {}) == nbytes
    assert workspace_allocations(compute_capability, {}) == [nbytes]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (":4096:2:16:8", DEFAULT),
        (":4096:8", 32 * MIB),
        (":16:8", 128 * 1024),
        (":0:0", 0),
        (":4096:2,:16:8", DEFAULT),  # every :SIZE:COUNT in it counts, whatever is between
        ("x:1:2y", 2048),
        (":1:2:3", 2048),
    ],
)
def test_as_configured(text: str, nbytes: int) -> None:
    environment = {"CUBLAS_WORKSPACE_CONFIG": text}
    assert cublas_workspace_bytes("9.0", environment) == nbytes
    assert workspace_allocations("9.0", environment) == ([nbytes] if nbytes else [])


@pytest.mark.parametrize("text", ["", "4096", ":4096", "4096:2", ":-1:2", ":a:b", "default"])
def test_a_malformed_value_is_warned_of_and_passed_over(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert cublas_workspace_bytes("8.0", {"CUBLAS_WORKSPACE_CONFIG": text}) == DEFAULT
    assert "CUBLAS_WORKSPACE_CONFIG" in caplog.text


def test_a_number_torch_can_not_read() -> None:
    with pytest.raises(UsageError, match="CUBLAS_WORKSPACE_CONFIG"):
        cublas_workspace_bytes("9.0", {"CUBLAS_WORKSPACE_CONFIG": f":{2**64}:1"})


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert cublas_workspace_bytes("9.0") == 128 * 1024


@pytest.mark.parametrize(
    ("text", "shared", "apart"),
    [
        ("1024", MIB, MIB),
        ("65536", 32 * MIB, 64 * MIB),  # no more than cuBLAS's, where that is what it uses
        (" +2 KiB", 2048, 2048),
        ("0", 0, 0),
        ("-1", 32 * MIB, 2**64 - 1024),
        ("none", 32 * MIB, MIB),  # not a number: the default
        (str(2**31), 32 * MIB, MIB),  # more than an int holds: the default
    ],
)
def test_cublaslt_as_configured(text: str, shared: int, apart: int) -> None:
    environment = {"CUBLASLT_WORKSPACE_SIZE": text}
    assert cublaslt_workspace_bytes("9.0", environment) == shared
    assert cublaslt_workspace_bytes("9.0", environment | APART) == apart


def test_workspaces_apart_are_two() -> None:
    assert workspace_allocations("9.0", APART) == [32 * MIB, MIB]
    assert workspace_allocations("8.0", APART | {"CUBLASLT_WORKSPACE_SIZE": "0"}) == [DEFAULT]


@pytest.mark.parametrize("text", ["1", "", "no"])
def test_only_0_parts_them(text: str) -> None:
    assert workspace_allocations("9.0", {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": text}) == [32 * MIB]
