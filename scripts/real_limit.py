"""A model in a process of its own, under a memory limit that is real: the end that asks and the end that runs.

A script with jobs ends in `serve(jobs)`; `run_job(script, name, setting)` starts it, in the environment that budgetdb
starts its workers in, and returns what the job found.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from budgetdb.devices.cpu import CpuDevice
from budgetdb.models.load import load_model
from budgetdb.models.spec import ModelSpec
from budgetdb.shapes import Shape
from budgetdb.workloads.forward import ForwardWorkload

ENVIRONMENT: Mapping[str, str] = {
    **CpuDevice.worker_environment,
    # Each thread takes stack and buffers out of the limit, so their number must not depend on the machine.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Fewer page faults, which are most of the time otherwise; no allocation is larger for it.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_TIMEOUT_S = 1200.0
# Of the allocator of torch, and of C++ in the libraries under it.
_OUT_OF_MEMORY = ("can't allocate memory", "std::bad_alloc")


@dataclass(frozen=True)
class Setting:
    """What runs under which limit.

    Attributes:
        config: path of the model's `config.json`.
        attention: attention implementation.
        memory_limit_bytes: for all data of the process, the interpreter's and torch's own included.
    """

    config: str
    attention: str
    memory_limit_bytes: int


Job = Callable[..., dict[str, Any]]


class JobFailedError(Exception):
    """The process of a job ended without an answer."""


def run_job(script: Path, job: str, setting: Setting, **arguments: Any) -> dict[str, Any]:
    """What `job` of `script` finds under `setting`, in a fresh process.

    Raises:
        JobFailedError: it raised, was killed or did not end.
    """
    request = json.dumps({"setting": dataclasses.asdict(setting), **arguments})
    try:
        ended = subprocess.run(
            [sys.executable, str(script), job],
            input=request,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, **ENVIRONMENT},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise JobFailedError(f"{job} did not end within {_TIMEOUT_S:.0f} s") from None
    if ended.returncode != 0:
        words = ended.stderr.strip().splitlines() or ["no word on stderr"]
        raise JobFailedError(f"{job} ended with exit status {ended.returncode}: {words[-1]}")
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def serve(jobs: Mapping[str, Job]) -> None:
    """Run the job named on the command line with the JSON of standard input, and print its answer.

    `processor_s`, the seconds of this process on the processor, is added to it.
    """
    request = json.loads(sys.stdin.read())
    setting = Setting(**request.pop("setting"))
    answer = jobs[sys.argv[1]](setting, **request)
    print(json.dumps({**answer, "processor_s": time.process_time()}))


class LimitedModel:
    """A model whose steps run under a limit, and are counted.

    Attributes:
        model: with random weights, on the CPU.
        workload: the plain forward pass.
        steps: how many batches were tried.
        out_of_memory: how many of them failed for lack of memory.
    """

    def __init__(self, setting: Setting) -> None:
        self._limit_bytes = setting.memory_limit_bytes
        spec = ModelSpec(source=setting.config, attention=setting.attention, weights="random")
        self.model = load_model(spec, torch.device("cpu"))
        self.workload = ForwardWorkload()
        self.steps = self.out_of_memory = 0

    def warm_up(self) -> None:
        """Two small batches, so that the buffers which libraries make once are there."""
        for shape in (Shape(1, 8), Shape(8, 256)):
            self._run(shape)
        # What is there now stays; a collection after each batch would look through all of it.
        gc.collect()
        gc.freeze()

    def cap(self) -> None:
        """Hold this process to the limit from here on."""
        resource.setrlimit(resource.RLIMIT_DATA, (self._limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    def run(self, shape: Shape) -> None:
        """One batch as the loop sees it, twice in a row: the outputs of the first are alive during the second.

        Raises:
            RuntimeError: it did not fit.
        """
        gc.collect()
        self.steps += 1
        try:
            self._run(shape)
        except (RuntimeError, MemoryError) as error:
            self.out_of_memory += is_out_of_memory(error)
            raise

    def fits(self, shape: Shape) -> bool:
        """Whether the batch runs."""
        try:
            self.run(shape)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _run(self, shape: Shape) -> None:
        inputs = self.workload.inputs(self.model, shape, torch.device("cpu"))
        outputs = None
        for _ in range(2):
            outputs = self.workload.step(self.model, inputs)
        del outputs


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how an allocation that failed is reported."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)


def data_bytes() -> int:
    """Private writable memory of this process: what its `RLIMIT_DATA` is held against."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmData:")[2].split()[0]) * 1024
