"""Batch samplers for torch's DataLoader that know all their batches before the first is run.

None of them has a `batch_size` attribute or derives from torch's `BatchSampler`: accelerate and the transformers
Trainer, seeing one, take every batch for full and drop samples (FIELD 6).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from budgetdb.costs.frontier import max_batch_sizes
from budgetdb.errors import LengthsError, UsageError
from budgetdb.profiles import Profile
from budgetdb.sampling.lengths import read_lengths
from budgetdb.sampling.packing import IndexArray, padded_lengths
from budgetdb.sampling.plan import Plan, plan_batches
from budgetdb.sampling.restore import restore_rows
from budgetdb.sampling.sharding import even_plan, gathered_plan, rank_plan

_log = logging.getLogger(__name__)


class PlannedBatchSampler(Sampler[list[int]]):
    """Yields the batches of a plan, each a list of dataset indices; `len()` is their exact number.

    It can be iterated any number of times and pickles as its arrays, 6 to 8 bytes a sample.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for end in self._plan.ends.tolist():
            yield self._plan.order[start:end].tolist()
            start = end

    def __len__(self) -> int:
        return len(self._plan.ends)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._description()})"

    def _description(self) -> str:
        plan = self._plan
        return f"{len(plan.order)} samples in {len(plan.ends)} batches, {100 * plan.padding_share:.1f} % padding"

    @property
    def order(self) -> IndexArray:
        """The dataset index of each row in the order emitted, shape `(samples,)`, read-only."""
        return _read_only(self._plan.order)

    @property
    def batch_sizes(self) -> NDArray[np.int64]:
        """Rows of each batch, shape `(batches,)`."""
        return self._plan.batch_sizes

    @property
    def batch_lengths(self) -> NDArray[np.int64]:
        """Padded length of each batch, extra tokens included, shape `(batches,)`."""
        return self._plan.batch_lengths

    @property
    def padding_share(self) -> float:
        """Padding among all tokens the collator emits, 0 to 1."""
        return self._plan.padding_share

    @property
    def oversize(self) -> IndexArray:
        """Dataset indices of the samples that alone exceed the limit, in the order emitted, read-only.

        Each is a batch of one row, and the only batches over the limit are these.
        """
        return _read_only(self._plan.oversize)

    @property
    def duplicates(self) -> IndexArray:
        """Positions in `order` of rows that only even out the ranks, read-only; empty without sharding."""
        return _read_only(self._plan.duplicates)

    def restore_order(self, outputs: Any) -> Any:
        """`outputs`, collected batch after batch, in the order of the dataset.

        Args:
            outputs: an array, tensor or sequence with a row for each sample, or a sequence with an array, tensor or
                list for each batch. Where every batch has one row, a sequence is read as batches when each of its
                entries has exactly one row.

        Returns:
            An array or tensor with a row for each sample where all came as such with rows of one shape, else a list.

        Raises:
            UsageError: there are not as many rows as samples.
        """
        return restore_rows(outputs, self._plan, next_step="Collect the outputs of every batch, each batch once")

    def shard(self, rank: int, world_size: int) -> RankBatchSampler:
        """The batches of one rank of `world_size`; every rank gets as many, and all together each sample once.

        With B batches over W ranks, the batches with most rows are halved until there are `T = W * ceil(B / W)`; rank r
        takes batches `r, r + W, r + 2W, ...`. Where there are fewer than T samples, duplicates of the shortest make up
        the number; `duplicates` has their positions, and `restore_order` removes them.

        Raises:
            UsageError: there is no such rank.
        """
        return RankBatchSampler(self._plan, rank=rank, world_size=world_size)


