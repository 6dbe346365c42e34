"""A plan beside others, as rows of a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from budgetdb.sampling.fixed import fixed_batches
from budgetdb.settings import format_bytes
from budgetdb.shapes import Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from budgetdb.profiles import Profile
    from budgetdb.sampling.packing import Lengths
    from budgetdb.sampling.sampler import ProfileBatchSampler, RankBatchSampler
    from budgetdb.sampling.times import TimeModel

COLUMNS = ("plan", "batches", "padding", "largest batch", "peak", "fits", "time")
NUMBERS = ("batches", "padding", "peak", "time")
RANK_COLUMNS = ("rank", "batches", "samples", "padded tokens", "time")
RANK_NUMBERS = RANK_COLUMNS
_FIXED_SIZES = (8, 32, 128)


@dataclass(frozen=True)
class PlanRow:
    """One way to batch the run.

    Attributes:
        name: which.
        batches: how many.
        padding_share: padding among all tokens, 0 to 1.
        worst: the batch with the highest peak.
        peak_bytes: that peak.
        fits: whether it is within what may be used.
        seconds: of all steps, None where times are not known.
    """

    name: str
    batches: int
    padding_share: float
    worst: Shape
    peak_bytes: int
    fits: bool
    seconds: float | None

    def as_cells(self) -> tuple[object, ...]:
        """For a table."""
        return (
            self.name,
            self.batches,
            f"{self.padding_share:.1%}",
            self.worst if self.batches else "",
            format_bytes(self.peak_bytes),
            "yes" if self.fits else "no",
            seconds_text(self.seconds),
        )

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "plan": self.name,
            "batches": self.batches,
            "padding_share": self.padding_share,
            "largest_batch": [self.worst.batch_size, self.worst.length],
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class RankRow:
    """What one rank has to do."""

    rank: int
    batches: int
    samples: int
    padded_tokens: int
    seconds: float | None

    def as_cells(self) -> tuple[object, ...]:
        """For a table."""
        return self.rank, self.batches, self.samples, self.padded_tokens, seconds_text(self.seconds)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "rank": self.rank,
            "batches": self.batches,
            "samples": self.samples,
            "padded_tokens": self.padded_tokens,
            "seconds": self.seconds,
        }


def compared(sampler: ProfileBatchSampler, lengths: Lengths, profile: Profile) -> list[PlanRow]:
    """The sampler's plan, and batches of fixed sizes, sorted and not."""
    tokens = int(lengths.sum())
    ours = _row("budgetdb", sampler.batch_sizes, sampler.batch_lengths, tokens, profile, sampler.times)
    rows = [ours]
    for is_sorted in (True, False):
        for size in _FIXED_SIZES:
            name = f"{'sorted' if is_sorted else 'unsorted'}, {size} rows"
            sizes, longest = fixed_batches(lengths, size, is_sorted=is_sorted, pad_multiple=sampler.pad_multiple)
            rows.append(_row(name, sizes, longest, tokens, profile, sampler.times))
    return rows


def facts(sampler: ProfileBatchSampler, lengths: Lengths, profile: Profile) -> Iterator[tuple[str, object]]:
    """What the plan rests on."""
    yield "samples", f"{len(lengths)}, {int(lengths.sum())} tokens, the longest {int(lengths.max(initial=0))}"
    yield "profile", f"{profile.id} of {profile.model_name} on {profile.key.device_name}, {profile.provenance.value}"
    yield "may use", format_bytes(profile.usable_bytes)
    if len(sampler.oversize):
        yield "too long", f"{len(sampler.oversize)} samples do not fit even alone; the first is {sampler.oversize[0]}"
    if sampler.times is None:
        yield "times", "not known: calibrate on the device"


def ranks(sampler: ProfileBatchSampler, world_size: int) -> list[RankRow]:
    """What each rank has to do."""
    return [_rank_row(sampler.shard(rank, world_size), sampler.times) for rank in range(world_size)]


def _rank_row(shard: RankBatchSampler, times: TimeModel | None) -> RankRow:
    sizes, lengths = shard.batch_sizes, shard.batch_lengths
    seconds = float(times.batch_seconds(sizes, lengths).sum()) if times is not None else None
    return RankRow(shard.rank, len(shard), int(sizes.sum()), int((sizes * lengths).sum()), seconds)


def _row(
    name: str,
    sizes: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tokens: int,
    profile: Profile,
    times: TimeModel | None,
) -> PlanRow:
    padded = int((sizes * lengths).sum())
    shapes = {Shape(int(rows), int(length)) for rows, length in np.unique(np.stack([sizes, lengths], axis=1), axis=0)}
    peak, worst = max(((profile.peak_bytes(shape), shape) for shape in shapes), default=(0, Shape(0, 1)))
    return PlanRow(
        name=name,
        batches=len(sizes),
        padding_share=1 - tokens / padded if padded else 0.0,
        worst=worst,
        peak_bytes=peak,
        fits=peak <= profile.usable_bytes and _within_caps(profile, sizes, lengths),
        seconds=float(times.batch_seconds(sizes, lengths).sum()) if times is not None else None,
    )


def _within_caps(profile: Profile, sizes: NDArray[np.int64], lengths: NDArray[np.int64]) -> bool:
    return all(profile.caps.clip(int(rows), int(length)) == rows for rows, length in zip(sizes, lengths, strict=True))


def seconds_text(seconds: float | None) -> str:
    """`1 h 3 min`, `12.3 s`, or nothing."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
