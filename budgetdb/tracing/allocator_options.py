"""The text of PYTORCH_ALLOC_CONF, taken apart into options, and their values checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

from budgetdb.errors import UnknownNameError, UsageError

# AcceleratorAllocatorConfig::getKeys and CUDAAllocatorConfig::getKeys of torch 2.13: those that matter for device
# memory, and those that don't, by the kind of their value.
_READ = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "roundup_power2_divisions",
)
_PASSED_OVER_FLAGS = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
)
_PASSED_OVER_NUMBERS = (
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
)
KNOWN_OPTIONS = (*_READ, *_PASSED_OVER_FLAGS, *_PASSED_OVER_NUMBERS)

_OPTION = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")
_NUMBER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)

# size_t: `stoull` reads a negative number as its complement, and a larger one not at all.
_SIZE_T = 2**64
_MAX_MEGABYTES = (_SIZE_T - 1) // 2**20


@dataclass(frozen=True, slots=True)
class Options:
    """Values by option, as texts; each method reads one and refuses what torch refuses."""

    values: Mapping[str, str]

    def flag(self, name: str, *, default: bool) -> bool:
        """`True` or `False`, spelled so."""
        text = self.values.get(name)
        if text is None:
            return default
        if text not in {"True", "False"}:
            raise _refused(name, text, "write True or False")
        return text == "True"

    def number(self, name: str, default: int) -> int:
        """A whole number."""
        text = self.values.get(name)
        return default if text is None else _whole(name, text)

    @overload
    def megabytes(self, name: str, default: int, *, least: int = 0, above: int = -1) -> int: ...
    @overload
    def megabytes(self, name: str, default: None, *, least: int = 0, above: int = -1) -> int | None: ...
    def megabytes(self, name: str, default: int | None, *, least: int = 0, above: int = -1) -> int | None:
        """A whole number of MiB, at least `least` and above `above`; at most what a size can hold."""
        text = self.values.get(name)
        if text is None:
            return default
        number = _whole(name, text)
        if number < least or number <= above:
            raise _refused(name, text, f"it is at least {max(least, above + 1)}")
        return min(number, _MAX_MEGABYTES)

    def share(self, name: str, default: float, *, open_interval: bool = False) -> float:
        """A number from 0 to 1, without the two when `open_interval`."""
        text = self.values.get(name)
        if text is None:
            return default
        if not _DECIMAL.fullmatch(text):
            raise _refused(name, text, "write a number")
        share = float(text)
        if not (0 < share < 1 if open_interval else 0 <= share <= 1):
            raise _refused(name, text, f"it lies between 0 and 1{', both excluded' if open_interval else ''}")
        return share

    def choice(self, name: str, *choices: str) -> str:
        """One of `choices`, the first of which is the default."""
        text = self.values.get(name, choices[0])
        if text not in choices:
            raise _refused(name, text, f"write {' or '.join(choices)}")
        return text

    def divisions(self, name: str, intervals: int) -> tuple[int, ...]:
        """Divisions for each of `intervals` powers of two, from one number or `[256:1,512:2,>:4]`.

        In a list, sizes in MiB name single intervals. Those below the first size take its value, those above the last
        take the value of `>`; any other that is not named is not rounded (`parseRoundUpPower2Divisions`).
        """
        text = self.values.get(name)
        if text is None:
            return (0,) * intervals
        if not text.startswith("["):
            return (_power_of_two(name, text),) * intervals
        divisions = [0] * intervals
        last, first = 0, True
        for entry in filter(None, text[1:-1].split(",")):
            size, separator, value_text = entry.partition(":")
            if not separator:
                raise _refused(name, entry, "write size:divisions")
            value = _power_of_two(name, value_text, or_zero=True)
            if size == ">":
                divisions[last + 1 :] = [value] * (intervals - last - 1)
                continue
            last = min(_power_of_two(name, size).bit_length() - 1, intervals - 1)
            if first:
                divisions[:last] = [value] * last
            first = False
            divisions[last] = value
        return tuple(divisions)


def options_of(conf: str) -> Options:
    """The options of a text; blanks mean nothing, an option given twice has its last value.

    Raises:
        UsageError: an unknown option, one without a value, or anything that is not `option:value,option:value`.
    """
    text = "".join(conf.split())
    values: dict[str, str] = {}
    position = 0
    while position < len(text):
        found = _OPTION.match(text, position)
        if found is None:
            rest = text[position:].split(",")[0]
            raise UsageError(f"can't read {rest!r} in the allocator's settings", next_step="Write option:value,...")
        name, value = found.groups()
        if name not in KNOWN_OPTIONS:
            raise UnknownNameError("allocator option", name, KNOWN_OPTIONS)
        values[name] = value
        position = found.end()
    options = Options(values)
    for name in _PASSED_OVER_FLAGS:
        options.flag(name, default=False)
    for name in _PASSED_OVER_NUMBERS:
        options.number(name, 0)
    return options


def _whole(name: str, text: str) -> int:
    if not _NUMBER.fullmatch(text) or abs(int(text)) >= _SIZE_T:
        raise _refused(name, text, "write a whole number")
    return int(text) % _SIZE_T


def _power_of_two(name: str, text: str, *, or_zero: bool = False) -> int:
    number = _whole(name, text)
    if number & (number - 1) or (number == 0 and not or_zero):
        raise _refused(name, text, "write a power of two")
    return number


def _refused(name: str, text: str, hint: str) -> UsageError:
    return UsageError(f"allocator option {name} can't be {text!r}", next_step=hint[0].upper() + hint[1:])
