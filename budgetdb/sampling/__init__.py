"""Lengths in, batches that fit out: packing, the samplers, and their shards over ranks.

The names below are imported on first use, so that `import budgetdb.sampling` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from budgetdb.sampling.lengths import read_lengths
    from budgetdb.sampling.plan import Plan, plan_batches
    from budgetdb.sampling.sampler import (
        PlannedBatchSampler,
        ProfileBatchSampler,
        RankBatchSampler,
        TokenBudgetBatchSampler,
    )

__all__ = [
    "Plan",
    "PlannedBatchSampler",
    "ProfileBatchSampler",
    "RankBatchSampler",
    "TokenBudgetBatchSampler",
    "plan_batches",
    "read_lengths",
]

_MODULES = {
    "Plan": "budgetdb.sampling.plan",
    "PlannedBatchSampler": "budgetdb.sampling.sampler",
    "ProfileBatchSampler": "budgetdb.sampling.sampler",
    "RankBatchSampler": "budgetdb.sampling.sampler",
    "TokenBudgetBatchSampler": "budgetdb.sampling.sampler",
    "plan_batches": "budgetdb.sampling.plan",
    "read_lengths": "budgetdb.sampling.lengths",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
