"""What attention allocates in a trace: bytes by hand, layouts as torch says, and the math path against a real run."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from budgetdb.tracing import attention_memory
from budgetdb.tracing.attention import CudaAttention, described, with_process_settings
from budgetdb.tracing.attention_kernels import CardRules, Kernel
from budgetdb.tracing.fake_cuda import can_fake_cuda

A100, H100 = CardRules(capability=(8, 0), cudnn=92_000), CardRules(capability=(9, 0), cudnn=92_000)
T4 = CardRules(capability=(7, 5), cudnn=92_000)
# (batch, heads, length, head width), the length no multiple of 8.
K, H, L, D = 3, 4, 100, 64
SEEDS = 2 * 8  # two numbers of 64 bits


class Bytes(TorchDispatchMode):
    """Bytes of storages on one kind of device, now and at most."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type, self.now, self.peak, self.born = device_type, 0, 0, 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.device_type:
                self._see(leaf.untyped_storage())
        return outputs

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._alive:
            return
        self._alive.add(storage._cdata)
        self.now += storage.nbytes()
        self.born += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._died, storage._cdata, storage.nbytes())

    def _died(self, address: int, nbytes: int) -> None:
        self._alive.discard(address)
        self.now -= nbytes


@dataclass(frozen=True)
class Ran:
    """What one call of attention did: bytes at most, left and in all, above its inputs; and its output's layout."""

    kernel: Kernel
    peak: int
    left: int
    strides: tuple[int, ...]
    refused: dict[Kernel, str]
    born: int = field(compare=False, default=0)


def tokens_first(rows: int, heads: int, length: int, width: int, **options: Any) -> torch.Tensor:
    """As a model makes queries: (batch, heads, length, width), each token's heads side by side in memory."""
    return torch.empty(rows, length, heads, width, **options).transpose(1, 2)


def heads_first(rows: int, heads: int, length: int, width: int, **options: Any) -> torch.Tensor:
    """As partial rotary embeddings leave queries: contiguous."""
    return torch.empty(rows, heads, length, width, **options)


def run(
    card: CardRules,
    device: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    width: int = D,
    value_width: int | None = None,
    length: int = L,
    key_heads: int = H,
    rows: int = K,
    mask: str | None = None,
    layout: Callable[..., torch.Tensor] = tokens_first,
    requires_grad: bool = False,
    **options: Any,
) -> Ran:
    if device == "cuda" and not can_fake_cuda():
        pytest.skip("this build can't make fake CUDA tensors")
    with FakeTensorMode(), torch.set_grad_enabled(requires_grad), Bytes(device) as counted:
        made = {"device": device, "dtype": dtype}
        query = layout(rows, H, length, width, **made).requires_grad_(requires_grad)
        key = layout(rows, key_heads, length, width, **made)
        value = layout(rows, key_heads, length, value_width or width, **made)
        attn_mask = None
        if mask is not None:
            kind = torch.bool if mask == "bool" else dtype
            attn_mask = torch.zeros(rows, 1, length, length, dtype=kind, device=device)
        before = counted.peak = counted.now
        counted.born = 0
        with (
            torch.no_grad() if not requires_grad else torch.enable_grad(),
            CudaAttention(card, device_type=device) as mode,
        ):
            output = F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=key_heads != H, **options)
        assert output.shape == (rows, H, length, value_width or width)
        assert output.dtype == dtype
        assert output.device.type == device
        (kernel,) = mode.log
        return Ran(kernel, counted.peak - before, counted.now - before, output.stride(), mode.refused, counted.born)


