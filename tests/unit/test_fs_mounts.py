"""The kernel's mount table says which file system a path lies on."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcroll.fs import filesystem_type, is_node_local

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /data rw - xfs /dev/sdb rw
31 30 0:31 / /data rw - nfs4 server:/data rw,vers=4.2
32 31 0:32 / /data/fast rw - lustre mgs@tcp:/fast rw
33 22 0:33 / /with\\040space rw - fuse.sshfs host:/x rw
34 22 0:34 / /tmp rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/x", "ext4"),
        ("/data/run", "nfs4"),
        ("/data/fast/run", "lustre"),
        ("/data/faster", "nfs4"),
        ("/with space/run", "fuse.sshfs"),
        ("/tmp/absent/deeper", "tmpfs"),
    ],
)
def test_deepest_and_latest_mount_counts(tmp_path: Path, path: str, expected: str) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    assert filesystem_type(Path(path), mountinfo=table) == expected


@pytest.mark.parametrize("name", ["nfs", "nfs4", "lustre", "fuse.sshfs", "gpfs", "beegfs", "cifs", "dvs"])
def test_shared_and_unknown_types_are_not_node_local(name: str) -> None:
    assert not is_node_local(name)


@pytest.mark.parametrize("name", ["ext4", "xfs", "tmpfs", "btrfs", "overlay", "zfs"])
def test_local_types_are_node_local(name: str) -> None:
    assert is_node_local(name)