class RankBatchSampler(PlannedBatchSampler):
    """One rank's batches of a plan that all ranks share; made by `PlannedBatchSampler.shard`.

    Attributes:
        rank: whose batches these are.
        world_size: over how many ranks the plan is spread.
    """

    def __init__(self, plan: Plan, *, rank: int, world_size: int) -> None:
        rank, world_size = _whole("rank", rank, at_least=0), _whole("world_size", world_size, at_least=1)
        self._all_ranks = even_plan(plan, world_size=world_size)
        super().__init__(rank_plan(self._all_ranks, rank=rank, world_size=world_size))
        self.rank, self.world_size = rank, world_size

    def restore_order(self, outputs: Any) -> Any:
        """The outputs of all ranks, rank 0's first, in the order of the dataset and without duplicates.

        Forms and result are those of `PlannedBatchSampler.restore_order`: what `all_gather_object` returns is chained
        into one list first. `order` tells which sample each of this rank's own rows is.

        Raises:
            UsageError: there are not as many rows as all ranks have together.
        """
        gathered = gathered_plan(self._all_ranks, world_size=self.world_size)
        return restore_rows(outputs, gathered, next_step="Gather the outputs of all ranks, rank 0's first")

    def shard(self, rank: int, world_size: int) -> RankBatchSampler:
        """Not possible twice.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"this is rank {self.rank} of {self.world_size} already, it can't become rank {rank} of {world_size}",
            next_step="Call `shard` on the sampler it came from",
        )

    def _description(self) -> str:
        return f"rank {self.rank} of {self.world_size}: {super()._description()}"


class TokenBudgetBatchSampler(PlannedBatchSampler):
    """Length-sorted batches of which none has more than `token_budget` tokens, padding included.

    For each batch, `batch_size * (longest padded length + extra_tokens_per_sample) <= token_budget`. A sample that is
    longer alone is still yielded, in a batch of one row, and listed in `oversize`.

    >>> list(TokenBudgetBatchSampler([5, 30, 7, 6], token_budget=32, pad_multiple=8))
    [[1], [2, 3, 0]]

    Args:
        lengths: tokens of each sample in dataset order: whatever `read_lengths` takes.
        token_budget: the most tokens of a batch.
        pad_multiple: the collator's `pad_to_multiple_of`; 1 where it does not round.
        extra_tokens_per_sample: tokens the model adds to every row on its own (virtual prompt tokens).
        order: `descending`, longest first (an out-of-memory error comes at once, and the allocator does not grow), or
            `ascending`, which gives the batches of micm-nlp's sampler of the same name.

    Attributes:
        token_budget: as given.

    Raises:
        UsageError: the budget is not positive, `pad_multiple` is below 1, the extra tokens are negative, or there is no
            such order.
        LengthsError: the lengths make no sense.
    """

    def __init__(
        self,
        lengths: Any,
        token_budget: int,
        pad_multiple: int = 1,
        extra_tokens_per_sample: int = 0,
        *,
        order: str = "descending",
    ) -> None:
        self.token_budget = _whole("token_budget", token_budget, at_least=1)
        # Beyond what numpy holds every budget is the same: all samples in one batch.
        budget = min(self.token_budget, np.iinfo(np.int64).max)
        plan = plan_batches(
            read_lengths(lengths),
            max_rows=lambda padded: budget // padded,
            pad_multiple=_whole("pad_multiple", pad_multiple, at_least=1),
            extra_tokens=_whole("extra_tokens_per_sample", extra_tokens_per_sample, at_least=0),
            order=order,
        )
        super().__init__(plan)
        _warn_of_oversize(plan, f"the token budget of {self.token_budget}")


class ProfileBatchSampler(PlannedBatchSampler):
    """Length-sorted batches, each bounded at its own length by what a profile's cost model says fits.

    Where one token budget has to be safe at the worst length, this takes at every length all there is.

    Args:
        lengths: tokens of each sample in dataset order: whatever `read_lengths` takes.
        profile: its cost model, limit less headroom, and caps decide.
        pad_multiple: the collator's `pad_to_multiple_of`; the profile's own when None.
        extra_tokens_per_sample: tokens the model adds to every row on its own; they count as length.
        order: `descending` or `ascending`.

    Attributes:
        profile: as given; a pickled sampler keeps it without its probes.

    Raises:
        UsageError: `pad_multiple` is below 1, the extra tokens are negative, or there is no such order.
        LengthsError: the lengths make no sense, or one is beyond the profile's `max_length`.
    """

    def __init__(
        self,
        lengths: Any,
        profile: Profile,
        *,
        pad_multiple: int | None = None,
        extra_tokens_per_sample: int = 0,
        order: str = "descending",
    ) -> None:
        multiple = profile.key.pad_multiple if pad_multiple is None else pad_multiple
        multiple = _whole("pad_multiple", multiple, at_least=1)
        extra = _whole("extra_tokens_per_sample", extra_tokens_per_sample, at_least=0)
        tokens = read_lengths(lengths)
        _check_within(profile, tokens, padded_lengths(tokens, pad_multiple=multiple, extra_tokens=extra))
        plan = plan_batches(
            tokens,
            max_rows=lambda padded: max_batch_sizes(
                profile.cost_model, padded, usable_bytes=profile.usable_bytes, caps=profile.caps
            ),
            pad_multiple=multiple,
            extra_tokens=extra,
            order=order,
        )
        super().__init__(plan)
        self.profile = profile
        _warn_of_oversize(plan, f"what profile {profile.id} allows")

    def __getstate__(self) -> dict[str, Any]:
        slim = self.profile.model_copy(update={"probes": ()})
        return {**self.__dict__, "profile": slim.model_dump_json()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, profile=Profile.model_validate_json(state["profile"]))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def _whole(name: str, value: Any, *, at_least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, got {value!r}", next_step=f"Give {name} as an int") from None
    if number < at_least:
        raise UsageError(f"{name} must be at least {at_least}, got {number}", next_step=f"Give a larger {name}")
    return number


def _check_within(profile: Profile, lengths: NDArray[np.int64], padded: NDArray[np.int64]) -> None:
    beyond = padded > profile.max_length
    if not beyond.any():
        return
    first = int(np.argmax(beyond))
    raise LengthsError(
        f"lengths[{first}] is {lengths[first]} ({padded[first]} tokens on the device), beyond profile {profile.id}, "
        f"which is settled up to {profile.max_length}",
        next_step=f"Calibrate with max_length={int(padded.max())} or larger",
    )


def _warn_of_oversize(plan: Plan, limit: str) -> None:
    if len(plan.oversize):
        _log.warning(
            "%d of %d samples are each over %s and go alone, in a batch of one row; the first is sample %d",
            len(plan.oversize),
            len(plan.order),
            limit,
            plan.oversize[0],
        )