@pytest.fixture(params=["cuda", "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Fake CUDA tensors, and fake CPU tensors that stand for them."""
    return str(request.param)


TOKENS_FIRST = (L * H * D, D, H * D, 1)
OUTPUT = K * H * L * D * 2


def test_flash_keeps_log_sum_exps_while_it_runs(device: str) -> None:
    ran = run(A100, device, is_causal=True)
    assert ran == Ran("flash", OUTPUT + 4 * K * H * L + SEEDS + 8, OUTPUT, TOKENS_FIRST, {})


def test_flash_does_not_repeat_grouped_heads(device: str) -> None:
    assert run(A100, device, key_heads=2) == run(A100, device)


def test_flash_pads_heads(device: str) -> None:
    """Heads of 60 elements become 64 in contiguous copies, and the output is a view of padded ones."""
    ran = run(A100, device, width=60)
    assert ran.peak == 4 * OUTPUT + 4 * K * H * L + SEEDS + 8
    assert ran.left == OUTPUT
    assert ran.strides == (H * L * 64, L * 64, 64, 1)


def test_flash_and_cudnn_follow_the_layout_of_the_query(device: str) -> None:
    contiguous = (H * L * D, L * D, D, 1)
    for card in (A100, H100):
        assert run(card, device).strides == TOKENS_FIRST
        assert run(card, device, layout=heads_first).strides == contiguous
    # Memory-efficient attention writes tokens first whatever it reads.
    assert run(A100, device, mask="bool", layout=heads_first).strides == TOKENS_FIRST


@pytest.mark.parametrize("length", [96, 100])
def test_efficient_converts_and_pads_the_mask_before_expanding_it(device: str, length: int) -> None:
    """Never `heads` times: 2 bytes for each score of one head, and again with padded rows while these are made."""
    ran = run(A100, device, mask="bool", length=length)
    output = K * H * length * D * 2
    converted = 2 * K * length * length
    if length % 8 == 0:
        expected = max(converted + 2 * 2, converted + output)
    else:
        padded = 2 * K * length * 104
        expected = max(converted + padded, padded + output)
    assert ran.kernel == "efficient"
    assert ran.peak == expected
    assert ran.left == output


def test_efficient_reads_an_aligned_mask_in_place(device: str) -> None:
    assert run(A100, device, mask="float", length=96).peak == K * H * 96 * D * 2
    # Its own mask stays with whoever made it, beside the padded copy.
    assert run(A100, device, mask="float").peak == 2 * K * L * 104 + OUTPUT


def test_efficient_sums_wide_heads_up_in_32_bits(device: str) -> None:
    wide = K * H * L * 160
    assert run(T4, device, dtype=torch.float16, width=160).peak == wide * (2 + 4)
    assert run(A100, device, dtype=torch.float32, width=160).peak == wide * 4
    assert run(T4, device, dtype=torch.float16, width=128).peak == K * H * L * 128 * 2


def test_efficient_keeps_log_sum_exps_for_a_backward_pass_only(device: str) -> None:
    assert run(T4, device, dtype=torch.float16).peak == OUTPUT
    assert run(T4, device, dtype=torch.float16, requires_grad=True).peak == OUTPUT + 4 * K * H * 128


def test_efficient_runs_a_large_batch_in_chunks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole output and one chunk beside the first."""
    monkeypatch.setattr(attention_memory, "EFFICIENT_MOST_ROWS", 2)
    row = H * L * D * 2
    assert run(T4, device, dtype=torch.float16, rows=5).peak == (5 + 2 + 2) * row


def test_cudnn_converts_the_mask_and_does_not_pad_it(device: str) -> None:
    converted = 2 * K * L * L
    ran = run(H100, device, mask="bool")
    assert ran == Ran("cudnn", converted + SEEDS + OUTPUT, OUTPUT, TOKENS_FIRST, {})
    assert run(H100, device, mask="float").peak == SEEDS + OUTPUT
    assert run(H100, device).peak == SEEDS + OUTPUT
    assert run(H100, device, requires_grad=True).peak == SEEDS + OUTPUT + 4 * K * H * L


def test_cudnn_with_narrower_values(device: str) -> None:
    ran = run(H100, device, width=128, value_width=64)
    assert (ran.kernel, ran.peak, ran.strides) == ("cudnn", OUTPUT + SEEDS, TOKENS_FIRST)


@pytest.mark.parametrize("length", [100, 400])
@pytest.mark.parametrize("masked", [False, True])
def test_math_makes_nine_bytes_for_each_score(device: str, masked: bool, length: int) -> None:
    """bfloat16 on a T4: all in 32 bits, and in a long row scores and weights and a bool for each."""
    ran = run(T4, device, mask="bool" if masked else None, length=length)
    scores, heads = K * H * length**2, 4 * K * H * length * D
    mask = 2 * K * length**2 if masked else 0
    # Query, key, value and the scaled query; the scaled key and copies of both by heads, as products want them.
    products = 4 * heads + 3 * heads + 4 * scores
    # One flag for each row and a zero too.
    softmax = 4 * heads + 9 * scores + K * H * length + 4
    assert ran.peak == mask + max(products, softmax)
    assert (ran.kernel, ran.left) == ("math", 2 * K * H * length * D)
    assert ran.refused["efficient"] == "does not take bfloat16 on sm_75"


def test_math_adds_a_mask_in_place(device: str) -> None:
    assert run(T4, device, mask="float").born == run(T4, device).born


def cpu_peak(step: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator handed out during `step`."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del kept
    return peak


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"is_causal": True},
        {"masked": True},
        {"enable_gqa": True},
        {"masked": True, "enable_gqa": True},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "is_causal": True, "enable_gqa": True},
        {"layout": heads_first},
        {"length": 8},  # scores smaller than the heads: another moment is the largest
        {"dtype": torch.bfloat16, "length": 8, "enable_gqa": True},
    ],
    ids=lambda asked: ",".join(asked) or "plain",
)
def test_math_against_the_real_cpu_allocator(asked: dict[str, Any]) -> None:
    """The same C++ runs on CPU, so this is the truth of torch's composition, its order and its lifetimes."""
    settings: dict[str, Any] = {"dtype": torch.float32, "layout": tokens_first, "length": L, "masked": False, **asked}
    dtype, layout, length = (settings.pop(name) for name in ("dtype", "layout", "length"))
    heads = 2 if settings.get("enable_gqa") else H
    masked = settings.pop("masked")

    def inputs() -> tuple[torch.Tensor, ...]:
        mask = (torch.zeros(K, 1, length, length, dtype=torch.bool),) if masked else ()
        return *(layout(K, n, length, D, dtype=dtype).zero_() for n in (H, heads, heads)), *mask

    with torch.no_grad():
        real = inputs()
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(*real, **settings)
            truth = cpu_peak(lambda: F.scaled_dot_product_attention(*real, **settings))
        with FakeTensorMode(), Bytes("cpu") as counted:
            fake = inputs()
            before = counted.peak = counted.now
            math_only = CardRules(capability=(8, 0), disabled=frozenset({"flash", "efficient"}))
            with CudaAttention(math_only, device_type="cpu") as mode:
                F.scaled_dot_product_attention(*fake, **settings)
    assert mode.log == {"math": 1}
    assert counted.peak - before == truth


@pytest.mark.parametrize("layout", [tokens_first, heads_first])
def test_outputs_lie_as_torch_says(layout: Callable[..., torch.Tensor]) -> None:
    """The metas of torch's own operators; cuDNN's and flash attention's accept no device but CUDA on some builds."""
    aten = torch.ops.aten
    with FakeTensorMode(), torch.no_grad():
        query = key = value = layout(K, H, L, D, dtype=torch.bfloat16, device="cpu")
        metas = {
            "flash": aten._scaled_dot_product_flash_attention(query, key, value),
            "efficient": aten._scaled_dot_product_efficient_attention(query, key, value, None, False),
            "cudnn": aten._scaled_dot_product_cudnn_attention(query, key, value, None, False),
        }
    for kernel, card in (("flash", A100), ("efficient", replace(A100, disabled=frozenset({"flash"}))), ("cudnn", H100)):
        ran = run(card, "cpu", layout=layout)
        assert ran.kernel == kernel
        assert metas[kernel][0].stride() == ran.strides


def test_queries_cut_from_one_projection(device: str) -> None:
    """Slices of a fused projection lie apart in memory; outputs don't."""

    def cut(rows: int, heads: int, length: int, width: int, **options: Any) -> torch.Tensor:
        return torch.empty(rows, length, 3, heads, width, **options)[:, :, 1].transpose(1, 2)

    for card in (A100, H100):
        ran = run(card, device, layout=cut)
        assert ran.strides == TOKENS_FIRST
        assert ran.left == OUTPUT


def test_other_calls_pass_through() -> None:
    """Real tensors, other devices and other functions."""
    query = torch.randn(1, 2, 5, 8)
    plain = F.scaled_dot_product_attention(query, query, query)
    with CudaAttention(T4, device_type="cpu") as mode:
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), plain)
        with FakeTensorMode():
            fake = torch.empty(1, 2, 5, 8, device="meta")
            F.scaled_dot_product_attention(fake, fake, fake)
            F.softmax(fake, -1)
    assert not mode.log


