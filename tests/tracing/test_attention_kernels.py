"""Which attention kernel a card runs: a table of decisions, and the reasons given."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from budgetdb.errors import DeviceError
from budgetdb.tracing.attention_kernels import (
    AttentionCall,
    CardRules,
    Kernel,
    MaskForm,
    choose_kernel,
    kernel_order,
    refusal,
    refusals,
)

# cuDNN of the wheels for CUDA 13, above 9.15.0, and not above 9.22.
CUDNN = 92_000
CARDS = {
    "V100": CardRules(capability=(7, 0), cudnn=CUDNN),
    "T4": CardRules(capability=(7, 5), cudnn=CUDNN),
    "A100": CardRules(capability=(8, 0), cudnn=CUDNN),
    "L4": CardRules(capability=(8, 9), cudnn=CUDNN),
    "H100": CardRules(capability=(9, 0), cudnn=CUDNN),
    "B200": CardRules(capability=(10, 0), cudnn=CUDNN),
}
OLD, MIDDLE, SERVER = ("V100", "T4"), ("A100", "L4"), ("H100", "B200")
WIDTHS = (32, 64, 80, 96, 128, 160, 256, 320)
ROWS, HEADS, LENGTH = 4, 8, 100


def call(
    dtype: str = "bfloat16",
    width: int = 64,
    mask: str | None = None,
    *,
    key_heads: int = HEADS,
    length: int = LENGTH,
    key_length: int | None = None,
    rows: int = ROWS,
    is_causal: bool = False,
    enable_gqa: bool | None = None,
) -> AttentionCall:
    key_length = length if key_length is None else key_length
    form = None
    if mask is not None:
        strides = (length * key_length, length * key_length, key_length, 1)
        form = MaskForm(dtype="bool" if mask == "bool" else dtype, shape=(rows, 1, length, key_length), strides=strides)
    return AttentionCall(
        dtype=dtype,
        query=(rows, HEADS, length, width),
        key=(rows, key_heads, key_length, width),
        value=(rows, key_heads, key_length, width),
        mask=form,
        is_causal=is_causal,
        enable_gqa=key_heads != HEADS if enable_gqa is None else enable_gqa,
    )


def expected(card: str, dtype: str, width: int, mask: str | None, *, grouped: bool) -> Kernel:
    """The decision as a person who read the sources would write it down."""
    half = dtype in ("float16", "bfloat16")
    if card in OLD:
        # No flash and no cuDNN below sm_80 (check_flash_attention_hardware_support, check_cudnn_hardware_support), no
        # bfloat16 in any fused kernel (less_than_sm80_mem_efficient_dtypes), no grouped queries in the efficient one.
        return "math" if dtype == "bfloat16" or grouped else "efficient"
    # check_cudnn_tensor_shapes: 128 up to cuDNN 9.22; check_prefer_cudnn_attention: Hopper and Blackwell.
    if card in SERVER and half and width <= 128:
        return "cudnn"
    # check_for_attn_mask, check_head_dim_size_flash, check_dtypes_low_precision.
    if half and mask is None and width <= 256:
        return "flash"
    # minimum_gemm_alignment: all these widths are multiples of 8. Grouped queries: pytorch#191085 came after 2.13.
    return "math" if grouped else "efficient"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("card", CARDS)
def test_the_table_of_decisions(card: str, dtype: str, mask: str | None, grouped: bool) -> None:
    for width in WIDTHS:
        asked = call(dtype, width, mask, key_heads=2 if grouped else HEADS)
        assert choose_kernel(asked, CARDS[card]) == expected(card, dtype, width, mask, grouped=grouped), width


# The same one by one, so that a mistake made twice above still shows.
SAID = [
    ("T4", "float16", 64, None, 8, "efficient"),  # "we use mem-efficient on Turing": no flash before sm_80
    ("T4", "float16", 128, "bool", 8, "efficient"),
    ("T4", "float16", 128, None, 2, "math"),  # transformers asks for enable_gqa whatever the card
    ("T4", "bfloat16", 64, None, 8, "math"),
    ("V100", "float32", 64, None, 8, "efficient"),
    ("A100", "bfloat16", 64, None, 8, "flash"),
    ("A100", "bfloat16", 64, "bool", 8, "efficient"),  # check_for_attn_mask
    ("A100", "float32", 64, None, 8, "efficient"),
    ("A100", "float32", 64, None, 2, "math"),
    ("A100", "bfloat16", 256, None, 8, "flash"),
    ("A100", "bfloat16", 320, None, 8, "efficient"),
    ("L4", "float16", 128, None, 2, "flash"),
    ("H100", "bfloat16", 64, "bool", 8, "cudnn"),
    ("H100", "bfloat16", 128, None, 2, "cudnn"),
    ("H100", "bfloat16", 128, "float", 2, "cudnn"),  # check_batch_size_and_num_heads_dense<true, false>
    ("H100", "bfloat16", 256, None, 8, "flash"),
    ("H100", "bfloat16", 256, "bool", 8, "efficient"),
    ("H100", "float32", 64, "bool", 8, "efficient"),
    ("B200", "float16", 96, "bool", 8, "cudnn"),
]


@pytest.mark.parametrize(("card", "dtype", "width", "mask", "key_heads", "kernel"), SAID)
def test_what_is_said_of_cards(
    card: str, dtype: str, width: int, mask: str | None, key_heads: int, kernel: Kernel
) -> None:
    assert choose_kernel(call(dtype, width, mask, key_heads=key_heads), CARDS[card]) == kernel


def test_cudnn_comes_first_only_where_torch_prefers_it() -> None:
    """check_prefer_cudnn_attention."""
    first = ("cudnn", "flash", "efficient", "math")
    assert kernel_order(CARDS["H100"]) == kernel_order(CARDS["B200"]) == first
    assert kernel_order(CardRules(capability=(10, 3), cudnn=CUDNN)) == first
    for other in (
        CARDS["A100"],
        CardRules(capability=(12, 0), cudnn=CUDNN),  # consumer Blackwell
        CardRules(capability=(9, 0), cudnn=91_500),
        CardRules(capability=(9, 0)),
        CardRules(capability=(9, 0), cudnn=CUDNN, cudnn_first=False),  # TORCH_CUDNN_SDPA_DEPRIORITIZED=1
    ):
        assert kernel_order(other) == ("flash", "efficient", "math", "cudnn"), other


def test_cudnn_is_never_reached_after_math_unless_math_is_off() -> None:
    card = CARDS["A100"]
    masked = call(mask="bool", key_heads=2)
    assert choose_kernel(masked, card) == "math"
    assert choose_kernel(masked, replace(card, disabled=frozenset({"math"}))) == "cudnn"


def test_wide_heads_in_newer_cudnn() -> None:
    """check_cudnn_tensor_shapes: 256 above 9.22 (001f694a), (192, 128) from 9.11, on Hopper and server Blackwell."""
    newer = CardRules(capability=(9, 0), cudnn=92_300)
    assert choose_kernel(call(width=256, mask="bool"), newer) == "cudnn"
    assert refusal("cudnn", call(width=256), replace(newer, capability=(12, 0))) is not None
    deepseek = replace(call(width=192), value=(ROWS, HEADS, LENGTH, 128))
    assert choose_kernel(deepseek, CARDS["H100"]) == "cudnn"
    assert refusal("cudnn", deepseek, CARDS["A100"]) == (
        "needs head widths up to 128 that are multiples of 8, got 192 and 128"
    )


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({"length": 1}, "flash"),  # check_cudnn_tensor_shapes: not one key
        ({"rows": 65_536}, "flash"),  # max_cudnn_dim_size
        ({"rows": 65_536, "mask": "bool"}, "efficient"),
        ({"length": 64, "key_length": 128}, "cudnn"),
        ({"length": 0}, "math"),  # check_nonzero_sequence_lengths_dense
        ({"width": 36}, "flash"),  # cuDNN wants multiples of 8; flash is given padded heads
        ({"width": 36, "mask": "bool"}, "math"),  # minimum_gemm_alignment: 8 for 16 bits
    ],
)
def test_shapes_that_cudnn_leaves_to_others(change: dict[str, object], kernel: Kernel) -> None:
    assert choose_kernel(call(**change), CARDS["H100"]) == kernel  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("card", "dtype", "width", "takes"),
    [
        # minimum_gemm_alignment and use_tensor_cores
        ("A100", "float16", 36, False),
        ("A100", "float32", 36, True),
        ("A100", "float32", 34, False),
        ("T4", "float16", 36, False),
        ("T4", "float32", 33, True),
        ("V100", "float16", 40, True),
    ],
)
def test_alignment_of_the_efficient_kernel(card: str, dtype: str, width: int, takes: bool) -> None:
    assert (refusal("efficient", call(dtype, width), CARDS[card]) is None) is takes


def test_flash_wants_square_causal_calls() -> None:
    """check_flash_causal_non_square_seqlens."""
    card = CARDS["A100"]
    assert choose_kernel(call(is_causal=True), card) == "flash"
    assert choose_kernel(call(length=1, key_length=50, is_causal=True), card) == "efficient"


def test_training_of_wide_heads_on_small_cards() -> None:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120: a limit of the backward pass alone."""
    wide = call(width=224)
    assert choose_kernel(wide, CARDS["L4"]) == "flash"
    training = replace(wide, requires_grad=True)
    assert choose_kernel(training, CARDS["L4"]) == "efficient"
    assert choose_kernel(training, CARDS["A100"]) == "flash"
    assert choose_kernel(replace(call(width=256), requires_grad=True), CARDS["L4"]) == "flash"


