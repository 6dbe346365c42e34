"""The profiles that come with the package: files beside `devices.json`, found after the user's own."""

from __future__ import annotations

import logging
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from budgetdb.errors import FileFormatError
from budgetdb.profiles import Profile
from budgetdb.store.exchange import parse_document
from budgetdb.store.imports import as_imported

_log = logging.getLogger(__name__)

# The catalogue of cards and the schema of the files themselves.
_OTHERS = ("devices.json", "schema.json")


def shipped_profiles(model_hash: str) -> list[Profile]:
    """The shipped profiles of one model, of provenance `imported` unless they are predictions."""
    return [profile for profile in _all_shipped() if profile.key.model_hash == model_hash]


def profiles_in(directory: Traversable) -> list[Profile]:
    """The profiles of every file in `directory`; a file that can't be read is reported and left out."""
    found = []
    for file in sorted(directory.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".json") or file.name in _OTHERS:
            continue
        try:
            document = parse_document(file.read_bytes(), name=file.name)
        except (FileFormatError, OSError) as error:
            _log.warning("shipped profiles are left out: %s", error)
            continue
        found += [as_imported(sealed.profile) for sealed in document.profiles]
    return found


@cache
def _all_shipped() -> list[Profile]:
    """Read once: what is installed does not change under a running process."""
    return profiles_in(resources.files("budgetdb.shipped_profiles"))
