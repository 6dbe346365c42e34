"""Where a model is: a configuration file, a directory, the hub's cache, or the hub itself."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from budgetdb.errors import ModelError, ModelNotFoundError

HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Source:
    """A place that a model can be read from.

    Attributes:
        location: what transformers' `from_pretrained` takes.
        kind: `config` for a lone configuration file.
        has_weights: whether every weight file is on this machine.
        is_local: whether the configuration is, so that no hub need be asked.
    """

    location: str
    kind: Literal["config", "directory", "hub"]
    has_weights: bool
    is_local: bool


def find_source(source: str) -> Source:
    """The place that `source` names: first a path, then the hub's cache, then the hub.

    Raises:
        ModelNotFoundError: nothing is there, or it is not here and the hub can't be reached.
        ModelError: it is there, and its author has to grant access first.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return Source(str(path), "config", has_weights=False, is_local=True)
    if path.is_dir():
        return _directory(path)
    if _looks_like_path(source):
        raise ModelNotFoundError(f"no model directory or config.json at {source!r}", next_step=_nearby(path))
    if _cached(source, CONFIG_NAME) is not None:
        has_weights = _has_weights(lambda name: _cached(source, name))
        return Source(source, "hub", has_weights=has_weights, is_local=True)
    ask_hub(source, absent=f"{source!r} is no local path and not in the hub's cache", near=_nearby(path))
    return Source(source, "hub", has_weights=False, is_local=False)


def _directory(path: Path) -> Source:
    if not (path / CONFIG_NAME).is_file():
        raise ModelNotFoundError(
            f"the directory {str(path)!r} holds no {CONFIG_NAME}",
            next_step="Give the directory that `save_pretrained` wrote",
        )
    has_weights = _has_weights(lambda name: path / name if (path / name).is_file() else None)
    return Source(str(path), "directory", has_weights=has_weights, is_local=True)


def _has_weights(find: Callable[[str], Path | None]) -> bool:
    """Whether one weight file is there, or an index and every shard it lists."""
    if find(SAFE_WEIGHTS_NAME) or find(WEIGHTS_NAME):
        return True
    for index_name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        index = find(index_name)
        if index is not None:
            return all(find(shard) for shard in _shards(index))
    return False


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"the list of weight files {str(index)!r} can't be read ({type(error).__name__})",
            next_step="Download the model again",
        ) from None


def _cached(repository: str, name: str) -> Path | None:
    try:
        found = try_to_load_from_cache(repository, name)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def ask_hub(name: str, *, absent: str, near: str = "Give a local directory that holds them") -> None:
    """One question with one short deadline: transformers would try for most of a minute where there is no network.

    Raises:
        ModelNotFoundError: the hub has no such model, or can't be reached; the message begins with `absent`.
        ModelError: its authors grant access one by one.
    """
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME), timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        raise ModelError(f"the model {name!r} is gated", next_step="Ask its authors for access and log in") from None
    except Exception as error:  # what a client says without a network depends on its version, proxy and resolver
        raise ModelNotFoundError(f"{absent}, and {_hub_answer(error)}", next_step=near) from None


def _hub_answer(error: Exception) -> str:
    if isinstance(error, HFValidationError):
        return "no hub has such a name"
    if isinstance(error, HfHubHTTPError):
        return f"the hub answers {error.response.status_code}"
    if constants.is_offline_mode():
        return "the hub is switched off by HF_HUB_OFFLINE"
    return "no model hub could be reached"


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "~", os.sep)) or source.count("/") > 1 or source.endswith(".json") or "\\" in source


def _nearby(path: Path) -> str:
    """What to try next: an entry of the same directory with a close spelling, else the forms that are taken."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir() or entry.suffix == ".json"]
    except OSError:
        names = []
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(repr(str(path.parent / name)) for name in near)}?"
    return f"Give a local directory with a {CONFIG_NAME}, the path of a {CONFIG_NAME}, or a name from the hub"
