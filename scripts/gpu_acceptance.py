"""Calibrate models on the device at hand under a limit, evaluate mixed text under it, and write down what was seen.

Run it by `scripts/gpu_acceptance` on a machine with an accelerator; `--device cpu --memory-limit 700MiB --size small`
runs the same on a CPU. Weights are random: memory does not depend on their values. The figures say, for each model and
attention: probes and out-of-memory errors of the calibration; batches of three mixed-length evaluations under the same
limit and how many of them failed; how far the expected peak is off at shapes that were never probed; and the bytes left
on the device afterwards.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import small_models
from small_models import ATTENTION, PAD_MULTIPLE, mixed_lengths

import budgetdb
from budgetdb.calibration.outcomes import ErrorKind, take
from budgetdb.calibration.prober import Prober
from budgetdb.devices.base import Device
from budgetdb.devices.choose import choose_device
from budgetdb.models.facts import resident_bytes
from budgetdb.models.load import load_model
from budgetdb.models.spec import ModelSpec
from budgetdb.profiles import Profile
from budgetdb.settings import format_bytes, parse_bytes
from budgetdb.shapes import Shape
from budgetdb.workloads.base import parse_workload

MAX_LENGTH = 512
RUNS = 3
WORKLOAD = "forward"
LARGE: Mapping[str, Mapping[str, Any]] = {
    "bert-base": {"model_type": "bert", "architectures": ["BertModel"]},
    "llama-1b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "t5-base": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 768,
        "d_kv": 64,
        "d_ff": 3072,
        "num_layers": 12,
        "num_heads": 12,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
    "albert-base": {"model_type": "albert", "architectures": ["AlbertModel"], "hidden_size": 768,
                    "intermediate_size": 3072, "num_attention_heads": 12},
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """What was seen of one model with one attention implementation."""

    model: str
    attention: str
    dtype: str
    limit_bytes: int
    token_budget: int
    probes: int
    probes_out_of_memory: int
    calibration_s: float
    evaluations: int
    batches: int
    batches_out_of_memory: int
    worst_over_prediction: float
    worst_under_prediction: float
    leaked_bytes: int


def main() -> None:
    """Run all of it; the exit status is 1 if any batch failed or any byte was left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory-limit", type=parse_bytes, default=parse_bytes("8GiB"))
    parser.add_argument("--dtype", default="auto", help="default: bfloat16 on an accelerator, float32 on a CPU")
    parser.add_argument("--size", choices=["small", "large"], default="large")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--samples", type=int, default=20_000, help="of each of the three evaluations")
    parser.add_argument("--figures", type=Path, help="write the figures to this file, as JSON")
    parser.add_argument("--profiles", type=Path, help="write the profiles to this file, as JSON")
    options = parser.parse_args()
    device = choose_device(options.device)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if device.torch_device.type == "cpu" else "bfloat16"
    models = LARGE if options.size == "large" else small_models.CONFIGURATIONS
    print(f"{device.info().name}, {format_bytes(device.info().total_bytes)}, {dtype}")

    figures, profiles = [], []
    with tempfile.TemporaryDirectory() as directory:
        for name in options.models or models:
            for attention in ATTENTION:
                config = write(name, models[name], Path(directory))
                seen, profile = accept(
                    config,
                    attention,
                    device=device,
                    dtype=dtype,
                    limit_bytes=options.memory_limit,
                    samples=options.samples,
                    place=directory,
                )
                figures.append(seen)
                profiles.append(profile)
                print(line(seen), flush=True)
    if options.figures:
        options.figures.write_text(json.dumps([asdict(seen) for seen in figures], indent=1) + "\n")
    if options.profiles:
        options.profiles.write_text(json.dumps([p.model_dump(mode="json") for p in profiles], indent=1) + "\n")
    sys.exit(any(seen.batches_out_of_memory or seen.leaked_bytes > 0 for seen in figures))


def write(name: str, configuration: Mapping[str, Any], directory: Path) -> Path:
    """The configuration as a `config.json` in a directory of its own."""
    path = directory / name / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(configuration))
    return path


