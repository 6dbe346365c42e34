"""What the environment sets: the `BUDGETDB_*` variables."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from budgetdb.errors import UsageError


def _whole_size(value: object) -> object:
    # pydantic reads as much of a text as makes a size: `1,5GiB` would be one byte, `2GiB,4GiB` two gibibytes.
    if isinstance(value, str) and not re.fullmatch(r"\s*\d{1,19}(\.\d{1,19})?\s*[a-zA-Z]*\s*", value, re.ASCII):
        raise PydanticCustomError("size", "write it like 512MiB, 2GiB or 1073741824")
    return value


Bytes = Annotated[ByteSize, BeforeValidator(_whole_size), Field(ge=0, le=2**62)]
PositiveBytes = Annotated[ByteSize, BeforeValidator(_whole_size), Field(gt=0, le=2**62)]


class Settings(BaseSettings):
    """Settings read from the environment each time they are asked for; arguments and options go before them.

    Sizes take a unit: `512MiB`, `2GB`, or plain bytes.
    """

    model_config = SettingsConfigDict(env_prefix="BUDGETDB_", frozen=True, extra="ignore", allow_inf_nan=False)

    url: str | None = Field(None, description="database: a SQLAlchemy URL or the path of a SQLite file")
    headroom: Bytes | None = Field(None, description="bytes kept free on the device")
    memory_limit: PositiveBytes | None = Field(None, description="bytes this process may use on the device")
    match: Literal["exact", "compatible", "any"] = Field(
        "compatible", description="how alike a stored profile must be: `exact`, `compatible` or `any`"
    )
    max_step_s: Annotated[float, Field(gt=0)] | None = Field(None, description="longest step worth trying, in seconds")
    probe_timeout_s: Annotated[float, Field(gt=0)] = Field(900.0, description="seconds one probe may take")
    plugins: str | None = Field(None, description="`none`, or names of plugin distributions to load, comma-separated")


def read_settings() -> Settings:
    """The settings in force now.

    Raises:
        UsageError: a variable has a value that can't be used; the message names it.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = f"BUDGETDB_{'.'.join(map(str, first['loc'])).upper()}"
        value = str(first["input"])[:60]
        raise UsageError(f"{name} is {value!r}: {first['msg']}", next_step=f"Correct or unset {name}") from None


def parse_bytes(text: str | int) -> int:
    """Bytes from a number or a text with a unit.

    >>> parse_bytes("2GiB"), parse_bytes(1024)
    (2147483648, 1024)

    Raises:
        UsageError: not a size.
    """
    try:
        return int(TypeAdapter(PositiveBytes).validate_python(text))
    except ValidationError:
        raise UsageError(
            f"{text!r} is not a size in bytes", next_step="Write it like 512MiB, 2GiB or 1073741824"
        ) from None


def format_bytes(count: int | None) -> str:
    """A size for people, in binary units.

    >>> format_bytes(2147483648), format_bytes(None)
    ('2.00 GiB', '-')
    """
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return (
                f"{int(size)} B" if unit == "B" else f"{size:.{0 if size >= 100 else 1 if size >= 10 else 2}f} {unit}"
            )
        size /= 1024
    return f"{size:.2f} TiB"
