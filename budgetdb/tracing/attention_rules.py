"""What each attention kernel of torch refuses to run.

Every rule says why a kernel refuses a call, or None, and names torch's function of the same meaning. Those of
`sdp_utils_cpp.h` and `Context.h` were read in the headers of torch 2.13; those of `cuda/sdp_utils.cpp` in two stored
versions around it (one of spring 2026, and 001f694a, later), which agree but where a comment says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from budgetdb.tracing.attention_call import AttentionCall, CardRules, Kernel

Rule = Callable[[AttentionCall, CardRules], str | None]

# The newest architecture of all three fused kernels: check_*_hardware_support.
_NEWEST = (12, 1)
# AOTriton's check_gpu, without those it holds for experimental (gfx11, gfx12); from its release notes, not tried.
_GFX = frozenset({"gfx90a", "gfx942", "gfx950"})
_CUDNN_MOST_ROWS = 65_535

# Shared by the fused kernels.


def _four_dimensions(call: AttentionCall, _: CardRules) -> str | None:
    """check_tensor_shapes."""
    if len(call.query) == len(call.key) == len(call.value) == 4:
        return None
    return f"needs tensors of 4 dimensions, got {len(call.query)}"


def _no_empty_length(call: AttentionCall, _: CardRules) -> str | None:
    """check_nonzero_sequence_lengths_dense."""
    return None if call.query_length and call.key_length else "needs at least one token"


def _unit_strides(call: AttentionCall, *, ignore_single: bool) -> str | None:
    """check_last_dim_stride_equals_1_dense, whose template parameter is `ignore_single`."""
    if not call.unit_stride and not (ignore_single and call.head_width == 1):
        return "needs the last dimension of query, key and value contiguous"
    if call.mask is not None and call.mask.strides[-1] != 1:
        return "needs the last dimension of the mask contiguous"
    return None


def _contiguous(call: AttentionCall, _: CardRules) -> str | None:
    return _unit_strides(call, ignore_single=False)


def _contiguous_unless_single(call: AttentionCall, _: CardRules) -> str | None:
    return _unit_strides(call, ignore_single=True)


def _same_heads(call: AttentionCall, _: CardRules) -> str | None:
    """check_batch_size_and_num_heads_dense, without grouped queries."""
    if not call.query[0] == call.key[0] == call.value[0]:
        return "needs the same batch size in query, key and value"
    if not call.query[1] == call.key[1] == call.value[1]:
        return f"needs as many key and value heads as query heads, got {call.key[1]} for {call.query[1]}"
    return None


def _groups_divide(call: AttentionCall, card: CardRules) -> str | None:
    """check_batch_size_and_num_heads_dense and check_grouped_query_attention."""
    if not call.enable_gqa or not call.query[0] == call.key[0] == call.value[0]:
        return _same_heads(call, card)
    if call.heads % call.key[1] or call.heads % call.value[1]:
        return f"needs a number of key heads that divides the {call.heads} query heads, got {call.key[1]}"
    return None


def _grouped_alike(call: AttentionCall, card: CardRules) -> str | None:
    """As `_groups_divide`, with requires_same_num_heads."""
    if call.enable_gqa and call.key[1] != call.value[1]:
        return "needs as many key heads as value heads"
    return _groups_divide(call, card)


def _sixteen_bits(call: AttentionCall, card: CardRules) -> str | None:
    """check_dtypes_low_precision."""
    allowed = {"float16", "bfloat16"} if card.gfx or card.major >= 8 else {"float16"}
    return None if call.dtype in allowed else f"does not take {call.dtype} on {card}"


def _from_ampere(_: AttentionCall, card: CardRules) -> str | None:
    """check_flash_attention_hardware_support, check_cudnn_hardware_support."""
    return None if (8, 0) <= card.capability <= _NEWEST else f"needs sm_80 to sm_121, not {card}"


# Flash attention.


def _no_mask(call: AttentionCall, _: CardRules) -> str | None:
    """check_for_attn_mask."""
    return None if call.mask is None else "takes no mask"


def _equal_widths(call: AttentionCall, card: CardRules) -> str | None:
    """check_head_dim_size_flash: 256 on NVIDIA; on AMD as far as AOTriton goes (aotriton_max_hdim)."""
    most = 256 if card.gfx is None or card.gfx.startswith("gfx11") else 512
    if call.query[-1] == call.key[-1] == call.value[-1] <= most:
        return None
    return f"needs equal head widths up to {most}, got {call.head_width} and {call.value_width}"


def _square_if_causal(call: AttentionCall, _: CardRules) -> str | None:
    """check_flash_causal_non_square_seqlens."""
    if call.is_causal and call.query_length != call.key_length:
        return f"needs as many queries as keys when causal, got {call.query_length} and {call.key_length}"
    return None


def _backward_of_wide_heads(call: AttentionCall, card: CardRules) -> str | None:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
    small = (8, 6) <= card.capability <= (8, 9) or (12, 0) <= card.capability <= (12, 1)
    if not (small and call.requires_grad) or call.head_width <= 192:
        return None
    if call.head_width > 224 and not call.dropout:
        return None
    return f"has no backward for heads of {call.head_width} on {card}"


# Memory-efficient attention.


def _from_maxwell(_: AttentionCall, card: CardRules) -> str | None:
    """check_mem_efficient_hardware_support."""
    return None if (5, 0) <= card.capability <= _NEWEST else f"needs sm_50 to sm_121, not {card}"


def _efficient_alignment(call: AttentionCall, card: CardRules) -> int:
    """Elements that head widths must be a multiple of (minimum_gemm_alignment, use_tensor_cores)."""
    has_tensor_cores = card.gfx is not None or card.major >= (7 if call.is_half else 8)
    if not has_tensor_cores:
        return 1
    return 8 if call.is_half else 4


def _efficient_widths(call: AttentionCall, card: CardRules) -> str | None:
    """check_head_dim_size_mem_efficient."""
    multiple = _efficient_alignment(call, card)
    if call.head_width == call.key[-1] and all(
        w > 0 and w % multiple == 0 for w in (call.head_width, call.value_width)
    ):
        return None
    return f"needs head widths that are multiples of {multiple}, got {call.head_width} and {call.value_width}"


def _efficient_starts(call: AttentionCall, card: CardRules) -> str | None:
    """check_data_ptr_alignment_mem_efficient (pytorch#184258, May 2026)."""
    return None if call.aligned_starts or card.major < 8 else "needs query, key and value to start at 16 bytes"


def _efficient_heads(call: AttentionCall, card: CardRules) -> str | None:
    return _grouped_alike(call, card) if card.efficient_gqa and not card.gfx else _same_heads(call, card)


def _efficient_dtypes(call: AttentionCall, card: CardRules) -> str | None:
    """The dtypes at the end of can_use_mem_efficient_attention."""
    allowed = {"float16", "float32"} | ({"bfloat16"} if card.gfx or card.major >= 8 else set())
    return None if call.dtype in allowed else f"does not take {call.dtype} on {card}"


# cuDNN.


def _has_cudnn(call: AttentionCall, card: CardRules) -> str | None:
    """The beginning of can_use_cudnn_attention."""
    if card.cudnn is None or card.cudnn < 90_000:
        return "needs cuDNN 9"
    if call.dropout and 91_100 < card.cudnn < 91_400:
        return "has no dropout in cuDNN 9.11 to 9.13"
    return None


def _not_deterministic(_: AttentionCall, card: CardRules) -> str | None:
    """check_cudnn_deterministic."""
    return "is not deterministic" if card.deterministic else None


def _mask_broadcasts(call: AttentionCall, _: CardRules) -> str | None:
    """check_attn_mask_shape."""
    if call.mask is None:
        return None
    full = (call.batch_size, call.heads, call.query_length, call.key_length)
    shape = call.mask.shape
    if len(shape) in (2, 4) and all(size in (1, whole) for size, whole in zip(shape[::-1], full[::-1], strict=False)):
        return None
    return f"needs a mask that broadcasts to {full}, of 2 or 4 dimensions, got {shape}"


def _sixteenth_dropout(call: AttentionCall, _: CardRules) -> str | None:
    """check_cudnn_dropout."""
    return None if (call.dropout * 16).is_integer() else "needs a dropout that is a multiple of 1/16"


def _cudnn_most_width(call: AttentionCall, card: CardRules) -> int:
    """The widest head of check_cudnn_tensor_shapes.

    256 also asks that torch was built with cuDNN's frontend 1.24 (001f694a); builds with a cuDNN above 9.22 are taken
    to be.
    """
    server = card.capability == (9, 0) or card.major == 10
    cudnn = card.cudnn or 0
    if server and cudnn > 92_200 and not (card.capability == (10, 7) and cudnn <= 92_500):
        return 256
    if server and cudnn >= 91_100 and (call.head_width, call.value_width) == (192, 128):
        return 192
    return 128


def _cudnn_shapes(call: AttentionCall, card: CardRules) -> str | None:
    """check_cudnn_tensor_shapes, for cuDNN 9."""
    most = _cudnn_most_width(call, card)
    widths = (call.head_width, call.value_width)
    if max(call.batch_size, call.heads) > _CUDNN_MOST_ROWS:
        return f"takes {_CUDNN_MOST_ROWS} rows or heads at most, got {call.batch_size} and {call.heads}"
    if max(widths) > most or any(width % 8 for width in widths):
        return f"needs head widths up to {most} that are multiples of 8, got {widths[0]} and {widths[1]}"
    if call.key_length == 1 or (call.dropout and call.query_length == 1):
        return "needs more than one token"
    return None


def _cudnn_backward_of_wide_heads(call: AttentionCall, card: CardRules) -> str | None:
    """check_cudnn_d256_bprop_head_dim (001f694a)."""
    widths = (call.head_width, call.value_width)
    if not call.requires_grad or max(widths) <= 128 or widths in ((192, 128), (256, 256)):
        return None
    return f"has no backward for heads of {widths[0]} and {widths[1]} on {card}"


# AMD: both fused kernels are AOTriton's. Read in sdp_utils.cpp, tried on no card.


def _aotriton_card(_: AttentionCall, card: CardRules) -> str | None:
    """The ROCm half of check_flash_attention_hardware_support and check_mem_efficient_hardware_support."""
    return None if card.gfx in _GFX else f"needs one of {', '.join(sorted(_GFX))}, not {card}"


def _mask_dtype(call: AttentionCall, _: CardRules) -> str | None:
    """The ROCm half of can_use_mem_efficient_attention."""
    if call.mask is None or call.mask.is_bool or call.mask.dtype == call.dtype:
        return None
    return f"needs a mask of bool or {call.dtype}, got {call.mask.dtype}"


def _no_cudnn(_: AttentionCall, __: CardRules) -> str | None:
    return "is not there on AMD"


# In the order of can_use_flash_attention, can_use_mem_efficient_attention and can_use_cudnn_attention.
NVIDIA_RULES: Mapping[Kernel, tuple[Rule, ...]] = MappingProxyType(
    {
        "flash": (
            *(_four_dimensions, _no_mask, _equal_widths, _from_ampere, _backward_of_wide_heads, _square_if_causal),
            *(_sixteen_bits, _grouped_alike, _no_empty_length, _contiguous_unless_single),
        ),
        "efficient": (
            *(_from_maxwell, _four_dimensions, _efficient_widths, _efficient_starts, _no_empty_length, _contiguous),
            *(_efficient_heads, _efficient_dtypes),
        ),
        "cudnn": (
            *(_has_cudnn, _four_dimensions, _not_deterministic, _sixteen_bits, _mask_broadcasts, _from_ampere),
            *(_sixteenth_dropout, _no_empty_length, _contiguous_unless_single, _groups_divide, _cudnn_shapes),
            _cudnn_backward_of_wide_heads,
        ),
        "math": (),
    }
)
AMD_RULES: Mapping[Kernel, tuple[Rule, ...]] = MappingProxyType(
    {
        "flash": (
            *(_four_dimensions, _no_mask, _equal_widths, _aotriton_card, _square_if_causal, _sixteen_bits),
            *(_grouped_alike, _no_empty_length, _contiguous_unless_single),
        ),
        "efficient": (
            *(_aotriton_card, _four_dimensions, _equal_widths, _efficient_widths, _no_empty_length, _contiguous),
            *(_same_heads, _mask_dtype, _efficient_dtypes),
        ),
        "cudnn": (_no_cudnn,),
        "math": (),
    }
)
