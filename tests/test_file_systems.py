from pathlib import Path

import pytest

from budgetdb.file_systems import file_system_of, lock_fault

MOUNTS = r"""22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /home rw shared:1 - nfs4 server:/home rw
31 30 0:41 / /home/ann/local\040disk rw - xfs /dev/sdb rw
32 22 0:42 / /scratch rw - lustre mds:/s rw
33 22 0:43 / /mnt rw - fuse.sshfs host: rw
34 22 0:44 / /homework rw - tmpfs tmpfs rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_network"),
    [
        ("/var/lib/profiles.db", "ext4", False),
        ("/home/ann/profiles.db", "nfs4", True),
        ("/home", "nfs4", True),
        ("/home/ann/local disk/profiles.db", "xfs", False),
        ("/homework/profiles.db", "tmpfs", False),
        ("/scratch/none/yet/profiles.db", "lustre", True),
        ("/mnt/x", "fuse.sshfs", True),
    ],
)
def test_the_longest_mount_point_decides(tmp_path: Path, path: str, kind: str, is_network: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    found = file_system_of(Path(path), mounts=mounts)
    assert (found.kind, found.is_network) == (kind, is_network)


def test_where_the_system_does_not_say(tmp_path: Path) -> None:
    found = file_system_of(tmp_path, mounts=tmp_path / "none")
    assert (found.kind, found.is_network) == ("unknown", False)


def test_locks_work_here_and_nothing_is_left(tmp_path: Path) -> None:
    assert lock_fault(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
