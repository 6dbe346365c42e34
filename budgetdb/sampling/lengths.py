"""Lengths of whatever people have, as one array of whole numbers, or an error that names the first bad one."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetdb.errors import LengthsError
from budgetdb.sampling.packing import Lengths

# Tensors are indexed by 32 bits in many kernels; no row is longer, and a larger number is an offset or an id.
LONGEST = 2**31 - 1

# Where a dataset has its lengths: given, or to be counted.
_COLUMNS = ("length", "input_ids")
# Texts that a tokenizer gets at once.
_TOKENISED = 1000
_NEXT_STEP = "Give one whole number of tokens per sample, in dataset order"


def read_lengths(source: Any, *, count: int | None = None) -> Lengths:
    """The number of tokens of each sample, from any sequence or column of them.

    A single zero is fine (an empty row is padded to one multiple), and so is an empty sequence.

    >>> read_lengths([5, 2.0, 0])
    array([5, 2, 0])

    Args:
        source: a list, tuple, range, iterator, numpy array or memory map, torch tensor on any device, a column of
            `datasets`, pandas or Arrow, or a whole dataset of `datasets` or table of Arrow, which then has a column
            `length`, or else `input_ids`. A column of lists counts as the lengths of its lists,
            which Arrow knows without reading them. What `datasets` holds is read from its table, a mapping of indices
            respected, unless a custom transform may change it.
        count: how many samples there must be, where that is known.

    Returns:
        Shape `(samples,)`, of the integers that it came in, or int64.

    Raises:
        LengthsError: an entry is negative, not whole, no number, or longer than any row can be (the message names the
            first such index and its value); all are zero; or there are not `count` of them.
    """
    lengths = _checked(_as_array(source))
    if count is not None and len(lengths) != count:
        raise LengthsError(f"{len(lengths)} lengths for {count} samples", next_step=_NEXT_STEP)
    if len(lengths) and not lengths.any():
        raise LengthsError(
            f"the lengths are all zero ({len(lengths)} of {len(lengths)})",
            next_step="They usually come from a column that was never filled, or were computed before tokenising: "
            "give the number of tokens of each sample",
        )
    return lengths


def _as_array(source: Any) -> NDArray[Any]:
    if isinstance(source, range):
        return np.arange(source.start, source.stop, source.step)
    if isinstance(source, list | tuple):
        return _from_items(source)
    if hasattr(source, "detach"):
        return _from_tensor(source)
    for reader in (_from_dataset, _from_datasets_column, _from_arrow):
        column = reader(source)
        if column is not None:
            return column
    if hasattr(source, "__array__"):
        return np.asarray(source)
    if not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping | AbstractSet):
        raise LengthsError(
            f"lengths must be a sequence of numbers, got {type(source).__name__} {reprlib.repr(source)}",
            next_step=_NEXT_STEP,
        )
    return _from_items(list(source))


def _from_items(items: list[Any] | tuple[Any, ...]) -> NDArray[np.int64]:
    kinds = set(map(type, items))
    if all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        try:
            return np.array(items, dtype=np.int64)
        except OverflowError:
            pass  # one by one, the one too large gets its name
    return np.fromiter((_whole(item, index) for index, item in enumerate(items)), dtype=np.int64, count=len(items))


def _from_tensor(tensor: Any) -> NDArray[Any]:
    on_cpu = tensor.detach().cpu()
    try:
        array: NDArray[Any] = on_cpu.numpy()
    except TypeError:  # numpy has no bfloat16
        array = np.asarray(on_cpu.tolist())
    return array


def _from_dataset(source: Any) -> NDArray[Any] | None:
    """Lengths of a whole dataset or table, by its column of lengths or of token ids; None where it is neither."""
    names = getattr(source, "column_names", None)
    if not isinstance(names, list):
        return None
    for name in _COLUMNS:
        if name in names:
            column = source[name]
            array = _from_datasets_column(column) if hasattr(column, "source") else _from_arrow(column)
            return array if array is not None else _counted(column)
    raise LengthsError(
        f"there is no column {' or '.join(_COLUMNS)} among {', '.join(map(str, names)) or 'no columns'}",
        next_step="Give the column of lengths itself, or tokenise first",
    )


def _from_datasets_column(column: Any) -> NDArray[Any] | None:
    """The column as its dataset's Arrow table has it, or None where only reading it row by row is right.

    Through the library's own interface a million rows in a shuffled order take 8 s, from the table 0.02 s, so the
    mapping of indices is applied here.
    """
    dataset: Any = getattr(column, "source", None)
    name = getattr(column, "column_name", None)
    if not (isinstance(name, str) and hasattr(dataset, "data") and hasattr(dataset, "_indices")):
        return None
    if dataset.format["type"] == "custom":
        return None
    array = _from_arrow(dataset.data.column(name))
    if array is not None and dataset._indices is not None:
        array = array[dataset._indices.column(0).to_numpy()]
    return array


def _from_arrow(column: Any) -> NDArray[Any] | None:
    """An Arrow array's numbers, or the lengths of its lists from their offsets; None for anything else."""
    kind = str(getattr(column, "type", ""))
    if not hasattr(column, "to_numpy") or not kind:
        return None
    if "list<" not in kind:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(column).to_numpy(zero_copy_only=False))


