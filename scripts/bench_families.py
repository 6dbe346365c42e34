"""Whether traces give the exact cost of every family of models in transformers, against traces of single shapes."""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from small_families import families, most_positions, small_family

from budgetdb.costs.base import CostModel
from budgetdb.errors import BudgetDBError
from budgetdb.shapes import Shape
from budgetdb.tracing.attention_call import CardRules
from budgetdb.tracing.lifetimes import Trace
from budgetdb.tracing.targets import card_target
from budgetdb.tracing.traced_cost import TracedCost, traced_cost
from budgetdb.tracing.tracer import Tracer
from budgetdb.workloads.base import parse_workload

ATTENTION = ("sdpa", "eager")
CARD = CardRules(capability=(8, 0), cudnn=92_000)
LONGEST = 4096
PROCESSOR_S = 30
ONE_ROW_LESS = "exact k > 1"
COSTED = ("exact", ONE_ROW_LESS, "fitted", "wrong")
# None of these is a shape that the cost model is made or checked with, but for chance.
Grid = Sequence[tuple[int, int]]
ALIGNED: Grid = ((1, 24), (64, 40), (7, 208), (17, 504), (33, 1544), (1, 4096))
OTHERS: Grid = ((1, 19), (64, 33), (11, 334), (5, 509), (13, 4095))


@dataclass(frozen=True)
class Finding:
    """What came of one family with one head and one attention implementation.

    Attributes:
        verdict: `exact`, `exact k > 1` (a single row takes less), `fitted`, `wrong` (called exact, and was not),
            `untraceable`, `no time` or `not built`.
        reason: why not exact, in a line.
        dtype: of the weights: bfloat16 unless the family refuses it.
        worst_bytes: largest difference to a trace at held-out lengths that are multiples of 8, of several rows where
            these are exact.
        worst_error: largest difference relative to the peak above the weights.
        least_others: at other lengths the smallest difference relative to the peak above the weights; never below 0
            where the cost is an upper bound.
        most_others: at other lengths the largest.
        forms: moments that are the peak at some shape.
    """

    family: str
    head: str
    attention: str
    verdict: str
    reason: str = ""
    dtype: str = ""
    worst_bytes: int = 0
    worst_error: float = 0.0
    least_others: float | None = None
    most_others: float | None = None
    forms: int = 0


def run_all(*, only: str | None, jobs: int, file: Path | None, aligned_only: bool = False) -> list[Finding]:
    """Every family, or those whose name is `only`; what is in `file` is not done again, and is added to.

    With `aligned_only`, lengths that are no multiple of 8 are left out, which halves the time.
    """
    others: Grid = () if aligned_only else OTHERS
    found = [Finding(**line) for line in json.loads(file.read_text("utf-8"))] if file and file.exists() else []
    known = {(finding.family, finding.head, finding.attention) for finding in found}
    heads: dict[str, list[str]] = {}
    for family, head in families():
        heads.setdefault(family, []).append(head)
    # Every family once, before any comes twice.
    wanted = [
        (family, of_family[number], attention)
        for number in range(max(map(len, heads.values())))
        for attention in ATTENTION
        for family, of_family in heads.items()
        if number < len(of_family) and only in (None, family) and (family, of_family[number], attention) not in known
    ]
    check("t5", "seq2seq-lm", "eager", aligned=(), others=())  # imports what every child needs, once
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for finding in pool.map(lambda each: _in_a_process(*each, others=others), wanted):
            found.append(finding)
            print(_progress(finding, done=len(found)), file=sys.stderr, flush=True)
            if file:
                file.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")
    return [each for each in found if only in (None, each.family)]


def _in_a_process(family: str, head: str, attention: str, *, others: Grid) -> Finding:
    """`check` in a child that has so much time of the processor; forked, since importing takes longer than checking."""
    context: Any = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sending, family, head, attention, others))
    process.start()
    sending.close()
    try:
        return Finding(**receiving.recv())
    except EOFError:
        process.join()
        by_signal = process.exitcode is not None and process.exitcode < 0
        if by_signal:
            return Finding(family, head, attention, "no time", f"took more than {PROCESSOR_S} s of the processor")
        return Finding(family, head, attention, "untraceable", "ended with an error of its own")
    finally:
        process.join()


def _child(sending: Connection, family: str, head: str, attention: str, others: Grid) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    torch.set_num_threads(1)
    sending.send(asdict(check(family, head, attention, others=others)))


def check(family: str, head: str, attention: str, *, aligned: Grid = ALIGNED, others: Grid = OTHERS) -> Finding:
    """Build a family, make its cost from traces, and compare with traces of other shapes; in fp32 where need be."""
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        try:
            model = small_family(family, head, attention=attention, dtype=dtype)
        except Exception as error:  # a configuration that contradicts itself raises anything
            reason = f"has no {attention}" if "does not support an attention" in str(error) else _line(error)
            return Finding(family, head, attention, "not built", reason, name)
        try:
            return _checked(model, Finding(family, head, attention, "", dtype=name), aligned, others)
        except BudgetDBError as error:
            failed = Finding(family, head, attention, "untraceable", _line(error), name)
    return failed


