"""What an allocator holds, laid out by address: for tests, and to compare with `torch.cuda.memory_snapshot`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from budgetdb.tracing.blocks import Block


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """One block.

    Attributes:
        address: where it begins.
        size: its bytes.
        requested: bytes asked for, 0 when it is free.
        allocated: given out, not cached.
    """

    address: int
    size: int
    requested: int
    allocated: bool


@dataclass(frozen=True, slots=True)
class SegmentSnapshot:
    """One segment, or one contiguous mapped range of an expandable one.

    Attributes:
        address: where it begins.
        is_small: it belongs to the small pool.
        blocks: its blocks by address, without gaps.
    """

    address: int
    is_small: bool
    blocks: tuple[BlockSnapshot, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(block.size for block in self.blocks)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of its blocks given out."""
        return sum(block.size for block in self.blocks if block.allocated)


def snapshot_of(blocks: Iterable[Block]) -> list[SegmentSnapshot]:
    """The segments that the blocks given out and cached make up (`snapshot`)."""
    heads = [block for block in blocks if block.before is None or not block.before.mapped]
    return [
        SegmentSnapshot(
            address=head.address,
            is_small=head.pool.is_small,
            blocks=tuple(
                BlockSnapshot(
                    address=block.address,
                    size=block.size,
                    requested=0 if block.cached else block.requested,
                    allocated=not block.cached,
                )
                for block in _mapped_run(head)
            ),
        )
        for head in sorted(heads, key=attrgetter("address"))
    ]


def _mapped_run(head: Block) -> Iterable[Block]:
    block: Block | None = head
    while block is not None and block.mapped:
        yield block
        block = block.after