def test_calls_by_other_names_are_caught() -> None:
    log: Counter[Kernel] = Counter()
    with FakeTensorMode(), torch.no_grad(), CudaAttention(A100, device_type="cpu", log=log):
        query = torch.empty(1, 2, 5, 8, dtype=torch.float16)
        F.scaled_dot_product_attention(query=query, key=query, value=query, scale=0.3)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        torch.ops.aten.scaled_dot_product_attention(query, query, query)
        torch.ops.aten.scaled_dot_product_attention.default(query, query, query)
    assert log == {"flash": 4}


def test_a_call_is_described() -> None:
    query = torch.empty(2, 6, 3, 8).transpose(1, 2)
    call = described(query, query, query.half(), torch.ones(6, 6, dtype=torch.bool)[:, :1], dropout=0.5)
    assert (call.dtype, call.query, call.dropout, call.unit_stride) == ("mixed", (2, 3, 6, 8), 0.5, True)
    assert call.mask is not None
    assert (call.mask.dtype, call.mask.shape, call.mask.strides) == ("bool", (6, 1), (6, 1))
    flat = torch.empty(100)[1:65].view(1, 1, 8, 8)
    assert not described(flat, flat, flat).aligned_starts
    assert not described(flat.mT, flat, flat).unit_stride
    assert described(flat.requires_grad_(), flat, flat).requires_grad
    with torch.no_grad():
        assert not described(flat, flat, flat).requires_grad


