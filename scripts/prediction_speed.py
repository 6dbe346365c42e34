"""How long a trace and a prediction take, and how much memory: each in a process of its own, as a user starts it."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transformers import LlamaConfig

from budgetdb.devices.simulated import SimulatedCard
from budgetdb.models.load import outline_config
from budgetdb.models.spec import ModelSpec
from budgetdb.shapes import Shape
from budgetdb.tracing.tracer import Tracer
from budgetdb.workloads.base import parse_workload

SHAPE = Shape(32, 4096)
_REPEATS = 5
_TRACED = "import prediction_speed; prediction_speed.print_trace()"


def table() -> str:
    """Seconds and memory of one trace of an 8 B model at whole depth, and seconds of a table over all cards."""
    traced = json.loads(_output([sys.executable, "-c", _TRACED], cwd=Path(__file__).parent))
    with tempfile.TemporaryDirectory() as directory:
        llama_8b().save_pretrained(directory)
        command = [sys.executable, "-m", "budgetdb.cli", "predict", directory]
        one = [_seconds([*command, "--device", "L4"]) for _ in range(3)]
        every = [_seconds([*command, "--all-devices"]) for _ in range(3)]
    return "\n".join(
        (
            f"one trace of an 8 B Llama at {SHAPE}, {traced['layers']} layers",
            f"  first            {traced['first_s']:.2f} s",
            f"  median           {traced['median_s']:.2f} s",
            f"  memory added     {traced['added_bytes'] / 2**20:.0f} MiB",
            f"predict --device L4       {statistics.median(one):.1f} s, interpreter and imports included",
            f"predict --all-devices     {statistics.median(every):.1f} s",
        )
    )


def llama_8b() -> LlamaConfig:
    """The published sizes of an 8 B Llama 3.1."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def print_trace() -> None:
    """Trace it, and print what that took as JSON: for a process of its own, whose largest memory is what was added."""
    config = llama_8b()
    model = outline_config(config, ModelSpec(source="llama-8b", weights="random"))
    target = SimulatedCard.named("L4").target()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = []
    with Tracer(model, parse_workload("forward"), target) as tracer:
        for _ in range(_REPEATS):
            started = time.perf_counter()
            tracer.trace(SHAPE)
            seconds.append(time.perf_counter() - started)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "layers": config.num_hidden_layers,
                "first_s": seconds[0],
                "median_s": statistics.median(seconds[1:]),
                "added_bytes": after - before,
            }
        )
    )


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    _output(command)
    return time.perf_counter() - started


def _output(command: list[str], *, cwd: Path | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout
