"""What PYTORCH_ALLOC_CONF sets, read as torch 2.13 reads it.

`AcceleratorAllocatorConfig` of `c10/core/AllocatorConfig.cpp` and `CUDAAllocatorConfig` of `c10/cuda`. Options that
change nothing about device memory (pinned memory, locks) are known, checked for a value, and passed over. Where torch
lets a malformed text through (it checks neither separators nor what follows a number), this refuses it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from budgetdb.errors import UsageError
from budgetdb.tracing.allocator_options import options_of
from budgetdb.tracing.blocks import LARGE_SEGMENT_BYTES, MIN_BLOCK_BYTES

MIB = 2**20

# Torch's own order, tried on 2.13: a variable set to nothing still hides those after it.
ENVIRONMENT_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# kRoundUpPowerOfTwoIntervals: one entry for each power of two from 1 MiB; smaller sizes use the first, larger the last.
DIVISION_INTERVALS = 16


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings of torch's CUDA caching allocator.

    >>> AllocatorSettings.from_text("expandable_segments:True,max_split_size_mb:64").max_split_size_bytes
    67108864

    Attributes:
        expandable_segments: one growing range of addresses per pool, instead of a segment for each new block.
        large_segment_bytes: the segment that serves requests of 1 to 10 MiB, and the page of expandable segments.
        max_split_size_bytes: free blocks of at least this are neither split nor used for smaller requests; None for
            no such limit.
        max_non_split_rounding_bytes: a block that may not be split serves requests less than this smaller than it.
        roundup_power2_divisions: for each power of two from 1 MiB to 32 GiB, into how many steps sizes up to the next
            are rounded; 0 and 1 for no rounding.
        garbage_collection_threshold: share of the limit from which cached segments are given back, oldest first; 0
            for never. Only in a process whose memory fraction is set.
        per_process_memory_fraction: share of the device the process is capped to. A simulated allocator is given its
            limit in bytes instead.
        backend: `native`, or `cudaMallocAsync`, which has no simulation.
    """

    expandable_segments: bool = False
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    backend: str = "native"

    @classmethod
    def from_text(cls, conf: str) -> AllocatorSettings:
        """Settings from the text of the variable, `option:value,option:value`.

        Raises:
            UsageError: an option that torch does not know, or a value it refuses; the message names the option.
        """
        options = options_of(conf)
        large = options.megabytes("large_segment_size_mb", LARGE_SEGMENT_BYTES // MIB, above=10) * MIB
        # Both are at least a large segment, whatever the order they are written in (parseArgs reads that one first).
        least = large // MIB
        split = options.megabytes("max_split_size_mb", None, least=least)
        rounding = options.megabytes("max_non_split_rounding_mb", least, least=least) * MIB
        return cls(
            expandable_segments=options.flag("expandable_segments", default=False),
            large_segment_bytes=large,
            max_split_size_bytes=None if split is None else split * MIB,
            max_non_split_rounding_bytes=rounding,
            roundup_power2_divisions=options.divisions("roundup_power2_divisions", DIVISION_INTERVALS),
            garbage_collection_threshold=options.share("garbage_collection_threshold", 0.0, open_interval=True),
            per_process_memory_fraction=options.share("per_process_memory_fraction", 1.0),
            backend=options.choice("backend", "native", "cudaMallocAsync"),
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> AllocatorSettings:
        """Settings from the first of `ENVIRONMENT_VARIABLES` that is set; the defaults when none is.

        Args:
            environment: variables to read, those of this process by default.

        Raises:
            UsageError: as `from_text`; the message names the variable too.
        """
        variables = os.environ if environment is None else environment
        for name in ENVIRONMENT_VARIABLES:
            text = variables.get(name)
            if text is None:
                continue
            try:
                return cls.from_text(text)
            except UsageError as error:
                raise UsageError(f"{name} is {text[:200]!r}: {error}") from None
        return cls()

    def rounded_bytes(self, nbytes: int) -> int:
        """Bytes a request is rounded up to (`round_size`).

        >>> AllocatorSettings().rounded_bytes(513)
        1024
        >>> AllocatorSettings.from_text("roundup_power2_divisions:4").rounded_bytes(5 * 2**20 + 1)
        6291456
        """
        interval = min(max(nbytes.bit_length() - 1 - 20, 0), DIVISION_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
            step = (1 << (nbytes.bit_length() - 1)) // divisions
        else:
            step = MIN_BLOCK_BYTES
        return -(-nbytes // step) * step
