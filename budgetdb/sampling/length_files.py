"""Lengths out of files: numbers as text, JSON lines, numpy, Parquet; or raw text and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from budgetdb.errors import LengthsError
from budgetdb.sampling.lengths import count_tokens, read_lengths
from budgetdb.sampling.packing import Lengths

# Fields of a line of JSON, or columns of a table, that hold lengths, or lists or texts to be counted.
_FIELDS = ("length", "input_ids", "text")


def read_length_file(path: Path, *, column: str | None = None, tokenizer: Callable[..., Any] | None = None) -> Lengths:
    """The number of tokens of each sample in a file, by what its name ends in.

    `.npy`: an array. `.parquet`: a column of numbers, lists or texts. `.jsonl`: on each line a number, a list, a text,
    or an object that has one of these; `.json`: an array of such. Anything else: on each line a number, or a text where
    there is a `tokenizer`.

    Args:
        path: the file.
        column: column or field to read; by default the first there is of `length`, `input_ids` and `text`.
        tokenizer: for texts; see `count_tokens`.

    Returns:
        Shape `(samples,)`.

    Raises:
        LengthsError: the file can't be read, or what is in it is no lengths; the message names the first such line.
    """
    try:
        return _READERS.get(path.suffix.lower(), _from_lines)(path, column, tokenizer)
    except LengthsError as error:
        raise LengthsError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors too
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise LengthsError(f"{path} can't be read: {reason}", next_step="Give a file of lengths") from None


def _from_numpy(path: Path, column: str | None, tokenizer: Callable[..., Any] | None) -> Lengths:
    del column, tokenizer
    return read_lengths(np.load(path, mmap_mode="r", allow_pickle=False))


def _from_parquet(path: Path, column: str | None, tokenizer: Callable[..., Any] | None) -> Lengths:
    import pyarrow.parquet as pq

    names = pq.read_schema(path).names
    name = _chosen(names, column)
    values = pq.read_table(path, columns=[name]).column(0)
    if "string" in str(values.type):
        return _counted(values.to_pylist(), tokenizer)
    return read_lengths(values)


def _from_json(path: Path, column: str | None, tokenizer: Callable[..., Any] | None) -> Lengths:
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, list):
        raise LengthsError("it is no array", next_step="Give one value for each sample")
    return _from_values([_field(value, column) for value in values], tokenizer)


def _from_json_lines(path: Path, column: str | None, tokenizer: Callable[..., Any] | None) -> Lengths:
    return _from_values(list(_json_values(path, column)), tokenizer)


def _from_values(values: list[Any], tokenizer: Callable[..., Any] | None) -> Lengths:
    if values and isinstance(values[0], str):
        return _counted(values, tokenizer)
    return read_lengths([len(value) if isinstance(value, list) else value for value in values])


def _json_values(path: Path, column: str | None) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise LengthsError(f"line {number} is no JSON ({error})", next_step="Give one value a line") from None
            yield _field(value, column)


def _field(value: Any, column: str | None) -> Any:
    return value[_chosen(value, column)] if isinstance(value, dict) else value


def _from_lines(path: Path, column: str | None, tokenizer: Callable[..., Any] | None) -> Lengths:
    del column
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if tokenizer is not None:
        return count_tokens(lines, tokenizer)
    numbers = []
    for number, line in enumerate(lines, start=1):
        try:
            numbers.append(int(line))
        except ValueError:
            raise LengthsError(
                f"line {number} is {line[:40]!r}, and no number of tokens",
                next_step="Give --tokenizer NAME for raw text",
            ) from None
    return read_lengths(numbers)


def _counted(texts: Any, tokenizer: Callable[..., Any] | None) -> Lengths:
    if tokenizer is None:
        raise LengthsError("it holds texts", next_step="Give --tokenizer NAME to count their tokens")
    return count_tokens(texts, tokenizer)


def _chosen(names: Any, column: str | None) -> str:
    wanted = _FIELDS if column is None else (column,)
    for name in wanted:
        if name in names:
            return name
    raise LengthsError(
        f"there is no {' or '.join(wanted)} among {', '.join(map(str, names))}", next_step="Give --column NAME"
    )


_READERS = {".npy": _from_numpy, ".parquet": _from_parquet, ".jsonl": _from_json_lines, ".json": _from_json}
