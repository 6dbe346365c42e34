"""What a device is, as profile keys and listings need it; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

# Devices of one kind differ by a few MiB (ECC, firmware): keys hold their memory rounded down to this.
BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class DeviceInfo:
    """What a device is, independent of what runs on it.

    Attributes:
        name: as the driver reports it.
        total_bytes: all its memory.
        runtime: CUDA or HIP version, or None.
        driver: version of the driver, or None.
        compute_capability: `9.0` and the like, or None.
        allocator: settings of the allocator that the environment gives, empty when it is the default.
    """

    name: str
    total_bytes: int
    runtime: str | None = None
    driver: str | None = None
    compute_capability: str | None = None
    allocator: str = ""

    @property
    def key_bytes(self) -> int:
        """The memory as profile keys hold it."""
        return max(self.total_bytes // BUCKET_BYTES, 1) * BUCKET_BYTES