@contextmanager
def without_flash() -> Iterator[None]:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (without_flash, replace(A100, disabled=frozenset({"flash"}))),
        (
            lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
            replace(
                A100,
                disabled=frozenset({"efficient"}),
                order=("math", "flash", "efficient", "cudnn"),
            ),
        ),
    ],
)
def test_settings_of_the_process(
    block: Callable[[], AbstractContextManager[None]], expected: CardRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert with_process_settings(A100) == A100
    with block():
        found = with_process_settings(A100)
        assert (found.disabled - {"cudnn"}, found.order) == (expected.disabled, expected.order)
    assert with_process_settings(A100) == A100
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert with_process_settings(H100) == replace(H100, cudnn_first=False)


def test_softmax_of_half_precision_is_fused_on_cuda_only() -> None:
    """TRACING 3: fp16 scores become 32-bit weights in one go, bf16 ones are copied first. Torch's metas do this."""
    if not can_fake_cuda():
        pytest.skip("this build can't make fake CUDA tensors")

    def bytes_per_score(dtype: torch.dtype, device: str) -> float:
        with FakeTensorMode(), torch.no_grad(), Bytes(device) as counted:
            scores = torch.empty(2, 4, 16, 16, dtype=dtype, device=device)
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)
            return counted.peak / weights.numel()

    assert bytes_per_score(torch.float16, "cuda") == 2 + 4 + 2
    assert bytes_per_score(torch.bfloat16, "cuda") == 2 + 4 + 4
    assert bytes_per_score(torch.float16, "cpu") == 2 + 4 + 4


def test_statistics_of_layer_norm_have_32_bits_on_cuda() -> None:
    if not can_fake_cuda():
        pytest.skip("this build can't make fake CUDA tensors")
    with FakeTensorMode(), torch.no_grad(), Bytes("cuda") as counted:
        hidden = torch.empty(2, 16, 32, dtype=torch.float16, device="cuda")
        normed = F.layer_norm(hidden, (32,))
        assert counted.peak == 2 * hidden.numel() * 2 + 2 * 2 * 16 * 4
        assert counted.now == 2 * normed.numel() * 2
