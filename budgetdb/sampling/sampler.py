"""Batch samplers for torch's DataLoader that know all their batches before the first is run.

None of them has a `batch_size` attribute or derives from torch's `BatchSampler`: accelerate and the transformers
Trainer, seeing one, take every batch for full and drop samples (FIELD 6).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from budgetdb.costs.frontier import max_batch_sizes
from budgetdb.errors import LengthsError, UsageError
from budgetdb.profiles import Profile
from budgetdb.sampling.lengths import read_lengths
from budgetdb.sampling.packing import IndexArray, Lengths, padded_lengths
from budgetdb.sampling.pairs import plan_pairs
from budgetdb.sampling.plan import Plan, plan_batches
from budgetdb.sampling.restore import restore_rows
from budgetdb.sampling.sharding import assign, assign_by_speed, block_plans, even_plan, gathered_plan, rank_plan
from budgetdb.sampling.times import TimeModel
from budgetdb.shapes import padded_length

_log = logging.getLogger(__name__)


class PlannedBatchSampler(Sampler[list[int]]):
    """Yields the batches of a plan, each a list of dataset indices; `len()` is their exact number.

    The number of batches, their sizes and lengths are known at once; samples are sorted when the first batch is asked
    for. It can be iterated any number of times, and pickles as the lengths and the batches, some 2 to 4 bytes a sample.

    Attributes:
        seed: of the order of batches, None for the plan's own, longest first.
        epoch: counts up in `set_epoch`; with a seed each has another order of batches.
    """

    def __init__(self, plan: Plan, *, seed: int | None = None) -> None:
        super().__init__()
        self._base = plan
        self.seed = None if seed is None else _whole("seed", seed, at_least=0)
        self.epoch = 0
        self._position = self._resume_at = 0
        self._plan = self._arranged()

    def __iter__(self) -> Iterator[list[int]]:
        first, self._resume_at = self._resume_at, 0
        self._position = first
        for batch in self._plan.batches_from(first):
            self._position += 1
            yield batch
        self._position = 0

    def __len__(self) -> int:
        return len(self._plan)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._description()})"

    def _description(self) -> str:
        plan = self._plan
        return f"{plan.emitted} samples in {len(plan)} batches, {100 * plan.padding_share:.1f} % padding"

    @property
    def order(self) -> IndexArray:
        """The dataset index of each row in the order emitted, shape `(samples,)`, read-only."""
        return _read_only(self._plan.order)

    @property
    def batch_sizes(self) -> NDArray[np.int64]:
        """Rows of each batch, shape `(batches,)`, read-only."""
        return _read_only(self._plan.batch_sizes)

    @property
    def batch_lengths(self) -> NDArray[np.int64]:
        """Padded length of each batch, extra tokens included, shape `(batches,)`, read-only."""
        return _read_only(self._plan.batch_lengths)

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

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch `epoch`: with a seed the batches come in another order, the same on every rank.

        Raises:
            UsageError: it is no whole number of at least 0.
        """
        self.epoch = _whole("epoch", epoch, at_least=0)
        self._position = self._resume_at = 0
        self._plan = self._arranged()

    def _arranged(self) -> Plan:
        """The batches in the order of this epoch."""
        return self._base if self.seed is None else self._base.select(self._permutation(len(self._base)))

    def _permutation(self, count: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed or 0, self.epoch)).permutation(count)

    def state_dict(self) -> dict[str, Any]:
        """Where an interrupted pass stands, to be saved: plain numbers and texts.

        The position counts the batches handed out. A DataLoader whose workers fetch ahead has asked for more than the
        loop has seen: count its own batches there, and put their number in place of `position`.
        """
        return {
            "position": self._position,
            "epoch": self.epoch,
            "seed": self.seed,
            "batches": len(self._base),
            "plan": self._base.digest(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stands: the next pass begins there, later ones at the start.

        Raises:
            UsageError: the state is of another plan; the message says what differs.
        """
        wanted, own = dict(state), self.state_dict()
        if missing := sorted(own.keys() - wanted.keys()):
            raise UsageError(f"the state has no {', '.join(missing)}", next_step="Give what `state_dict` returned")
        if wanted["batches"] != own["batches"]:
            raise _other_plan(f"it was saved with {wanted['batches']} batches, and there are {own['batches']}")
        if wanted["plan"] != own["plan"]:
            raise _other_plan("it has as many batches, of other samples")
        if wanted["seed"] != own["seed"]:
            raise _other_plan(f"it was saved with seed {wanted['seed']}, and the seed is {own['seed']}")
        position = _whole("position", wanted["position"], at_least=0)
        if position > len(self):
            raise _other_plan(f"it stands at batch {position} of {len(self)}")
        self.set_epoch(wanted["epoch"])
        self._position = self._resume_at = position

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

    def shard(
        self, rank: int, world_size: int, *, speeds: Sequence[float] | None = None, gather: bool = False
    ) -> RankBatchSampler:
        """The batches of one rank of `world_size`; every rank gets as many, and all together each sample once.

        No rank talks to another: each cuts the same batches, of costs as even as can be, and takes its own. Where there
        are fewer samples than ranks, duplicates of the shortest make up the number; `duplicates` has their positions,
        and `restore_order` removes them.

        Args:
            rank: from 0 to `world_size - 1`.
            world_size: over how many ranks the batches are spread.
            speeds: how fast each rank is, in any unit, where they differ: faster ranks then get more batches. Every
                batch must fit the smallest card.
            gather: for loops that gather outputs in each step: all ranks have as many rows in every step.

        Raises:
            UsageError: there is no such rank, there is not one positive speed for each, or speeds are given with
                `gather`.
        """
        return RankBatchSampler(
            self._base, rank=rank, world_size=world_size, speeds=speeds, gather=gather, seed=self.seed
        )


class RankBatchSampler(PlannedBatchSampler):
    """One rank's batches of a plan that all ranks share; made by `PlannedBatchSampler.shard`.

    Attributes:
        rank: whose batches these are.
        world_size: over how many ranks the plan is spread.
        gather: whether outputs are gathered in each step.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        world_size: int,
        speeds: Sequence[float] | None = None,
        gather: bool = False,
        seed: int | None = None,
    ) -> None:
        self.rank, self.world_size = _whole("rank", rank, at_least=0), _whole("world_size", world_size, at_least=1)
        self.gather = gather
        if self.rank >= self.world_size:
            raise UsageError(
                f"rank {rank} of a world of {world_size} does not exist", next_step="Give 0 <= rank < world_size"
            )
        if speeds is not None and (gather or len(speeds) != self.world_size):
            raise UsageError(
                "steps that are gathered are as long on every rank"
                if gather
                else f"{len(speeds)} speeds, {self.world_size} ranks",
                next_step="Give one speed for each rank, and no gather",
            )
        if gather:
            own, self._together = block_plans(plan, rank=self.rank, world_size=self.world_size)
            self._ranks = None
        else:
            self._together = even_plan(plan, world_size=self.world_size)
            self._ranks = (
                assign(self._together, world_size=self.world_size)
                if speeds is None
                else assign_by_speed(self._together, speeds=speeds)
            )
            own = rank_plan(self._together, self._ranks, rank=self.rank)
        super().__init__(own, seed=seed)

    def restore_order(self, outputs: Any) -> Any:
        """The outputs of all ranks in the order of the dataset and without duplicates.

        Forms and result are those of `PlannedBatchSampler.restore_order`. With `gather` they come step by step, the
        rows of rank 0 first; without, all of rank 0's come first: what `all_gather_object` returns is chained into one
        list. `order` tells which sample each of this rank's own rows is.

        Raises:
            UsageError: there are not as many rows as all ranks have together.
        """
        return restore_rows(outputs, self._gathered(), next_step="Gather the outputs of all ranks, rank 0's first")

    def _gathered(self) -> Plan:
        """All rows in the order in which outputs arrive."""
        if self._ranks is None:
            return self._together if self.seed is None else self._together.select(self._permutation(len(self)))
        together = gathered_plan(self._together, self._ranks)
        if self.seed is None:
            return together
        counts = np.bincount(self._ranks, minlength=self.world_size).tolist()
        firsts = np.cumsum([0, *counts[:-1]])
        return together.select(
            np.concatenate([first + self._permutation(count) for first, count in zip(firsts, counts, strict=True)])
        )

    def shard(
        self, rank: int, world_size: int, *, speeds: Sequence[float] | None = None, gather: bool = False
    ) -> RankBatchSampler:
        """Not possible twice.

        Raises:
            UsageError: always.
        """
        del speeds, gather
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
        target_lengths: tokens of each target, for models with an encoder and a decoder: a batch's longest source and
            longest target together then count as its length, and `order` says nothing.
        strategy: of packing, by name; the fastest where `times` are given, else the fewest batches.
        times: how long steps take.
        seed: shuffles the order of batches, another one in each epoch; None for longest first.

    Attributes:
        token_budget: as given.

    Raises:
        UsageError: the budget is not positive, `pad_multiple` is below 1, the extra tokens are negative, or there is no
            such order or strategy.
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
        target_lengths: Any = None,
        strategy: str | None = None,
        times: TimeModel | None = None,
        seed: int | None = None,
    ) -> None:
        self.token_budget = _whole("token_budget", token_budget, at_least=1)
        # Beyond what numpy holds every budget is the same: all samples in one batch.
        budget = min(self.token_budget, np.iinfo(np.int64).max)
        multiple = _whole("pad_multiple", pad_multiple, at_least=1)
        extra = _whole("extra_tokens_per_sample", extra_tokens_per_sample, at_least=0)
        samples = read_lengths(lengths)
        if target_lengths is None:
            plan = plan_batches(
                samples,
                max_rows=lambda padded: budget // padded,
                pad_multiple=multiple,
                extra_tokens=extra,
                order=order,
                strategy=strategy,
                times=times,
            )
        else:
            plan = plan_pairs(
                samples,
                read_lengths(target_lengths, count=len(samples)),
                max_rows=lambda source, target: budget // (source + target),
                pad_multiple=multiple,
                extra_tokens=extra,
            )
        super().__init__(plan, seed=seed)
        _warn_of_oversize(plan, f"the token budget of {self.token_budget}")


