"""Lengths in, batches that fit out: packing, the samplers, and their shards over ranks.

The names below are imported on first use, so that `import budgetdb.sampling` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from budgetdb.sampling.lengths import count_tokens, read_lengths
    from budgetdb.sampling.pairs import plan_pairs
    from budgetdb.sampling.plan import Plan, plan_batches
    from budgetdb.sampling.sampler import (
        PlannedBatchSampler,
        ProfileBatchSampler,
        RankBatchSampler,
        TokenBudgetBatchSampler,
    )
    from budgetdb.sampling.times import TimeModel

__all__ = [
    "Plan",
    "PlannedBatchSampler",
    "ProfileBatchSampler",
    "RankBatchSampler",
    "TimeModel",
    "TokenBudgetBatchSampler",
    "count_tokens",
    "plan_batches",
    "plan_pairs",
    "read_lengths",
]

_MODULES = {
    "Plan": "budgetdb.sampling.plan",
    "PlannedBatchSampler": "budgetdb.sampling.sampler",
    "ProfileBatchSampler": "budgetdb.sampling.sampler",
    "RankBatchSampler": "budgetdb.sampling.sampler",
    "TimeModel": "budgetdb.sampling.times",
    "TokenBudgetBatchSampler": "budgetdb.sampling.sampler",
    "count_tokens": "budgetdb.sampling.lengths",
    "plan_batches": "budgetdb.sampling.plan",
    "plan_pairs": "budgetdb.sampling.pairs",
    "read_lengths": "budgetdb.sampling.lengths",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