def _counted(rows: Iterable[Any]) -> NDArray[np.int64]:
    return np.fromiter((row if isinstance(row, int) else len(row) for row in rows), dtype=np.int64)


def count_tokens(
    texts: Iterable[str], tokenizer: Callable[..., Any], *, progress: bool | None = None, **options: Any
) -> NDArray[np.int64]:
    """The number of tokens of each text, by whatever tokenises them.

    Args:
        texts: any iterable of texts.
        tokenizer: called with a list of texts and `options`; it returns a mapping with `input_ids`, as those of
            transformers do, or a list of token ids for each text.
        progress: whether a bar is shown on standard error; by default where that is a terminal.
        options: for the tokenizer, `truncation=True` for one.

    Returns:
        Shape `(texts,)`.

    Raises:
        LengthsError: an entry is no text (the message names the first), or the tokenizer returns another number.
    """
    from tqdm import tqdm

    counts: list[int] = []
    total = len(texts) if isinstance(texts, Sized) else None
    hidden = None if progress is None else not progress  # None: where there is no terminal
    with tqdm(total=total, unit=" texts", desc="tokenising", disable=hidden) as bar:
        for batch in _batches(texts):
            for place, text in enumerate(batch):
                if not isinstance(text, str):
                    raise LengthsError(
                        f"texts[{len(counts) + place}] is {reprlib.repr(text)}, and no text",
                        next_step="Give one text for each sample",
                    )
            encoded = tokenizer(batch, **options)
            rows = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
            if len(rows) != len(batch):
                raise LengthsError(
                    f"the tokenizer made {len(rows)} rows of {len(batch)} texts",
                    next_step="Give one that returns a list of token ids for each text, without overflow or padding",
                )
            counts.extend(map(len, rows))
            bar.update(len(batch))
    return np.array(counts, dtype=np.int64)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _TOKENISED:
            yield batch
            batch = []
    if batch:
        yield batch


def _checked(array: NDArray[Any]) -> Lengths:
    if array.ndim == 0:
        raise LengthsError(f"lengths is one single {array.item()!r}, not a sequence", next_step=_NEXT_STEP)
    if len(array) == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim > 1 or array.dtype.kind not in "iuf":
        return np.fromiter((_whole(item, index) for index, item in enumerate(array)), dtype=np.int64, count=len(array))
    if array.dtype.kind in "iu" and array.min() >= 0 and array.max() <= LONGEST:
        return array
    if array.dtype.kind == "f":
        array = array.astype(np.float64)  # half precision does not reach LONGEST
    bad = (array < 0) | (array > LONGEST) | (np.floor(array) != array)  # NaN differs from itself
    if bad.any():
        first = int(np.argmax(bad))
        _whole(array[first], first)
    return array.astype(np.int64)


def _whole(value: Any, index: int) -> int:
    """`value` as a length, or the error that names it."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy, or a tensor without dimensions
    fault = _fault(value)
    if fault:
        raise LengthsError(f"lengths[{index}] is {reprlib.repr(value)}, {fault}", next_step=_NEXT_STEP)
    return int(value)


def _fault(value: Any) -> str | None:
    if isinstance(value, bool):
        return "a boolean and not a number of tokens"
    if isinstance(value, str | bytes):
        return "text and not its number of tokens"
    if isinstance(value, Iterable):
        return "nested: its own length is wanted, not what is in it"
    if not isinstance(value, int | float):
        return "not a number"
    if value < 0:
        return "which is negative"
    if value > LONGEST:
        return f"longer than any row can be ({LONGEST})"
    return None if value == value // 1 else "not a whole number"