def accept(
    config: Path, attention: str, *, device: Device, dtype: str, limit_bytes: int, samples: int, place: str
) -> tuple[Figures, Profile]:
    """Calibrate by name in a worker, then evaluate in this process under the same limit."""
    store = budgetdb.ProfileStore(Path(place) / "profiles.db")
    started = time.monotonic()
    profile = budgetdb.calibrate(
        str(config),
        max_length=MAX_LENGTH,
        workload=WORKLOAD,
        device=str(device.torch_device),
        dtype=dtype,
        attention=attention,
        pad_multiple=PAD_MULTIPLE,
        memory_limit_bytes=limit_bytes,
        weights="random",
        store=store,
    )
    calibration_s = time.monotonic() - started
    device.clean()
    before = device.allocated_bytes()
    batches, failed, errors = evaluate(config, attention, profile, device=device, dtype=dtype, samples=samples)
    device.clean()
    seen = Figures(
        model=config.parent.name,
        attention=attention,
        dtype=dtype,
        limit_bytes=profile.limit_bytes,
        token_budget=profile.token_budget,
        probes=len(profile.probes),
        probes_out_of_memory=sum(not probe.fits for probe in profile.probes),
        calibration_s=round(calibration_s, 1),
        evaluations=RUNS,
        batches=batches,
        batches_out_of_memory=failed,
        worst_over_prediction=round(max(errors), 4),
        worst_under_prediction=round(min(errors), 4),
        leaked_bytes=device.allocated_bytes() - before,
    )
    return seen, profile


def evaluate(
    config: Path, attention: str, profile: Profile, *, device: Device, dtype: str, samples: int
) -> tuple[int, int, list[float]]:
    """Batches run and failed in three mixed-length evaluations, and the relative errors at shapes never probed."""
    spec = ModelSpec(source=str(config), attention=attention, dtype=dtype, weights="random")
    model = load_model(spec, device.torch_device)
    prober = Prober(device=device, model=model, workload=parse_workload(WORKLOAD), resident_bytes=resident_bytes(model))
    prober.start(longest=profile.max_length)
    prober.cap(profile.limit_bytes)
    try:
        batches, failed = run_evaluations(model, profile, device, samples=samples)
        errors = [
            profile.peak_bytes(shape) / probe.peak_bytes - 1
            for shape in unseen_shapes(profile)
            if (probe := prober.probe(shape)).fits
        ]
    finally:
        prober.close()
    del model, prober
    gc.collect()
    return batches, failed, errors or [0.0]


def run_evaluations(model: Any, profile: Profile, device: Device, *, samples: int) -> tuple[int, int]:
    """How many batches of three plain evaluations ran, and how many ran out of memory."""
    workload, batches, failed = parse_workload(WORKLOAD), 0, 0
    for seed in range(RUNS):
        lengths = [min(length, profile.max_length) for length in mixed_lengths(samples, seed=seed)]
        sampler = budgetdb.ProfileBatchSampler(lengths, profile, pad_multiple=PAD_MULTIPLE)
        outputs: object = None
        for rows, length in zip(sampler.batch_sizes.tolist(), sampler.batch_lengths.tolist(), strict=True):
            batches += 1
            try:
                inputs = workload.inputs(model, Shape(rows, length), device.torch_device)
                outputs = workload.step(model, inputs)
            except Exception as error:
                if take(error).kind is not ErrorKind.OOM:
                    raise
                failed += 1
        device.synchronize()
        del outputs
    return batches, failed


def unseen_shapes(profile: Profile) -> Sequence[Shape]:
    """Half-full and nearly full batches at lengths between those that were probed."""
    lengths = [PAD_MULTIPLE * (profile.max_length * eighth // 8 // PAD_MULTIPLE) for eighth in (1, 3, 5, 7)]
    return [
        Shape(max(int(share * profile.max_batch_size(length)), 1), length)
        for length in lengths
        if length
        for share in (0.5, 0.95)
    ]


def line(seen: Figures) -> str:
    """One row for people."""
    return (
        f"{seen.model:12} {seen.attention:6} {seen.token_budget:>9} tokens, {seen.probes} probes "
        f"({seen.probes_out_of_memory} OOM) in {seen.calibration_s:.0f} s; {seen.batches} batches "
        f"({seen.batches_out_of_memory} OOM); expected peak {seen.worst_under_prediction:+.1%} to "
        f"{seen.worst_over_prediction:+.1%}; {seen.leaked_bytes} bytes left"
    )


if __name__ == "__main__":
    main()