def test_masks_that_are_refused() -> None:
    masked = call(mask="float")
    assert masked.mask is not None
    expanded = replace(masked, mask=replace(masked.mask, shape=(ROWS, 1, LENGTH, 1), strides=(LENGTH, LENGTH, 1, 0)))
    # check_last_dim_stride_equals_1_dense looks at the mask too.
    assert choose_kernel(expanded, CARDS["H100"]) == "math"
    # check_attn_mask_shape: 2 or 4 dimensions for cuDNN.
    three = replace(masked, mask=replace(masked.mask, shape=(ROWS, LENGTH, LENGTH), strides=(10_000, 100, 1)))
    assert choose_kernel(three, CARDS["H100"]) == "efficient"
    two = replace(masked, mask=replace(masked.mask, shape=(LENGTH, LENGTH), strides=(100, 1)))
    assert choose_kernel(two, CARDS["H100"]) == "cudnn"


def test_tensors_that_fused_kernels_refuse() -> None:
    card = CARDS["A100"]
    assert choose_kernel(replace(call(), unit_stride=False), card) == "math"
    assert choose_kernel(replace(call(), query=(8, 100, 64), key=(8, 100, 64), value=(8, 100, 64)), card) == "math"
    assert choose_kernel(replace(call(), key=(1, HEADS, LENGTH, 64)), card) == "math"
    assert choose_kernel(replace(call("float32"), aligned_starts=False), card) == "math"
    assert choose_kernel(replace(call("float32"), aligned_starts=False), CARDS["T4"]) == "efficient"
    assert choose_kernel(call(key_heads=2, enable_gqa=False), card) == "math"
    assert choose_kernel(call(key_heads=3), card) == "math"
    assert choose_kernel(replace(call(), dtype="mixed"), card) == "math"
    assert choose_kernel(call("float64"), card) == "math"