def _checked(model: Any, finding: Finding, aligned: Grid, others: Grid) -> Finding:
    longest = min(most_positions(model.config) or LONGEST, LONGEST) // 8 * 8

    def within(grid: Grid) -> list[Shape]:
        return [Shape(rows, length) for rows, length in grid if length <= longest]

    with Tracer(model, parse_workload("forward"), card_target(CARD)) as tracer:
        trace_at = remembering(tracer.trace)
        traced = traced_cost(trace_at, longest=longest, pad_multiple=8)
        at_8 = dict(zip(within(aligned), _differences(traced.cost, trace_at, within(aligned)), strict=True))
        any_length = traced_cost(trace_at, longest=longest, pad_multiple=1) if within(others) else traced
        elsewhere = [error for _, error in _differences(any_length.cost, trace_at, within(others))]
    verdict = _verdict(traced, {shape: nbytes for shape, (nbytes, _) in at_8.items()})
    counted = [at_8[shape] for shape in at_8 if verdict != ONE_ROW_LESS or shape.batch_size > 1]
    return Finding(
        **{
            **asdict(finding),
            "verdict": verdict,
            "reason": traced.reason or any_length.reason or "",
            "worst_bytes": max((abs(nbytes) for nbytes, _ in counted), default=0),
            "worst_error": max((abs(error) for _, error in at_8.values()), default=0.0),
            "least_others": min(elsewhere, default=None),
            "most_others": max(elsewhere, default=None),
            "forms": len(traced.moments),
        }
    )


def _verdict(traced: TracedCost, differences: Mapping[Shape, int]) -> str:
    if not traced.is_exact:
        return "fitted"
    off = [shape for shape, nbytes in differences.items() if nbytes]
    if not off:
        return "exact"
    one_row_less = all(shape.batch_size == 1 and differences[shape] > 0 for shape in off)
    return ONE_ROW_LESS if one_row_less else "wrong"


def _differences(
    cost: CostModel, trace_at: Callable[[Shape], Trace], shapes: Iterable[Shape]
) -> Iterator[tuple[int, float]]:
    """How much the cost is above a trace: in bytes, and relative to what is above the weights."""
    for shape in shapes:
        trace = trace_at(shape)
        difference = cost.peak_bytes(shape) - trace.peak_bytes
        yield difference, difference / max(trace.transient_bytes, 1)


def remembering(trace_at: Callable[[Shape], Trace]) -> Callable[[Shape], Trace]:
    """`trace_at`, each shape traced once."""
    made: dict[Shape, Trace] = {}

    def at(shape: Shape) -> Trace:
        if shape not in made:
            made[shape] = trace_at(shape)
        return made[shape]

    return at


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:180]}"


def _progress(finding: Finding, *, done: int) -> str:
    return f"{done:4} {finding.family} {finding.head} {finding.attention}: {finding.verdict} {finding.reason[:100]}"


def table(findings: Sequence[Finding]) -> str:
    """A row for each finding, and a summary."""
    lines = [
        f"{'family':26}{'head':12}{'attention':10}{'dtype':10}{'verdict':12}{'forms':>6}{'L % 8 = 0':>12}{'other':>18}"
    ]
    for each in sorted(findings, key=lambda each: (each.family, each.head, each.attention)):
        exact = each.verdict in ("exact", ONE_ROW_LESS)
        worst = f"{each.worst_bytes} B" if exact else f"{each.worst_error:.2%}" if each.verdict in COSTED else ""
        others = "" if each.least_others is None else f"{each.least_others:+.2%} {each.most_others:+.2%}"
        lines.append(
            f"{each.family:26}{each.head:12}{each.attention:10}{each.dtype:10}{each.verdict:12}"
            f"{each.forms or '':>6}{worst:>12}{others:>18}  {each.reason[:140]}"
        )
    return "\n".join([*lines, "", *summary(findings)])


def summary(findings: Sequence[Finding]) -> list[str]:
    """How many are exact: rows, and families all of whose rows that were built are."""
    by_family: dict[str, list[Finding]] = {}
    for each in findings:
        by_family.setdefault(each.family, []).append(each)
    built = {family: [each for each in rows if each.verdict != "not built"] for family, rows in by_family.items()}
    whole = sum(bool(rows) and all(each.verdict == "exact" for each in rows) for rows in built.values())
    some = sum(any(each.verdict == "exact" for each in rows) for rows in built.values())
    exact = [each for each in findings if each.verdict == "exact"]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(e.verdict for e in findings).most_common())
    others = [(each.least_others, each.most_others or 0.0) for each in exact if each.least_others is not None]
    under, over = sum(least < 0 for least, _ in others), max((most for _, most in others), default=0.0)
    return [
        f"{len(findings)} rows: {counts}",
        f"{whole} of {len(by_family)} families exact to the byte with every head and attention built, {some} with one",
        f"at other lengths, of {len(others)} exact rows {under} are below a trace somewhere, at most {over:.2%} above",
    ]
