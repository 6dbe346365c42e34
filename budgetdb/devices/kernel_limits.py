"""What CUDA kernels can't take, and what to keep free on a card, be it there or only known."""

from __future__ import annotations

from budgetdb.profiles import Caps

_MIB = 2**20
# pytorch#142228: a CUDA grid has 65 535 blocks in its second and third dimension, and fused attention puts
# `batch_size * heads` there. Kernels index with 32 bits, so a tensor of 2**31 elements is refused or wrong.
_GRID_BLOCKS = 65_535
_INT32_ELEMENTS = 2**31 - 1
# 1 % of the card, within reason: the largest workspace that a kernel first asks for in the middle of a run (cuBLAS
# takes 32 MiB on compute capability 9.0, TRACING 2) with room for one more 20 MiB segment of the allocator.
_HEADROOM_SHARE = 0.01
_HEADROOM_BYTES = (64 * _MIB, 1024 * _MIB)


def cuda_caps(*, heads: int | None, widest: int | None) -> Caps:
    """The largest batches CUDA kernels take of a model with so many heads and so wide a tensor per token."""
    return Caps(
        rows=_GRID_BLOCKS // heads if heads else None,
        tokens=_INT32_ELEMENTS // widest if widest else None,
        squares=_INT32_ELEMENTS // heads if heads else None,
    )


def card_headroom_bytes(limit_bytes: int) -> int:
    """What to keep free of `limit_bytes` on a card when the user does not say."""
    least, most = _HEADROOM_BYTES
    return min(max(int(_HEADROOM_SHARE * limit_bytes), least), most)
