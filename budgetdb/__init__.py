"""budgetdb finds, once per kind of GPU, how many tokens a model takes in one step, and batches by it ever after.

Public names are imported when they are first used: `import budgetdb` imports nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from budgetdb.calibration.search import search
    from budgetdb.errors import BudgetDBError
    from budgetdb.lookup import calibrate, calibrate_token_budget, find_profile, make_batch_sampler
    from budgetdb.prediction import predict
    from budgetdb.profiles import Profile, ProfileKey
    from budgetdb.sampling.sampler import ProfileBatchSampler, TokenBudgetBatchSampler
    from budgetdb.shapes import Shape, padded_length
    from budgetdb.store.profile_store import ProfileStore

__all__ = [
    "BudgetDBError",
    "Profile",
    "ProfileBatchSampler",
    "ProfileKey",
    "ProfileStore",
    "Shape",
    "TokenBudgetBatchSampler",
    "calibrate",
    "calibrate_token_budget",
    "find_profile",
    "make_batch_sampler",
    "padded_length",
    "predict",
    "search",
]

_HOME = {
    "BudgetDBError": "budgetdb.errors",
    "Profile": "budgetdb.profiles",
    "ProfileBatchSampler": "budgetdb.sampling.sampler",
    "ProfileKey": "budgetdb.profiles",
    "ProfileStore": "budgetdb.store.profile_store",
    "Shape": "budgetdb.shapes",
    "TokenBudgetBatchSampler": "budgetdb.sampling.sampler",
    "calibrate": "budgetdb.lookup",
    "calibrate_token_budget": "budgetdb.lookup",
    "find_profile": "budgetdb.lookup",
    "make_batch_sampler": "budgetdb.lookup",
    "padded_length": "budgetdb.shapes",
    "predict": "budgetdb.prediction",
    "search": "budgetdb.calibration.search",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
