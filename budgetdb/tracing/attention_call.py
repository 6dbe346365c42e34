"""One call of scaled dot product attention, and the card that it is for, as torch's choice of a kernel sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kernel = Literal["flash", "efficient", "cudnn", "math"]

HALVES = frozenset({"float16", "bfloat16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskForm:
    """An attention mask without its numbers.

    Attributes:
        dtype: `bool`, or that of a mask which is added to the scores.
        shape: ends in (query length, key length), or 1 for either.
        strides: in elements, 0 where it is expanded.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_bool(self) -> bool:
        """Whether it says which scores count, so that a mask to be added is made of it first."""
        return self.dtype == "bool"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What is asked of attention.

    Attributes:
        dtype: of query, key and value: `bfloat16` and the like.
        query: shape, (batch, heads, length, head width) where a fused kernel is to take it.
        key: shape.
        value: shape.
        mask: the mask, or None.
        is_causal: no query sees a later key.
        enable_gqa: key and value may have fewer heads.
        dropout: probability.
        requires_grad: a backward pass will follow.
        unit_stride: the last dimension of query, key and value has stride 1.
        aligned_starts: query, key and value start at a multiple of 16 bytes of their storage.
    """

    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: MaskForm | None = None
    is_causal: bool = False
    enable_gqa: bool = False
    dropout: float = 0.0
    requires_grad: bool = False
    unit_stride: bool = True
    aligned_starts: bool = True

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.query[0]

    @property
    def heads(self) -> int:
        """Heads of the query."""
        return self.query[-3]

    @property
    def head_width(self) -> int:
        """Elements of one head of the query."""
        return self.query[-1]

    @property
    def value_width(self) -> int:
        """Elements of one head of the value."""
        return self.value[-1]

    @property
    def query_length(self) -> int:
        """Tokens that ask."""
        return self.query[-2]

    @property
    def key_length(self) -> int:
        """Tokens that are asked."""
        return self.key[-2]

    @property
    def is_half(self) -> bool:
        """Whether elements have 16 bits."""
        return self.dtype in HALVES


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRules:
    """What torch's choice depends on besides the call.

    Attributes:
        capability: compute capability of an NVIDIA card; ignored with `gfx`.
        cudnn: cuDNN as torch counts it, `torch.backends.cudnn.version()`: 91900 is 9.19; None without.
        gfx: architecture of an AMD card, `gfx942`; None for NVIDIA.
        cudnn_first: cuDNN may come first where torch prefers it; TORCH_CUDNN_SDPA_DEPRIORITIZED=1 makes it False.
        order: kernels in a user's order (`sdpa_kernel(..., set_priority=True)`), None for torch's own.
        disabled: kernels that the user turned off (`torch.backends.cuda.enable_flash_sdp(False)` and the like).
        efficient_gqa: memory-efficient attention takes fewer key heads (pytorch#191085, July 2026, after torch 2.13).
        half_math: math computes 16-bit inputs in 16 bits (`allow_fp16_bf16_reduction_math_sdp(True)`).
        deterministic: `torch.use_deterministic_algorithms(True)`.
    """

    capability: tuple[int, int] = (0, 0)
    cudnn: int | None = None
    gfx: str | None = None
    cudnn_first: bool = True
    order: tuple[Kernel, ...] | None = None
    disabled: frozenset[Kernel] = field(default=frozenset())
    efficient_gqa: bool = False
    half_math: bool = False
    deterministic: bool = False

    @property
    def major(self) -> int:
        """First number of the compute capability."""
        return self.capability[0]

    def __str__(self) -> str:
        return self.gfx or f"sm_{self.capability[0]}{self.capability[1]}"
