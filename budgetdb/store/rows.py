"""Between a row and the record in it: JSON text with its checksum, read back only when the checksum holds.

One flipped bit changes a number and nothing else notices: SQLite's own checks called 261 of 261 such files sound.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from budgetdb.profiles import Environment, Probe, Profile, ProfileKey

Record = TypeVar("Record", bound=BaseModel)


class DamagedRowError(Exception):
    """A row is not what was written, or not what this budgetdb can read; the message says which."""


def profile_row(profile: Profile) -> dict[str, Any]:
    """The columns of `profiles` for one profile."""
    return {
        "key_digest": profile.key.digest,
        **profile.key.model_dump(),
        "model_name": profile.model_name,
        "provenance": profile.provenance.value,
        "created_at": profile.created_at.astimezone(UTC),
        **_sealed(profile.canonical_json()),
    }


def probe_row(key: ProfileKey, environment: Environment, probe: Probe) -> dict[str, Any]:
    """The columns of `probes` for one probe of a calibration that has not ended."""
    return {
        "key_digest": key.digest,
        "environment_digest": environment.digest,
        "finished": False,
        "created_at": datetime.now(UTC),
        **_sealed(probe.canonical_json()),
    }


def read_profile(row: Any) -> Profile:
    """The profile in a row of `key_digest`, `payload` and `sha256`.

    Raises:
        DamagedRowError: the checksum does not hold, or the profile is of another key or version.
    """
    profile = _opened(Profile, row)
    if profile.key.digest != row.key_digest:
        raise DamagedRowError("it is stored under another key's digest")
    return profile


def read_probe(row: Any) -> Probe:
    """The probe in a row of `payload` and `sha256`.

    Raises:
        DamagedRowError: the checksum does not hold, or the probe is of another version.
    """
    return _opened(Probe, row)


def _sealed(payload: str) -> dict[str, str]:
    return {"payload": payload, "sha256": _sha256(payload)}


def _opened(record: type[Record], row: Any) -> Record:
    if not isinstance(row.payload, str) or _sha256(row.payload) != row.sha256:  # damage can change a value's type
        raise DamagedRowError("its checksum does not hold")
    try:
        return record.model_validate_json(row.payload)
    except ValidationError as error:
        field = ".".join(map(str, error.errors(include_url=False, include_input=False)[0]["loc"]))
        raise DamagedRowError(f"another version of budgetdb wrote it (field {field or 'payload'})") from None


def _sha256(payload: str) -> str:
    return hashlib.sha256(payload.encode()).hexdigest()
