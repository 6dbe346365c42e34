"""What the environment sets: the `BUDGETDB_*` variables."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from budgetdb.errors import UsageError

PositiveBytes = Annotated[ByteSize, Field(gt=0)]


class Settings(BaseSettings):
    """Settings read from the environment each time they are asked for; arguments and options go before them.

    Sizes take a unit: `512MiB`, `2GB`, or plain bytes.
    """

    model_config = SettingsConfigDict(env_prefix="BUDGETDB_", frozen=True, extra="ignore", allow_inf_nan=False)

    url: str | None = Field(None, description="database: a SQLAlchemy URL or the path of a SQLite file")
    headroom: Annotated[ByteSize, Field(ge=0)] | None = Field(None, description="bytes kept free on the device")
    memory_limit: PositiveBytes | None = Field(None, description="bytes this process may use on the device")
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
        first = error.errors(include_url=False, include_input=False)[0]
        name = f"BUDGETDB_{'.'.join(map(str, first['loc'])).upper()}"
        raise UsageError(f"{name}: {first['msg']}", next_step=f"Correct or unset {name}") from None


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