def test_what_a_user_turned_off_and_reordered() -> None:
    card = CARDS["H100"]
    assert choose_kernel(call(), replace(card, disabled=frozenset({"cudnn"}))) == "flash"
    assert choose_kernel(call(), replace(card, disabled=frozenset({"cudnn", "flash"}))) == "efficient"
    assert choose_kernel(call(), replace(card, order=("efficient", "flash", "math", "cudnn"))) == "efficient"
    assert choose_kernel(call(), replace(card, deterministic=True)) == "flash"


def test_grouped_queries_in_the_efficient_kernel_of_later_torch() -> None:
    """pytorch#191085."""
    later = replace(CARDS["T4"], efficient_gqa=True)
    assert choose_kernel(call("float16", key_heads=2), later) == "efficient"


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        (call(), "flash"),
        (call(mask="bool"), "efficient"),
        (call("float32"), "efficient"),
        (call(width=512), "flash"),
        (call(key_heads=2), "flash"),
        (call(key_heads=2, mask="bool"), "math"),
    ],
)
def test_amd(asked: AttentionCall, kernel: Kernel) -> None:
    assert choose_kernel(asked, CardRules(gfx="gfx942")) == kernel
    assert choose_kernel(asked, CardRules(gfx="gfx1100")) == "math"  # experimental: AOTriton's check_gpu


def test_a_reason_for_every_kernel() -> None:
    assert refusals(call("bfloat16", key_heads=2), CARDS["T4"]) == {
        "flash": "needs sm_80 to sm_121, not sm_75",
        "efficient": "needs as many key and value heads as query heads, got 2 for 8",
        "cudnn": "does not take bfloat16 on sm_75",
    }


def test_no_kernel_at_all_is_an_error_as_on_the_card() -> None:
    card = replace(CARDS["A100"], disabled=frozenset({"math", "efficient", "cudnn"}))
    message = (
        "no attention kernel takes bfloat16 queries of shape (4, 8, 100, 64) on sm_80: flash takes no mask; "
        "efficient is turned off; math is turned off; cudnn is turned off. "
        "Enable another kernel, torch.backends.cuda.enable_math_sdp(True) for one"
    )
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
        choose_kernel(call(mask="bool"), card)
