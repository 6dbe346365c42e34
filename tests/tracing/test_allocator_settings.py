"""PYTORCH_ALLOC_CONF, by example and against the torch that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from budgetdb.errors import UnknownNameError, UsageError
from budgetdb.tracing.allocator_options import KNOWN_OPTIONS
from budgetdb.tracing.allocator_settings import ENVIRONMENT_VARIABLES, AllocatorSettings

MIB = 2**20

ACCEPTED = [
    "",
    "max_split_size_mb:20",
    "max_split_size_mb:100,",
    "max_split_size_mb: 100 , expandable_segments : True",
    "max_split_size_mb:-1",
    "max_split_size_mb:99999999999999999",
    "max_split_size_mb:30,max_split_size_mb:50",
    "max_split_size_mb:+30",
    "max_non_split_rounding_mb:20",
    "large_segment_size_mb:11",
    "max_split_size_mb:11,large_segment_size_mb:11",
    "expandable_segments:False",
    "garbage_collection_threshold:0.5",
    "garbage_collection_threshold:1e-3",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,>:4]",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],expandable_segments:True",
    "roundup_power2_divisions:[64:8,256:4,1024:4,>:1]",
    "roundup_power2_divisions:[512:2,256:4]",
    "roundup_power2_divisions:[256:0,>:2]",
    "roundup_power2_divisions:[256:1,>:4,512:2]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[131072:2]",
    "roundup_power2_divisions:[1:2]",
    "roundup_power2_divisions:[]",
    "pinned_use_background_threads:True",
    "pinned_max_cached_size_mb:4,pinned_max_round_threshold_mb:4",
]
REFUSED = [
    "max_split_size_mb:19",
    "max_split_size_mb:abc",
    "max_split_size_mb",
    "max_split_size_mb:",
    "max_split_size_mb::100",
    "max_split_size_mb;100",
    "max_split_size_mb:99999999999999999999999",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "max_non_split_rounding_mb:19",
    "large_segment_size_mb:10",
    "expandable_segments:true",
    "expandable_segments:1",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:x",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[300:1]",
    "roundup_power2_divisions:[0:1]",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[256:1",
    "roundup_power2_divisions:[256 1]",
    "pinned_use_background_threads:yes",
    ",",
]
# What the installed torch lets pass, because it reads a number's beginning and skips what it takes for a separator, or
# because its build without CUDA does not know CUDA's options.
REFUSED_HERE_ONLY = [
    "max_split_size_mb:100abc",
    "max_split_size_mb:100,,expandable_segments:True",
    "garbage_collection_threshold:0.5abc",
    "no_such_option:1",
    "backend:other",
    "per_process_memory_fraction:2",
    "per_process_memory_fraction:nan",
]


def test_the_defaults() -> None:
    settings = AllocatorSettings.from_text("")
    assert settings == AllocatorSettings() == AllocatorSettings.from_environment({})
    assert (settings.expandable_segments, settings.max_split_size_bytes) == (False, None)
    assert settings.large_segment_bytes == settings.max_non_split_rounding_bytes == 20 * MIB
    assert settings.roundup_power2_divisions == (0,) * 16
    assert (settings.garbage_collection_threshold, settings.per_process_memory_fraction) == (0, 1)


def test_every_option_that_matters() -> None:
    assert AllocatorSettings.from_text(
        "expandable_segments:True,large_segment_size_mb:30,max_split_size_mb:64,max_non_split_rounding_mb:40,"
        "roundup_power2_divisions:8,garbage_collection_threshold:0.8,per_process_memory_fraction:0.9,"
        "backend:cudaMallocAsync"
    ) == AllocatorSettings(
        expandable_segments=True,
        large_segment_bytes=30 * MIB,
        max_split_size_bytes=64 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        roundup_power2_divisions=(8,) * 16,
        garbage_collection_threshold=0.8,
        per_process_memory_fraction=0.9,
        backend="cudaMallocAsync",
    )


def test_rounding_of_oversize_blocks_is_a_large_segment_unless_set() -> None:
    assert AllocatorSettings.from_text("large_segment_size_mb:30").max_non_split_rounding_bytes == 30 * MIB


def test_a_list_of_divisions() -> None:
    settings = AllocatorSettings.from_text("roundup_power2_divisions:[256:1,512:2,>:4]")
    assert settings.roundup_power2_divisions == (1,) * 9 + (2,) + (4,) * 6  # 1 to 256 MiB, 512 MiB, 1 GiB and above
    assert settings.rounded_bytes(300 * MIB + 1) == 300 * MIB + 512
    assert settings.rounded_bytes(513 * MIB) == 768 * MIB  # 512, 768, 1024
    assert settings.rounded_bytes(1025 * MIB) == 1280 * MIB  # 1024, 1280, ...
    assert settings.rounded_bytes(2**36 + 1) == 2**36 + 2**34  # above the last interval: as there


def test_divisions_of_what_lies_below_1_mib() -> None:
    settings = AllocatorSettings.from_text("roundup_power2_divisions:4")
    assert settings.rounded_bytes(2048) == 2048  # up to 512 * 4 in steps of 512
    assert settings.rounded_bytes(1025) == 1536
    assert settings.rounded_bytes(2049) == 2560  # 2048, 2560, 3072, ...
    assert settings.rounded_bytes(5000) == 5120  # 4096, 5120, ...
    assert settings.rounded_bytes(2**20) == 2**20


@pytest.mark.parametrize("text", [*REFUSED, *REFUSED_HERE_ONLY])
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allocator"):
        AllocatorSettings.from_text(text)


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_is_accepted(text: str) -> None:
    AllocatorSettings.from_text(text)


def test_the_message_names_the_option_and_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"max_split_size_mb can't be '19'\. It is at least 20"):
        AllocatorSettings.from_text("expandable_segments:True,max_split_size_mb:19")
    with pytest.raises(UnknownNameError, match="Did you mean 'expandable_segments'"):
        AllocatorSettings.from_text("expandable_segment:True")


def test_options_without_effect_on_device_memory_change_nothing() -> None:
    flags = [name for name in KNOWN_OPTIONS if name.startswith(("pinned_use", "pinned_free", "release", "throw"))]
    text = ",".join([*(f"{name}:True" for name in flags), "pinned_num_register_threads:8"])
    assert len(flags) == 7
    assert AllocatorSettings.from_text(text) == AllocatorSettings()


def test_the_message_names_the_variable() -> None:
    with pytest.raises(UsageError, match="PYTORCH_ALLOC_CONF is 'a:1': unknown allocator option 'a'"):
        AllocatorSettings.from_environment({"PYTORCH_ALLOC_CONF": "a:1"})


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert AllocatorSettings.from_environment().expandable_segments


def in_torch(code: str, environment: dict[str, str] | None = None) -> object:
    """What a fresh process with torch prints as JSON; `divisions()` there is the table torch has in force."""
    start = """
        import ctypes, json, os, torch
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
        divisions_of = getattr(library, name)
        divisions_of.argtypes, divisions_of.restype = [ctypes.c_size_t], ctypes.c_size_t
        divisions = lambda: [divisions_of(1 << (20 + interval)) for interval in range(16)]
        set_settings = torch._C._accelerator_setAllocatorSettings
    """
    clean = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code)],
        env=clean | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if "AttributeError" in done.stderr:
        pytest.skip("this torch does not export its settings")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def settings_of(*names: str) -> dict[str, str]:
    """Each variable set to divisions of its own: 2, 4 or 8."""
    return {
        name: f"roundup_power2_divisions:{2**power}"
        for power, name in enumerate(ENVIRONMENT_VARIABLES, 1)
        if name in names
    }


def test_torch_reads_the_same_texts_to_the_same_divisions() -> None:
    texts = [*ACCEPTED, *REFUSED]
    # torch keeps the size of large segments from one text to the next.
    code = f"""
        answers = [divisions()]
        for text in {texts!r}:
            set_settings("large_segment_size_mb:20")
            try:
                set_settings(text)
                answers.append(divisions())
            except (ValueError, IndexError, RuntimeError):
                answers.append(None)
        print(json.dumps(answers))
    """
    environment = settings_of(*ENVIRONMENT_VARIABLES[1:])
    settings = [AllocatorSettings.from_environment(environment), *map(AllocatorSettings.from_text, ACCEPTED)]
    ours = [list(one.roundup_power2_divisions) for one in settings]
    assert in_torch(code, environment) == [*ours, *[None] * len(REFUSED)]


def test_torch_reads_the_same_variable() -> None:
    environment = settings_of(*ENVIRONMENT_VARIABLES)
    ours = AllocatorSettings.from_environment(environment).roundup_power2_divisions
    assert in_torch("print(json.dumps(divisions()))", environment) == list(ours)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_first_variable_that_is_set_is_read(index: int) -> None:
    settings = AllocatorSettings.from_environment(settings_of(*ENVIRONMENT_VARIABLES[index:]))
    assert settings.roundup_power2_divisions == (2 ** (index + 1),) * 16


def test_a_variable_set_to_nothing_hides_the_others() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert AllocatorSettings.from_environment(environment) == AllocatorSettings()
