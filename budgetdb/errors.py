"""Every exception budgetdb raises.

::

    BudgetDBError                     root: catch this to catch them all
    ├── UsageError                    an argument can't be used          (ValueError)
    │   ├── UnknownNameError          no plugin or choice of that name   (LookupError)
    │   ├── LengthsError              the lengths given make no sense
    │   └── FileFormatError           a file of profiles is not one, or was changed
    ├── ModelError                    a model can't be loaded            (RuntimeError)
    │   ├── ModelNotFoundError        nothing there under that name      (FileNotFoundError)
    │   └── UntraceableError          its step can't run on fake tensors
    ├── DeviceError                   the device is absent or unusable   (RuntimeError)
    │   └── SimulatedOutOfMemoryError a simulated device has no room left
    ├── CalibrationError              a calibration ended without result (RuntimeError)
    │   ├── DoesNotFitError           not even the smallest batch fits
    │   ├── BelowFloorError           the budget found is under the floor asked for
    │   ├── StepFailedError           the step fails for a reason that is not memory
    │   ├── CalibrationTimeoutError   the time given ran out before anything was settled (TimeoutError)
    │   └── WorkerError               the probing process died or fell silent
    ├── ProfileNotFoundError          no stored profile answers          (LookupError)
    ├── StoreError                    the database can't be used         (RuntimeError)
    │   ├── StoreUnavailableError     it can't be opened, or is locked
    │   ├── StoreReadOnlyError        it can be read but not written
    │   ├── StoreCorruptError         it is damaged, or no database at all
    │   └── SchemaMismatchError       its schema is newer, or another program's
    └── PluginError                   a plugin can't be imported         (ImportError)

Each message says what happened with its values, and ends with the one command or argument to try next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class BudgetDBError(Exception):
    """The root of all errors raised by budgetdb.

    Attributes:
        next_step: what the user can do about it, or None; already part of the message.
    """

    exit_code = 1

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        super().__init__(f"{message}. {next_step}" if next_step else message)
        self.next_step = next_step

    def __reduce__(self) -> tuple[Any, ...]:
        # The constructors take data and make a message of it, so a copy in another process is made without them.
        return rebuilt_error, (type(self), str(self.args[0]), self.__dict__)


def rebuilt_error(kind: type[BudgetDBError], message: str, attributes: Mapping[str, object]) -> BudgetDBError:
    """An error as it was in another process: its message is complete, so no constructor runs again."""
    # These builtins have fields of their own, so only their own `__new__` can make an instance of a subclass.
    maker: type[Exception] = next(
        (builtin for builtin in (OSError, ImportError) if issubclass(kind, builtin)), Exception
    )
    error = maker.__new__(kind)
    error.args = (message,)
    error.__dict__.update(attributes)
    return error


class UsageError(BudgetDBError, ValueError):
    """An argument, option or setting has a value that can't be used."""

    exit_code = 2


class UnknownNameError(UsageError, LookupError):
    """A name that nothing is registered under; the message offers the nearest spelling."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(self.known)}"
        super().__init__(f"unknown {kind} {name!r}", next_step=hint)


class LengthsError(UsageError):
    """Lengths that are negative, all zero, not integers, or not one for each sample."""


class FileFormatError(UsageError):
    """A file to import is too large, no JSON, of another format, or its checksums don't hold."""


class ModelError(BudgetDBError, RuntimeError):
    """A model was found but can't be built or loaded."""

    exit_code = 4


class ModelNotFoundError(ModelError, FileNotFoundError):
    """No model of that name, directory or configuration file."""

    def __str__(self) -> str:
        return str(self.args[0])


class UntraceableError(ModelError):
    """A model's step can't run on fake tensors: a kernel of its own, or control flow that depends on data."""


class DeviceError(BudgetDBError, RuntimeError):
    """The device asked for is not on this machine, or can't do what was asked of it."""

    exit_code = 5


class SimulatedOutOfMemoryError(DeviceError):
    """A simulated allocator can't serve a request within its limit, its cache given back.

    Attributes:
        requested_bytes: what was asked for.
        allocated_bytes: bytes in blocks given out.
        reserved_bytes: bytes taken from the simulated device.
        limit_bytes: most that may be taken.
    """

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"a request of {requested_bytes:,} bytes does not fit a simulated device of {limit_bytes:,} bytes, "
            f"{allocated_bytes:,} of them allocated and {reserved_bytes - allocated_bytes:,} reserved but unallocated",
            next_step="Lower the batch size or raise the limit; if much is reserved but unallocated, simulate with "
            "`expandable_segments:True`",
        )
        self.requested_bytes, self.allocated_bytes = requested_bytes, allocated_bytes
        self.reserved_bytes, self.limit_bytes = reserved_bytes, limit_bytes


class CalibrationError(BudgetDBError, RuntimeError):
    """A calibration ended without a usable result."""

    exit_code = 6


class DoesNotFitError(CalibrationError):
    """Not even one row of the shortest length fits.

    Attributes:
        needed_bytes: what it takes as far as known, or None.
        limit_bytes: what there is.
    """

    exit_code = 7

    def __init__(self, message: str, *, needed_bytes: int | None, limit_bytes: int, next_step: str) -> None:
        super().__init__(message, next_step=next_step)
        self.needed_bytes, self.limit_bytes = needed_bytes, limit_bytes


class BelowFloorError(CalibrationError):
    """The budget found is smaller than the floor the caller set.

    Attributes:
        token_budget: the budget that was found.
        floor: the smallest the caller accepts.
    """

    def __init__(self, token_budget: int, floor: int) -> None:
        super().__init__(
            f"the largest token budget that fits is {token_budget}, below the floor of {floor}",
            next_step="Lower `floor`, or free memory on the device",
        )
        self.token_budget, self.floor = token_budget, floor


class StepFailedError(CalibrationError):
    """A step raised something that is no out-of-memory error; no other shape is tried.

    Attributes:
        batch_size: rows of the batch that failed.
        length: padded tokens per row of the batch that failed.
        reason: the text of the original error.
    """

    def __init__(self, *, batch_size: int, length: int, reason: str) -> None:
        super().__init__(
            f"the step failed at batch size {batch_size} x length {length}, and not for lack of memory: {reason}",
            next_step="Run the model once on a batch of that shape to see the whole traceback",
        )
        self.batch_size, self.length, self.reason = batch_size, length, reason


class CalibrationTimeoutError(CalibrationError, TimeoutError):
    """The time given ran out before a frontier was known."""

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerError(CalibrationError):
    """The process that runs the probes died, fell silent, or could not start."""


class ProfileNotFoundError(BudgetDBError, LookupError):
    """No stored profile answers the question, and making one was not asked for."""

    exit_code = 8


class StoreError(BudgetDBError, RuntimeError):
    """The database of profiles can't be used."""

    exit_code = 3


class StoreUnavailableError(StoreError):
    """The database can't be opened: missing directory, no permission, locked, or the server is away."""


class StoreReadOnlyError(StoreError):
    """The database can be read, but a write was refused: permissions, a full disk, or a quota."""


class StoreCorruptError(StoreError):
    """The file is damaged, or is no SQLite database."""


class SchemaMismatchError(StoreError):
    """The database was written by a newer budgetdb, needs an upgrade first, or is another program's."""


class PluginError(BudgetDBError, ImportError):
    """A plugin raised while it was imported, or is not what its group holds."""

    def __str__(self) -> str:
        return str(self.args[0])
