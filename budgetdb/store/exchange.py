"""Profiles as a JSON file: written for others, and read from others with nothing taken on trust.

A file is a `Document`; `profiles/schema.json` is its JSON Schema. Each profile has the SHA-256 of its own canonical
form, taken over the JSON as it stands in the file, so that a later budgetdb whose profiles have more fields can still
check it; the document has one over these, so that none can be missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from budgetdb.errors import FileFormatError, UsageError
from budgetdb.profiles import Name, Positive, Profile

FORMAT: Literal["budgetdb.profiles"] = "budgetdb.profiles"
# STORE 5.6: 200 MB of JSON take 637 MB to parse. A profile takes some 10 kB, so this is over a thousand of them.
MAX_FILE_BYTES = 16 * 2**20
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class SealedProfile(_Part):
    """One profile.

    Attributes:
        sha256: of the profile's JSON with sorted keys, no spaces and ASCII only.
    """

    sha256: Sha256
    profile: Profile


class Card(_Part):
    """A card the profiles were measured on, as the catalogue lists them."""

    name: Name
    total_bytes: Positive
    compute_capability: Name | None = None


class Document(_Part):
    """A file of profiles.

    Attributes:
        exported_by: the program that wrote it.
        cards: the cards they were measured on; in a contribution only.
        sha256: of the profiles' own checksums, one after another.
    """

    format: Literal["budgetdb.profiles"] = FORMAT
    format_version: Literal[1] = 1
    exported_by: Name
    cards: tuple[Card, ...] = ()
    profiles: tuple[SealedProfile, ...]
    sha256: Sha256


def write_document(profiles: Iterable[Profile], *, exported_by: str, cards: Sequence[Card] = ()) -> str:
    """The text of a file that holds `profiles`."""
    bodies = [profile.model_dump(mode="json") for profile in profiles]
    sums = [_checksum(body) for body in bodies]
    document = {
        "format": FORMAT,
        "format_version": 1,
        "exported_by": exported_by,
        "cards": [card.model_dump(mode="json") for card in cards],
        "profiles": [{"sha256": sum_, "profile": body} for sum_, body in zip(sums, bodies, strict=True)],
        "sha256": _manifest(sums),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def contribution(profiles: Iterable[Profile], *, exported_by: str) -> str:
    """The text of a file to send in for a new card: what was measured on cards, without the texts of errors.

    Raises:
        UsageError: nothing was measured on a card.
    """
    measured = [
        profile.model_copy(
            update={"probes": tuple(probe.model_copy(update={"message": None}) for probe in profile.probes)}
        )
        for profile in profiles
        if profile.provenance.value == "measured" and not profile.key.device_name.startswith("CPU ")
    ]
    if not measured:
        raise UsageError(
            "none of these profiles was measured on a card", next_step="Run `budgetdb calibrate MODEL` on the new card"
        )
    cards = {
        Card(
            name=profile.key.device_name,
            total_bytes=profile.environment.device_total_bytes or profile.key.device_bytes,
            compute_capability=profile.environment.compute_capability,
        ): None
        for profile in measured
    }
    return write_document(measured, exported_by=exported_by, cards=[*cards])


def read_document(path: Path) -> Document:
    """The document in the file at `path`, checked before and after it is parsed.

    Raises:
        FileFormatError: it is too large, no JSON, not of this format, or its checksums don't hold.
        UsageError: there is no regular file, or it may not be read.
    """
    return parse_document(_read_file(path), name=str(path))


def parse_document(content: bytes, *, name: str) -> Document:
    """The document in `content`; `name` is what errors call it.

    Raises:
        FileFormatError: it can't be one.
    """
    if len(content) > MAX_FILE_BYTES:
        raise FileFormatError(
            f"{name} is larger than {MAX_FILE_BYTES >> 20} MiB", next_step="Export fewer profiles into each file"
        )
    raw = _parsed(content, name)
    try:
        document = Document.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise FileFormatError(
            f"{name} is no file of profiles that this budgetdb reads: {where}: {first['msg']}",
            next_step="Export it again, or upgrade budgetdb",
        ) from None
    sums = [_checksum(part["profile"]) for part in raw["profiles"]]
    damaged = [n for n, part in enumerate(document.profiles) if part.sha256 != sums[n]]
    if damaged or document.sha256 != _manifest(sums):
        what = f"profile {damaged[0] + 1} of {len(sums)}" if damaged else "the list of profiles"
        raise FileFormatError(
            f"{name} was changed after it was written: the checksum of {what} does not hold",
            next_step="Get the file again",
        )
    return document


def write_file(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write `text` to `path`, whole or not at all, readable by the user only.

    Raises:
        UsageError: there is something at `path` and `overwrite` is not set, or it can't be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.is_dir() or (not overwrite and os.path.lexists(path)):
            raise UsageError(f"{path} is there already", next_step="Give another name, or --overwrite")
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", next_step="Give another path") from None


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a document: what `profiles/schema.json` holds."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Document.model_json_schema()}


def _read_file(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not keep us waiting
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{path} is no regular file", next_step="Give the file that `budgetdb export` wrote")
            return file.read(MAX_FILE_BYTES + 1)  # never more, whatever its size says
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", next_step="Give another path") from None


def _parsed(content: bytes, name: str) -> Any:
    try:
        return json.loads(
            content.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_refuse, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError and a JSONDecodeError are ValueErrors
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error).partition("\n")[0][:200]
        raise FileFormatError(f"{name} is no JSON: {reason}", next_step="Export it again") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _checksum(body: Any) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _manifest(sums: Iterable[str]) -> str:
    return hashlib.sha256("".join(sums).encode("ascii")).hexdigest()
