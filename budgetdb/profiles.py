"""What is stored, shown and exported: a profile, the key it is found by, and the probes it rests on.

All are frozen pydantic models, strict, without unknown fields and without NaN: what is read back from a file or a
database is exactly what was written, or an error.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PrivateAttr

from budgetdb.errors import UsageError
from budgetdb.plugins import COSTS
from budgetdb.shapes import Shape, padded_length

if TYPE_CHECKING:
    from budgetdb.costs.base import CostModel

Count = Annotated[int, Field(ge=0, le=2**62)]
Positive = Annotated[int, Field(ge=1, le=2**62)]
Text = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
CostParameter = FiniteFloat | list[list[FiniteFloat]]


class Bound(StrEnum):
    """What stopped the search."""

    MEMORY = "memory"
    MAX_LENGTH = "max_length"
    KERNEL = "kernel"
    USER = "user"
    TIME = "time"


class Outcome(StrEnum):
    """How a probe ended."""

    FITS = "fits"
    OOM = "oom"
    KERNEL_LIMIT = "kernel_limit"


class Provenance(StrEnum):
    """Where a profile comes from."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    IMPORTED = "imported"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def canonical_json(self) -> str:
        """JSON with the fields in their declared order: equal records give equal text."""
        return self.model_dump_json()

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


class ProfileKey(_Record):
    """What must be equal for a profile to answer (DESIGN 5).

    Attributes:
        model_hash: fingerprint of the model's structure, independent of its weights' values.
        device_name: as the driver reports it.
        device_bytes: memory of the device, rounded down to 256 MiB (cards of one kind differ by a few MiB).
        dtype: of the parameters, as torch spells it, without `torch.`.
        attention: attention implementation, `none` for a callable that has no such setting.
        pad_multiple: what the collator rounds lengths up to.
        workload: name and options of the step, as `Workload.key` writes them.
    """

    model_hash: Name
    device_name: Name
    device_bytes: Positive
    dtype: Name
    attention: Name
    pad_multiple: Positive
    workload: Name


class Environment(_Record):
    """What was installed and set when a profile was made: recorded, and compared at lookup.

    Attributes:
        device_total_bytes: memory of the device to the byte.
        runtime: CUDA or HIP version, or None.
        allocator: settings of the allocator as the environment gives them, empty when it is the default.
    """

    torch: Text
    transformers: Text | None = None
    runtime: Text | None = None
    driver: Text | None = None
    compute_capability: Text | None = None
    allocator: Text = ""
    platform: Text = ""
    device_total_bytes: Count = 0


class Probe(_Record):
    """One step really run at one shape, and what was measured.

    Attributes:
        length: padded tokens per row.
        peak_allocated_bytes: most bytes in live tensors at once, weights included; None when the step did not end.
        peak_reserved_bytes: most bytes the allocator held at once; None when the step did not end.
        baseline_bytes: bytes allocated before the step.
        held_bytes: bytes of the outputs that one step leaves to the loop.
        alloc_retries: times the allocator had to flush its cache; any makes the outcome `oom`.
        elapsed_s: seconds of the second, warm step.
        cap_bytes: what the process was allowed to allocate when the probe ran.
        purpose: `search` or `check`.
        message: text of the error, when there was one.
    """

    batch_size: Positive
    length: Positive
    outcome: Outcome
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    baseline_bytes: Count = 0
    held_bytes: Count = 0
    alloc_retries: Count = 0
    elapsed_s: Seconds = 0.0
    cap_bytes: Count | None = None
    purpose: Text = "search"
    message: Text | None = None

    @property
    def shape(self) -> Shape:
        """The batch that was run."""
        return Shape(self.batch_size, self.length)

    @property
    def fits(self) -> bool:
        """Whether the step ran to its end within the limit."""
        return self.outcome is Outcome.FITS

    @property
    def peak_bytes(self) -> int:
        """What the device's limit is held against: reserved bytes where an allocator reserves, else allocated."""
        return max(self.peak_allocated_bytes or 0, self.peak_reserved_bytes or 0)


class CostRecord(_Record):
    """A cost model as it is stored: its kind, and its few coefficients."""

    kind: Name
    parameters: dict[Name, CostParameter]

    @cached_property
    def model(self) -> CostModel:
        """The cost model, ready to be asked.

        Raises:
            UnknownNameError: it is of a kind that no installed package provides.
        """
        model: CostModel = COSTS.get(self.kind).from_parameters(self.parameters)
        return model


