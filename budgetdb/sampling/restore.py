"""Outputs back in the order of the dataset, whatever form the evaluation loop collected them in."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetdb.errors import UsageError
from budgetdb.sampling.plan import Plan


def restore_rows(outputs: Any, plan: Plan, *, next_step: str) -> Any:
    """Row i of the result is what was computed for sample i; duplicates are left out.

    Args:
        outputs: in the order of `plan`, an array or tensor with a row for each sample, a sequence with an entry for
            each sample, or a sequence with an array, tensor or list for each batch. Where every batch has one row, a
            sequence is read as batches when each of its entries has exactly one row.
        plan: what was run; it holds every sample of the dataset.
        next_step: advice for the error on a wrong count.

    Returns:
        An array or tensor where the rows have one shape and came as one, else a list.

    Raises:
        UsageError: there are not as many rows as samples; the message has both numbers.
    """
    rows = outputs if _is_array(outputs) else _flat(list(outputs), plan, next_step)
    if len(rows) != plan.emitted:
        raise UsageError(_count_message(len(rows), plan), next_step=next_step)
    return _take(rows, plan.dataset_positions())


def _flat(outputs: list[Any], plan: Plan, next_step: str) -> Any:
    if len(outputs) != len(plan):
        return outputs
    sizes = plan.batch_sizes.tolist()
    found = [_row_count(output) for output in outputs]
    if found == sizes:
        return _concatenated(outputs)
    if len(outputs) == plan.emitted:
        return outputs
    batch = next(index for index, (have, want) in enumerate(zip(found, sizes, strict=True)) if have != want)
    raise UsageError(
        f"output {batch} has {_described(outputs[batch])}, but batch {batch} has {sizes[batch]}", next_step=next_step
    )


def _row_count(output: Any) -> int | None:
    if isinstance(output, str | bytes | Mapping) or getattr(output, "ndim", 1) == 0 or not isinstance(output, Sized):
        return None
    return len(output)


def _described(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"the fields {', '.join(map(str, output))} (collect one of them)"
    count = _row_count(output)
    return "no rows" if count is None else f"{count} rows"


def _concatenated(batches: list[Any]) -> Any:
    import torch

    if all(isinstance(batch, torch.Tensor) for batch in batches) and _of_one_shape(batches):
        return torch.cat(batches)
    if all(isinstance(batch, np.ndarray) for batch in batches) and _of_one_shape(batches):
        return np.concatenate(batches)
    return [row for batch in batches for row in batch]


def _of_one_shape(batches: list[Any]) -> bool:
    return len({tuple(batch.shape[1:]) for batch in batches}) == 1


def _take(rows: Any, positions: NDArray[np.int64]) -> Any:
    import torch

    if isinstance(rows, torch.Tensor):
        return rows[torch.from_numpy(positions).to(rows.device)]
    if isinstance(rows, np.ndarray):
        return rows[positions]
    return [rows[position] for position in positions.tolist()]


def _is_array(outputs: Any) -> bool:
    import torch

    if not isinstance(outputs, np.ndarray | torch.Tensor):
        return False
    if outputs.ndim == 0:
        raise UsageError(
            "outputs is a single number, not one row for each sample", next_step="Collect the outputs of every batch"
        )
    return True


def _count_message(rows: int, plan: Plan) -> str:
    return f"{rows} outputs for {plan.emitted} rows in {len(plan)} batches"