class ProfileBatchSampler(PlannedBatchSampler):
    """Length-sorted batches, each bounded at its own length by what a profile's cost model says fits.

    Where one token budget has to be safe at the worst length, this takes at every length all there is. Where the
    profile was measured, it knows how long steps take, and batches are those that take the least time in all.

    Args:
        lengths: tokens of each sample in dataset order: whatever `read_lengths` takes.
        profile: its cost model, limit less headroom, and caps decide.
        pad_multiple: the collator's `pad_to_multiple_of`; the profile's own when None.
        extra_tokens_per_sample: tokens the model adds to every row on its own; they count as length.
        order: `descending` or `ascending`.
        target_lengths: tokens of each target, for models with an encoder and a decoder. A profile is made with both of
            one length, so a batch is bounded at the longer of its longest source and its longest target.
        strategy: of packing, by name; the fastest where the profile knows the seconds of steps, else the fewest.
        seed: shuffles the order of batches, another one in each epoch; None for longest first.
        refresh: called by `set_epoch`; a profile solved for the memory that is free by then, None for no change.

    Attributes:
        profile: as given, or as refreshed; a pickled sampler keeps it without its probes, and no `refresh`.
        pad_multiple: what lengths are rounded up to.
        times: how long steps take by the profile's probes, None where that is not known.

    Raises:
        UsageError: `pad_multiple` is below 1, the extra tokens are negative, or there is no such order or strategy.
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
        target_lengths: Any = None,
        strategy: str | None = None,
        seed: int | None = None,
        refresh: Callable[[], Profile | None] | None = None,
    ) -> None:
        multiple = profile.key.pad_multiple if pad_multiple is None else pad_multiple
        self.pad_multiple = _whole("pad_multiple", multiple, at_least=1)
        self._extra = _whole("extra_tokens_per_sample", extra_tokens_per_sample, at_least=0)
        self._order, self._strategy, self._refresh = order, strategy, refresh
        self._lengths = _narrow(read_lengths(lengths))
        self._targets = (
            None if target_lengths is None else _narrow(read_lengths(target_lengths, count=len(self._lengths)))
        )
        self.profile, self.times = profile, TimeModel.of(profile)
        super().__init__(self._packed(), seed=seed)

    def _packed(self) -> Plan:
        """The batches that fit by the profile as it is now."""
        profile = self.profile
        for lengths, extra in ((self._lengths, self._extra), (self._targets, 0)):
            if lengths is not None:
                _check_within(profile, lengths, pad_multiple=self.pad_multiple, extra_tokens=extra)

        def max_rows(padded: NDArray[np.int64]) -> NDArray[np.int64]:
            return max_batch_sizes(profile.cost_model, padded, usable_bytes=profile.usable_bytes, caps=profile.caps)

        if self._targets is not None:
            plan = plan_pairs(
                self._lengths,
                self._targets,
                max_rows=lambda source, target: max_rows(np.maximum(source, target)),
                pad_multiple=self.pad_multiple,
                extra_tokens=self._extra,
            )
        else:
            plan = plan_batches(
                self._lengths,
                max_rows=max_rows,
                pad_multiple=self.pad_multiple,
                extra_tokens=self._extra,
                order=self._order,
                strategy=self._strategy,
                times=self.times,
            )
        _warn_of_oversize(plan, f"what profile {profile.id} allows")
        return plan

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch `epoch`; where another amount of memory is free by now, batches are cut anew to fit it.

        Raises:
            UsageError: it is no whole number of at least 0.
        """
        refreshed = self._refresh() if self._refresh is not None else None
        if refreshed is not None and refreshed.usable_bytes != self.profile.usable_bytes:
            self.profile = refreshed
            self._base = self._packed()
        super().set_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        slim = self.profile.model_copy(update={"probes": ()})
        return {**self.__dict__, "profile": slim.model_dump_json(), "_refresh": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, profile=Profile.model_validate_json(state["profile"]))


