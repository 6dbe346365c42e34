"""The file system a path is on, and whether its locks can be trusted."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

# STORE 5.3. Attribute caches of up to 60 s, locks that may be granted in silence, no write-ahead log.
_NETWORK = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "smbfs", "ceph", "9p", "afs", "glusterfs"}
)


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system.

    Attributes:
        kind: `ext4`, `nfs4`, ...; `unknown` where the system does not say.
    """

    kind: str
    mount_point: str

    @property
    def is_network(self) -> bool:
        """Whether other machines may write to it, as far as its kind tells; FUSE may be anything."""
        return self.kind in _NETWORK or self.kind.startswith("fuse.")


def file_system_of(path: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> FileSystem:
    """The file system that `path`, or the nearest directory above it that exists, is on."""
    target = os.path.realpath(path)
    best = FileSystem("unknown", "")
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # no Linux
        return best
    for line in lines:  # proc(5): id, parent, device, root, mount point, options, optional fields, -, kind, ...
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = _unescaped(fields[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best.mount_point):  # of two on one point the later one is on top
            best = FileSystem(after.split(" ")[0], point)
    return best


def lock_fault(directory: Path) -> str | None:
    """Why POSIX locks don't work in `directory`, or None when they do; tried on a scratch file, never on a database.

    Raises:
        OSError: no file can be made there.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"
    return None


def _unescaped(point: str) -> str:
    """Blanks, tabs, line ends and backslashes are written in octal there."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, character)
    return point
