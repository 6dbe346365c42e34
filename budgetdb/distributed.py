"""One answer for all ranks of a job: one rank per kind of hardware asks, the others are told.

Ranks talk through the job's own key-value store, the one that `init_process_group` met on, and never inside a
collective: a calibration takes minutes, and a rank that waits so long in a collective is declared dead (ainode#134).
Texts are JSON; nothing is unpickled. All ranks call the same functions in the same order, as with any collective.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from budgetdb.errors import BudgetDBError, WorkerError, rebuilt_error
from budgetdb.profiles import Profile, Served

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_BEAT_S = 5.0
_SAY_EVERY_S = 15.0
# As long as a lease lives on a network file system (STORE 5.2): who probes may hold the interpreter for a while.
_SILENCE_S = 120.0
_rounds = itertools.count()


class Job:
    """The ranks of the default process group.

    Args:
        store: the key-value store they share.
        rank: this process's.
        world_size: how many there are.
        join_timeout_s: how long the others may take to arrive.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, join_timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._join_timeout_s = store, join_timeout_s

    def gather(self, text: str) -> list[str]:
        """What each rank gave, by rank; waits for all of them to arrive.

        Raises:
            WorkerError: one of them did not, in the time a process group has for that.
        """
        prefix = f"budgetdb/{next(_rounds)}"
        self._store.set(f"{prefix}/{self.rank}", text)
        texts = [self._await(f"{prefix}/{rank}", rank=rank) for rank in range(self.world_size)]
        self._forget([f"{prefix}/{rank}" for rank in range(self.world_size)], prefix)
        return texts

    def agree(self, hardware: str, ask: Callable[[], Profile]) -> Profile:
        """The answer of the lowest rank of the same `hardware`, which alone calls `ask`.

        All ranks go on, or all raise: what one hardware's rank raised, every rank raises.

        Raises:
            BudgetDBError: as `ask` raised it, on whichever rank.
            WorkerError: a rank that was asking is gone, or raised what is no error of ours.
        """
        fingerprints = self.gather(hashlib.sha256(hardware.encode()).hexdigest())
        leaders = sorted({fingerprints.index(one) for one in fingerprints})
        mine = fingerprints.index(fingerprints[self.rank])
        prefix = f"budgetdb/{next(_rounds)}"
        raised: Exception | None = None
        own: Profile | None = None
        told: dict[str, Any]
        if mine == self.rank:
            with self._beating(f"{prefix}/beat/{self.rank}"):
                try:
                    own = ask()
                    told = {"profile": own.canonical_json()}
                    if own.served is not None:
                        told["served"] = own.served.canonical_json()
                except Exception as error:  # whatever it is, the others must not wait for an answer
                    raised, told = error, {"error": _told(error)}
            self._store.set(f"{prefix}/{self.rank}", json.dumps(told))
        answers = {
            leader: json.loads(self._await(f"{prefix}/{leader}", rank=leader, beat=f"{prefix}/beat/{leader}"))
            for leader in leaders
        }
        keys = [key for leader in leaders for key in (f"{prefix}/{leader}", f"{prefix}/beat/{leader}")]
        self._forget(keys, prefix)
        if raised is not None:
            raise raised
        for leader in leaders:
            if "error" in answers[leader]:
                raise _error_of(answers[leader]["error"], leader)
        if own is not None:
            return own
        profile = Profile.model_validate_json(answers[mine]["profile"])
        if "served" not in answers[mine]:
            return profile
        served = Served.model_validate_json(answers[mine]["served"])
        return profile.as_served(served.model_copy(update={"source": f"rank {mine} ({served.source})"}))

    def least(self, hardware: str, value: int) -> int:
        """The smallest `value` among the ranks of the same `hardware`: one plan of batches must fit them all."""
        texts = [json.loads(text) for text in self.gather(json.dumps([hardware, value]))]
        return min(int(theirs) for kind, theirs in texts if kind == hardware)

    def _await(self, key: str, *, rank: int, beat: str | None = None) -> str:
        """The text under `key`, once it is there; says every 15 s whom it waits for."""
        try:
            return self._polled(key, rank=rank, beat=beat)
        except RuntimeError as error:  # torch's DistError: the rank that keeps the store has ended
            if isinstance(error, BudgetDBError):
                raise
            raise WorkerError(
                f"rank {self.rank} waited for rank {rank}, and the job's key-value store is gone "
                f"({type(error).__name__})",
                next_step="See the log of the job's first rank, and start the job again: finished probes are kept",
            ) from None

    def _polled(self, key: str, *, rank: int, beat: str | None) -> str:
        began = said = seen = time.monotonic()
        last: bytes | None = None
        while not self._store.check([key]):
            now = time.monotonic()
            if beat is None and now - began > self._join_timeout_s:
                raise WorkerError(
                    f"rank {rank} of {self.world_size} did not ask for its batches within {now - began:.0f} s",
                    next_step="Call make_batch_sampler on every rank, or pass across_ranks=False",
                )
            if beat is not None and self._store.check([beat]):
                count = self._store.get(beat)
                if count != last:
                    last, seen = count, now
            if beat is not None and now - seen > _SILENCE_S:
                raise WorkerError(
                    f"rank {rank}, which was finding the budget, fell silent {now - seen:.0f} s ago",
                    next_step="See that rank's log, and start the job again: finished probes are kept",
                )
            if now - said >= _SAY_EVERY_S:
                _log.warning("rank %d waits for rank %d since %.0f s", self.rank, rank, now - began)
                said = now
            time.sleep(_POLL_S)
        return str(self._store.get(key).decode())

    @contextmanager
    def _beating(self, key: str) -> Iterator[None]:
        """A count under `key` that grows while the block runs; only that it changes matters, so no clock is shared."""
        done = threading.Event()

        def beat() -> None:
            while True:
                self._store.add(key, 1)
                if done.wait(_BEAT_S):
                    return

        thread = threading.Thread(target=beat, name="budgetdb-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _forget(self, keys: list[str], prefix: str) -> None:
        """Remove what every rank has read."""
        if self._store.add(f"{prefix}/read", 1) == self.world_size:
            for key in keys:
                self._store.delete_key(key)


def current_job() -> Job | None:
    """The job this process is a rank of; None where `torch.distributed` is not in use, or with one rank."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    from torch.distributed.constants import default_pg_timeout
    from torch.distributed.distributed_c10d import _get_default_store  # the only handle to where the ranks met

    store = _get_default_store()
    return Job(
        store,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        join_timeout_s=default_pg_timeout.total_seconds(),
    )


def _told(error: Exception) -> dict[str, str]:
    text = str(error.args[0]) if isinstance(error, BudgetDBError) else str(error).partition("\n")[0]
    return {"kind": type(error).__name__, "message": text, "next_step": getattr(error, "next_step", None) or ""}


def _error_of(told: dict[str, str], rank: int) -> BudgetDBError:
    """The error as its own rank raised it; of a kind that is not ours, as a `WorkerError`."""
    from budgetdb import errors

    kind = getattr(errors, told["kind"], None)
    if isinstance(kind, type) and issubclass(kind, BudgetDBError):
        return rebuilt_error(kind, told["message"], {"next_step": told["next_step"] or None})
    return WorkerError(
        f"rank {rank} failed to find the budget: {told['kind']}: {told['message']}", next_step="See that rank's log"
    )
