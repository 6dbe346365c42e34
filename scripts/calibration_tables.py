"""What the calibration benchmark measured, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from small_models import LENGTHS

from budgetdb.settings import format_bytes


@dataclass(frozen=True)
class Found:
    """What one way of finding a batch size came to.

    Attributes:
        probes: batches tried.
        out_of_memory: how many of them failed.
        elapsed_s: of the processor, with the start of its process.
        shares: batch size over the true one at each of `LENGTHS`.
        length: the length that was looked at, or None for all.
        share: batch size over the true one at that length, or the smallest of all.
    """

    way: str
    probes: int
    out_of_memory: int
    elapsed_s: float
    shares: tuple[float, ...]
    length: int | None
    share: float


@dataclass(frozen=True)
class Result:
    """One model with one attention implementation under one limit."""

    model: str
    attention: str
    memory_limit_bytes: int
    frontier: tuple[int, ...]
    ran: int
    batches: tuple[int, ...]
    found: tuple[Found, ...]

    @property
    def ours(self) -> Found:
        """What budgetdb found."""
        return self.found[0]


def tables(results: Sequence[Result]) -> str:
    """All that was measured, as plain text."""
    return "\n".join([*_frontier_table(results), "", *_ways_table(results), "", *_medians_table(results)])


def _frontier_table(results: Sequence[Result]) -> list[str]:
    lengths = "".join(f"{f'L {length}':>14}" for length in LENGTHS)
    lines = [
        "budgetdb's batch size / the largest that runs, by exhaustive bisection under the same limit",
        f"{'model':8}{'attention':11}{'limit':>11}{lengths}  evaluations that fit",
    ]
    for result in results:
        sizes = "".join(
            f"{f'{share:.3f} x {rows}':>14}" for share, rows in zip(result.ours.shares, result.frontier, strict=True)
        )
        limit = format_bytes(result.memory_limit_bytes)
        ran = f"{result.ran} of {len(result.batches)}, {min(result.batches)} batches each"
        lines.append(f"{result.model:8}{result.attention:11}{limit:>11}{sizes}  {ran}")
    return lines


_WAYS_HEADER = (
    f"{'way':16}{'probes':>8}{'OOM':>6}{'seconds':>9}{'at length':>11}{'share there':>13}"
    f"{'least share':>13}{'worst overflow':>16}"
)


def _ways_table(results: Sequence[Result]) -> list[str]:
    lines = [
        "each way on the same limit; its one token budget, taken for all lengths, over the largest batch that runs",
        f"{'model':8}{'attention':11}{_WAYS_HEADER}",
    ]
    for result in results:
        for found in result.found:
            first = f"{result.model:8}{result.attention:11}" if found is result.ours else " " * 19
            length = "all" if found.length is None else found.length
            lines.append(
                f"{first}{found.way:16}{found.probes:8}{found.out_of_memory:6}{found.elapsed_s:9.0f}{length:>11}"
                f"{found.share:13.2f}{min(found.shares):13.2f}{max(found.shares):15.2f}x"
            )
    return lines


def _medians_table(results: Sequence[Result]) -> list[str]:
    lines = [
        f"medians of the {len(results)}, and the worst overflow of any",
        f"{'way':16}{'probes':>8}{'OOM':>6}{'seconds':>9}{'share there':>13}{'least share':>13}{'worst overflow':>16}",
    ]
    for way in dict.fromkeys(found.way for result in results for found in result.found):
        of_way = [found for result in results for found in result.found if found.way == way]
        lines.append(
            f"{way:16}{_median(of_way, 'probes'):8.1f}{_median(of_way, 'out_of_memory'):6.1f}"
            f"{_median(of_way, 'elapsed_s'):9.0f}{_median(of_way, 'share'):13.2f}"
            f"{median(min(found.shares) for found in of_way):13.2f}{max(max(f.shares) for f in of_way):15.2f}x"
        )
    return lines


def _median(found: Sequence[Found], name: str) -> float:
    return float(median(getattr(each, name) for each in found))
