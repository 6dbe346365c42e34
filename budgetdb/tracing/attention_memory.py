"""What each attention kernel allocates on a card: same storages, same moments, no arithmetic.

Run on fake tensors, each function makes with plain torch operations every tensor that the kernel makes on the device,
and lets go of it when the kernel does; what it returns has the kernel's own layout. Sources: `attention.cpp` (the
composite operation), `cuda/attention.cu`, `flash_attn/flash_api.cpp` and `cudnn/MHA.cpp` of pytorch, in stored versions
of 2025 and 2026; the math path was measured on torch 2.13.

Not counted: cuDNN's workspace, whose size only cuDNN knows, and flash attention's partial results, which it makes when
batch * heads * blocks of queries leave more than a fifth of the card idle (num_splits_heuristic), far below any budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from budgetdb.tracing.attention_call import HALVES

# Head widths that flash attention takes as they are; others are padded (pad_last_dim).
_FLASH_ALIGNMENT = 8
# Elements of a mask that memory-efficient attention reads at a time (preprocess_mask).
_MASK_ALIGNMENT = 8
# cuda/attention.cu: larger batches run in chunks of this size.
EFFICIENT_MOST_ROWS = 65_535
# mem_eff_attention/kernel_forward.h and kernels/cutlassF.h: wider heads don't stay in registers.
_EFFICIENT_REGISTER_WIDTH = 128
_EFFICIENT_LSE_MULTIPLE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How attention is asked for, beside its tensors.

    Attributes:
        is_causal: no query sees a later key.
        dropout: probability.
        enable_gqa: key and value may have fewer heads.
        keeps_statistics: log-sum-exps are kept for a backward pass (attention.cpp, should_compute_logsumexp).
        half_math: math computes 16-bit inputs in 16 bits.
    """

    is_causal: bool = False
    dropout: float = 0.0
    enable_gqa: bool = False
    keeps_statistics: bool = False
    half_math: bool = False


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """FlashAttention 2: output in the query's layout, and log-sum-exps whether needed or not (mha_fwd)."""
    width = query.shape[-1]
    query, key, value = (_padded_heads(tensor) for tensor in (query, key, value))
    output = torch.empty_like(query.transpose(1, 2))
    _log_sum_exps = query.new_empty(query.shape[:3], dtype=torch.float32)
    _rng_state = query.new_empty(2, dtype=torch.uint64)
    _unused = query.new_empty((), dtype=torch.uint64)
    output = output.transpose(1, 2)
    return output if output.shape[-1] == width else output[..., :width]


def efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, options: Options
) -> torch.Tensor:
    """Memory-efficient attention: output by tokens whatever the query's layout (_efficient_attention_forward)."""
    bias = _additive(mask, query.dtype)
    if bias is not None:
        if not _is_aligned(bias):
            bias = _padded_mask(bias)
        bias = bias.expand(*query.shape[:3], key.shape[2])
    if len(query) > EFFICIENT_MOST_ROWS:
        return _efficient_in_chunks(query, value, options=options)
    return _efficient_kernel(query, value, options=options)


def cudnn(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, options: Options) -> torch.Tensor:
    """CuDNN's attention: output in the query's layout (_cudnn_attention_forward, run_cudnn_SDP_fprop)."""
    _bias = _additive(mask, query.dtype)
    _seed = query.new_empty((), dtype=torch.int64)
    _offset = query.new_empty((), dtype=torch.int64)
    output = _empty_in_layout(query, (*query.shape[:3], value.shape[-1]))
    if options.keeps_statistics:
        _statistics = query.new_empty((*query.shape[:3], 1), dtype=torch.float32)
    return output


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, options: Options
) -> torch.Tensor:
    """Attention by matrix products, scores and all (_scaled_dot_product_attention_math).

    Its C++ can't be asked: it adds the mask out of place when it meets a fake tensor, and hides its softmax.
    """
    bias = _additive(mask, query.dtype)
    dtype = query.dtype
    if dtype_name(dtype) in HALVES and not options.half_math:
        query, key, value = query.float(), key.float(), value.float()
    scaled = query * 1.0
    if options.is_causal:
        bias = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        bias = _additive(bias, scaled.dtype)
    # C++ keeps what these are made of to its end, as the names here do.
    keys = _repeated_heads(key, query.shape[-3]) if options.enable_gqa else key
    values = _repeated_heads(value, query.shape[-3]) if options.enable_gqa else value
    scores = torch.matmul(scaled, keys.transpose(-2, -1) * 1.0)
    if bias is not None:
        scores.add_(bias)
    scores = _safe_softmax(scores)
    if options.dropout:
        scores = torch.dropout(scores, options.dropout, train=True)
    # The second result, the weights, is made first: C++ leaves the order to the compiler, torch 2.13 shows this one.
    _weights = scores.to(dtype)
    return torch.matmul(scores, values).to(dtype)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bool mask as numbers to add to the scores, in `dtype`; others as they are (convert_boolean_attn_mask)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    shown = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    hidden = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, shown, hidden)


