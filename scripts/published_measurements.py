"""What others measured on GPUs, each with what is known of how, and what budgetdb predicts for it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from models_of_then import Generation, Gpt2OfThen, with_upcast_logits
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, GPT2Config, LlamaConfig

from budgetdb.shapes import Shape
from budgetdb.tracing.allocator import CachingAllocator
from budgetdb.tracing.attention_call import CardRules
from budgetdb.tracing.lifetimes import Trace
from budgetdb.tracing.replay import replay
from budgetdb.tracing.targets import card_target
from budgetdb.tracing.tracer import Tracer
from budgetdb.tracing.workspaces import workspace_allocations
from budgetdb.workloads.base import Workload
from budgetdb.workloads.forward import ForwardWorkload

MEASUREMENTS = Path(__file__).parents[1] / "tests" / "measurements"
# The sources multiply bytes by 1e-6; for Llama, whose report doesn't say, the weights alone settle it.
BYTES_PER_MB = 10**6


@dataclass(frozen=True)
class Source:
    """A table of peaks, and the steps that they are peaks of.

    Attributes:
        file: name of the table, in tests/measurements.
        columns: names of columns of peaks that torch's allocator reported, and the attention implementation of each.
        build: the model on `meta` with an attention implementation.
        workloads: the steps, of which the largest is the peak.
        card: what decides which kernels ran.
        notes: how the source measured, and where its code differs from what is installed.
    """

    file: str
    columns: Mapping[str, str]
    build: Callable[[str], Any]
    workloads: tuple[Workload, ...]
    card: CardRules
    notes: str


def _gpt2_large(attention: str) -> Any:
    config = GPT2Config(n_embd=1280, n_layer=36, n_head=20)
    with torch.device("meta"):
        return Gpt2OfThen(config, attention=attention).half().eval()


def _bert_base(attention: str) -> Any:
    with torch.device("meta"):
        return BertLMHeadModel._from_config(BertConfig(), attn_implementation=attention, dtype=torch.float16).eval()


def _llama_2_13b(attention: str) -> Any:
    config = LlamaConfig(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float16)
    return with_upcast_logits(model.eval())


# torch 2.1 and 2.2 had no attention from cuDNN (pytorch#101916, in 2.3).
SOURCES = (
    Source(
        file="gpt2-large_rtx3080ti.csv",
        columns={"eager_mb": "eager", "sdpa_mb": "sdpa"},
        build=_gpt2_large,
        workloads=(Generation(new_tokens=100, last=False), Generation(new_tokens=100, last=True)),
        card=CardRules(capability=(8, 6)),
        notes=(
            "greedy search of 100 tokens (transformers#31172, by the script of #28802 and #31031 with `--is_decoder`,\n"
            "whose `--max_token` is 100 by default: times are per token, each length leaves 100 of 1024 positions),\n"
            "MB = 1e6. Code of 4.41: logits of the whole prompt; keys and values cached as views of c_attn's output,\n"
            "and held beside their longer copies. Today neither: #31292, DynamicCache"
        ),
    ),
    Source(
        file="bert-base_a100-80gb.csv",
        columns={"eager_mb": "eager", "sdpa_mb": "sdpa"},
        build=_bert_base,
        workloads=(Generation(new_tokens=128, last=True),),
        card=CardRules(capability=(8, 0)),
        notes=(
            "BertLMHeadModel (transformers#28802) in the same greedy search: without a cache, logits of all tokens\n"
            "of two steps are held. How many tokens it made is not published: taken to be 128, since a row more costs\n"
            "as much as 126 to 134 tokens more, and 512 of 512 positions are left out of the table. MB = 1e6"
        ),
    ),
    Source(
        file="llama-2-13b_a100-80gb.csv",
        columns={"allocated_mb": "eager"},
        build=_llama_2_13b,
        workloads=(ForwardWorkload(hold="none"),),
        card=CardRules(capability=(8, 0)),
        notes=(
            "one forward pass with its cache, nothing held (optimum-benchmark, running-llamas), MB = 1e6. Code of\n"
            "4.35: `logits = logits.float()`, gone since 4.46 (transformers#33902, #34147)"
        ),
    ),
)


@dataclass(frozen=True)
class Row:
    """A published peak and the one predicted: bytes alive, and as the allocator counts them."""

    shape: Shape
    published_bytes: int
    live_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class Comparison:
    """A column of a table, the constant it is off by, and its rows.

    Attributes:
        resident_bytes: weights and buffers.
        constant_bytes: the median of what published peaks have beyond predicted ones, the one number that is fitted.
    """

    name: str
    resident_bytes: int
    constant_bytes: float
    rows: tuple[Row, ...]

    def errors(self) -> list[float]:
        """Of each row, relative to what the published peak has above weights and constant."""
        return [
            (row.allocated_bytes + self.constant_bytes - row.published_bytes)
            / (row.published_bytes - self.constant_bytes - self.resident_bytes)
            for row in self.rows
        ]


def compare(source: Source, *, shapes: Sequence[Shape] = ()) -> Iterator[Comparison]:
    """Each column of a source's table, beside what is predicted; of `shapes` only where given.

    Columns and rows are replayed on one allocator, in the order of the table, as the sources' loops ran: models are
    loaded into what the one before left behind, and each shape runs once before it counts.
    """
    with (MEASUREMENTS / source.file).open(encoding="utf-8", newline="") as opened:
        table = list(csv.DictReader(opened))
    allocator = CachingAllocator()
    workspaces = [allocator.allocate(nbytes) for nbytes in workspace_allocations("8.0", {})]
    for column, attention in source.columns.items():
        model = source.build(attention)
        residents = [allocator.allocate(nbytes) for nbytes in resident_tensors(model)]
        published = {
            shape: round(float(line[column]) * BYTES_PER_MB)
            for line in table
            if (shape := Shape(int(line["batch_size"]), int(line["length"]))) in shapes or not shapes
        }
        rows = [
            Row(shape, published[shape], *_replayed(traces, allocator))
            for shape, traces in _traces(source, model, list(published)).items()
        ]
        yield Comparison(
            name=f"{Path(source.file).stem}, {column}",
            resident_bytes=sum(resident_tensors(model)),
            constant_bytes=median(row.published_bytes - row.allocated_bytes for row in rows),
            rows=tuple(rows),
        )
        for handle in residents:
            allocator.free(handle)
    del workspaces  # never freed


def resident_tensors(model: Any) -> list[int]:
    """Bytes of each parameter and buffer, tied ones once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return [tensor.numel() * tensor.element_size() for tensor in tensors.values()]


def _traces(source: Source, model: Any, shapes: Sequence[Shape]) -> dict[Shape, list[Trace]]:
    traces: dict[Shape, list[Trace]] = {shape: [] for shape in shapes}
    for workload in source.workloads:
        with Tracer(model, workload, card_target(source.card)) as tracer:
            for shape in shapes:
                traces[shape].append(tracer.trace(shape))
    return traces


def _replayed(traces: Sequence[Trace], allocator: CachingAllocator) -> tuple[int, int]:
    """Most bytes alive, and most that the allocator has given out, the second time round."""
    alive = allocator.requested_bytes
    for _ in range(2):
        allocator.reset_peaks()
        for trace in traces:
            for handle in replay(trace.events, allocator).values():
                allocator.free(handle)
    return alive + max(trace.transient_bytes for trace in traces), allocator.peak_allocated_bytes