def _narrow(lengths: Lengths) -> Lengths:
    """In the narrowest unsigned integer: two bytes a sample for most models."""
    return lengths.astype(np.min_scalar_type(int(lengths.max(initial=0))), copy=False)


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


def _check_within(profile: Profile, lengths: Lengths, *, pad_multiple: int, extra_tokens: int) -> None:
    longest = padded_length(int(lengths.max(initial=0)), pad_multiple) + extra_tokens
    if not len(lengths) or longest <= profile.max_length:
        return
    padded = padded_lengths(lengths, pad_multiple=pad_multiple, extra_tokens=extra_tokens)
    first = int(np.argmax(padded > profile.max_length))
    raise LengthsError(
        f"lengths[{first}] is {lengths[first]} ({padded[first]} tokens on the device), beyond profile {profile.id}, "
        f"which is settled up to {profile.max_length}",
        next_step=f"Calibrate with max_length={longest} or larger",
    )


def _other_plan(difference: str) -> UsageError:
    return UsageError(
        f"the state is of another plan: {difference}",
        next_step="Make the sampler with the lengths, budget and seed that it was saved with, or start anew",
    )


def _warn_of_oversize(plan: Plan, limit: str) -> None:
    if len(plan.oversize):
        _log.warning(
            "%d of %d samples are each over %s and go alone, in a batch of one row; the first is sample %d",
            len(plan.oversize),
            plan.emitted,
            limit,
            plan.oversize[0],
        )