def _is_aligned(bias: torch.Tensor) -> bool:
    """aligned_tensor."""
    return bias.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in bias.stride()[:-1])


def _padded_mask(bias: torch.Tensor) -> torch.Tensor:
    """A copy with longer rows, of which the old length is shown (pad_bias).

    It is made before the mask is expanded to the heads, since torch 2.2 (pytorch#114173): preprocess_mask.
    """
    length = bias.shape[-1]
    return F.pad(bias, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]


def _padded_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Heads as wide as flash attention takes them (pad_last_dim); a contiguous copy where they are not."""
    missing = -tensor.shape[-1] % _FLASH_ALIGNMENT
    return F.pad(tensor, (0, missing)) if missing else tensor


def _efficient_kernel(query: torch.Tensor, value: torch.Tensor, *, options: Options) -> torch.Tensor:
    rows, heads, length = query.shape[:3]
    output = query.new_empty((rows, length, heads, value.shape[-1]))
    kept = -(-length // _EFFICIENT_LSE_MULTIPLE) * _EFFICIENT_LSE_MULTIPLE if options.keeps_statistics else 0
    _log_sum_exps = query.new_empty((rows, heads, kept), dtype=torch.float32)
    # kNeedsOutputAccumulatorBuffer: outputs too wide for registers are summed up in memory, in 32 bits.
    if max(query.shape[-1], value.shape[-1]) > _EFFICIENT_REGISTER_WIDTH and dtype_name(query.dtype) in HALVES:
        _sums = torch.empty_like(output, dtype=torch.float32)
    return output.transpose(1, 2)


def _efficient_in_chunks(query: torch.Tensor, value: torch.Tensor, *, options: Options) -> torch.Tensor:
    """_scaled_dot_product_efficient_attention_cuda, where the batch is larger than its grid."""
    first = _efficient_kernel(query[:EFFICIENT_MOST_ROWS], value, options=options)
    output = torch.empty_strided((len(query), *first.shape[1:]), first.stride(), dtype=first.dtype, device=first.device)
    for start in range(EFFICIENT_MOST_ROWS, len(query), EFFICIENT_MOST_ROWS):
        chunk = _efficient_kernel(query[start : start + EFFICIENT_MOST_ROWS], value, options=options)
        del chunk  # copied into the output before the next is made
    return output


def _empty_in_layout(query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An empty tensor whose dimensions lie in memory in the order of the query's (alloc_with_matching_layout)."""
    if tuple(query.shape) == shape:
        return torch.empty_like(query)
    inner_first = sorted(range(len(shape)), key=lambda i: query.stride(i) or math.inf)
    strides, step = [0] * len(shape), 1
    for i in inner_first:
        strides[i] = step
        step *= shape[i]
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=query.device)


def _repeated_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """As many heads as the query has (pre_process_group_query_attention_input)."""
    return tensor if tensor.shape[-3] == heads else tensor.repeat_interleave(heads // tensor.shape[-3], dim=-3)


def _safe_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax, with rows of -inf alone made zero in place; their search makes a bool for each score (_safe_softmax)."""
    output = torch.softmax(scores, -1)
    _hidden = torch.isneginf(scores)
    _empty_rows = _hidden.all(-1, keepdim=True)
    _zero = scores.new_empty(())
    return output


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