class Caps(_Record):
    """Limits of a batch that are not memory; each is None where there is none.

    Attributes:
        rows: largest batch size (65 535 grid blocks over the heads, or the user's own limit).
        tokens: largest `batch_size * length` (2**31 elements of the widest tensor, or the time a step may take).
        squares: largest `batch_size * length**2` (2**31 attention scores).
        reason: the bound to name when one of them decides.
    """

    rows: Positive | None = None
    tokens: Positive | None = None
    squares: Positive | None = None
    reason: Bound = Bound.KERNEL

    def clip(self, batch_size: int, length: int) -> int:
        """`batch_size`, or the largest they allow at a padded `length` where that is smaller."""
        if self.rows is not None:
            batch_size = min(batch_size, self.rows)
        if self.tokens is not None:
            batch_size = min(batch_size, self.tokens // length)
        if self.squares is not None:
            batch_size = min(batch_size, self.squares // length**2)
        return batch_size


class FrontierPoint(_Record):
    """The largest batch size that fits at one padded length.

    Attributes:
        peak_bytes: what the cost model expects there.
        probed: whether a probe ran at this length.
    """

    length: Positive
    batch_size: Count
    peak_bytes: Count
    bound: Bound
    probed: bool


class Served(_Record):
    """What answered a lookup, and why: beside a profile while it is used, never stored with it.

    Attributes:
        profile_id: the stored profile that answered.
        source: where it was: `store`, `shipped` (with the package), `calibrated`, `predicted`, or any of these
            by way of another rank of the job, as `rank 0 (store)`.
        policy: the match policy it was found under.
        differences: how it differs from what was asked for, a line for each.
        added_headroom_bytes: what is kept free for their sake, beside the profile's own headroom.
    """

    profile_id: Name
    source: Name
    policy: Name
    differences: tuple[Text, ...] = ()
    added_headroom_bytes: Count = 0


class Profile(_Record):
    """How many tokens one model takes in one step on one kind of device.

    Attributes:
        limit_bytes: what the allocator could use when this was made: device total - other processes - context.
        headroom_bytes: taken off the limit before anything was solved.
        overhead_bytes: what the process took on the device outside the allocator.
        resident_bytes: weights and buffers.
        warm_up_bytes: how much of the overhead came with the first steps: a process that has not run one yet will need
            as much.
        step_s: seconds of a warm step of one short row: what a step takes that has hardly anything in it; 0 where that
            was not measured.
        max_length: longest padded length it answers for.
        bound: what decides at that length; `max_length` when a longer one was asked for than the model takes.
        token_budget: `batch_size * padded_length` never above it is safe for every length up to `max_length`; so is
            `batch_size` never above `caps.rows`, where that is set.
        error_bound: how far a predicted peak may be off, as a share of what a step adds to the weights; 0 where the
            peaks were measured. The headroom covers it.
        flags: properties that a reader should know of, `mixture_of_experts` for one.
    """

    schema_version: Annotated[int, Field(ge=1, le=1)] = 1
    key: ProfileKey
    environment: Environment
    model_name: Text
    cost: CostRecord
    caps: Caps = Caps()
    limit_bytes: Positive
    headroom_bytes: Count
    overhead_bytes: Count = 0
    resident_bytes: Count
    warm_up_bytes: Count = 0
    step_s: Seconds = 0.0
    max_length: Positive
    bound: Bound
    token_budget: Count
    frontier: tuple[FrontierPoint, ...]
    probes: tuple[Probe, ...] = ()
    provenance: Provenance
    error_bound: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    flags: tuple[Name, ...] = ()
    created_at: datetime
    # No field: what is stored, exported and compared by checksum is the same whoever asked for it.
    _served: Served | None = PrivateAttr(None)

    @property
    def served(self) -> Served | None:
        """What answered the lookup this came from, and why; None for a profile that came from none."""
        return self._served

    def __eq__(self, other: object) -> bool:
        return self.model_dump() == other.model_dump() if isinstance(other, Profile) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.key.digest, self.created_at))

    def as_served(self, served: Served) -> Profile:
        """This profile with word of where it came from."""
        copy = self.model_copy()
        copy._served = served
        return copy

    @property
    def id(self) -> str:
        """Short name: the first twelve digits of the key's digest."""
        return self.key.digest[:12]

    @property
    def usable_bytes(self) -> int:
        """The limit less the headroom."""
        return max(self.limit_bytes - self.headroom_bytes, 0)

    @property
    def cost_model(self) -> CostModel:
        """The cost model, ready to be asked; see `CostRecord.model`."""
        # Kept in the record, not here: a copy with another record must not answer by the old one.
        return self.cost.model

    def peak_bytes(self, shape: Shape) -> int:
        """Expected peak of a step at `shape`, in bytes, weights included; never below what was measured there."""
        return self.cost_model.peak_bytes(shape)

    def max_batch_size(self, length: int) -> int:
        """The largest batch size that fits at `length` tokens per row (rounded up to the profile's multiple).

        Raises:
            UsageError: `length` is beyond what the profile was settled for.
        """
        length = padded_length(length, self.key.pad_multiple)
        if length > self.max_length:
            raise UsageError(
                f"length {length} is beyond profile {self.id}, which is settled up to {self.max_length}",
                next_step=f"Calibrate with max_length={length}",
            )
        return self.caps.clip(self.cost_model.max_batch_size(length, self.usable_bytes), length)
