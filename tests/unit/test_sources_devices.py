"""Devices from sysfs: made-up trees for what this machine lacks, a loop device for what it has."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvprobe.errors import KvprobeError
from kvprobe.sources import devices, nvme
from kvprobe.sources.devices import storage_of

MOUNTINFO = """\
21 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw
22 21 259:2 /var/x /srv/bind rw - ext4 /dev/nvme0n1p2 rw
23 21 253:0 / /kv\\040cache rw master:1 - xfs /dev/mapper/kv rw
24 21 0:50 / /mem rw - tmpfs tmpfs rw
25 21 0:51 / /nfs rw - nfs4 server:/export rw
26 21 0:52 / /over rw - overlay overlay rw,lowerdir=/a,upperdir=/up,workdir=/w
not a line
27 21 x:y / /bad rw - ext4 /dev/sdz rw
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """nvme0n1 (native multipath: two controllers) with a partition, dm-0 on it, sda, vdb, loop3."""
    root = tmp_path / "sys"
    places = {
        "nvme0n1": ("virtual/nvme-subsystem/nvme-subsys0/nvme0n1", "259:1"),
        "nvme1n1": ("pci0000:00/0000:00:04.0/nvme/nvme1/nvme1n1", "259:5"),
        "dm-0": ("virtual/block/dm-0", "253:0"),
        "sda": ("pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block/sda", "8:0"),
        "vdb": ("pci0000:00/0000:00:05.0/virtio2/block/vdb", "254:16"),
        "loop3": ("virtual/block/loop3", "7:3"),
        "loop4": ("virtual/block/loop4", "7:4"),
    }
    (root / "block").mkdir(parents=True)
    (root / "dev/block").mkdir(parents=True)
    for name, (place, number) in places.items():
        folder = root / "devices" / place
        write(folder / "dev", number)
        write(folder / "size", "0" if name == "loop4" else "2097143")
        write(folder / "queue/rotational", "1" if name == "sda" else "0")
        write(folder / "queue/scheduler", "none [mq-deadline] kyber")
        write(folder / "queue/nr_requests", "1023")
        write(folder / "queue/read_ahead_kb", "131")
        write(folder / "queue/max_sectors_kb", "1280")
        write(folder / "queue/logical_block_size", "4096")
        (root / "block" / name).symlink_to(folder)
        (root / "dev/block" / number).symlink_to(folder)
    head = root / "devices/virtual/nvme-subsystem/nvme-subsys0"
    for index in (0, 1):
        write(head / f"nvme{index}/transport", "tcp")
    (head / "nvme0n1/device").symlink_to(head)
    write(head / "nvme0n1/nvme0n1p2/dev", "259:2")
    write(head / "nvme0n1/nvme0n1p2/partition", "2")
    (root / "dev/block/259:2").symlink_to(head / "nvme0n1/nvme0n1p2")
    controller = root / "devices/pci0000:00/0000:00:04.0/nvme/nvme1"
    write(controller / "transport", "pcie")
    (controller / "nvme1n1/device").symlink_to(controller)
    (root / "devices/virtual/block/dm-0/slaves").mkdir()
    (root / "devices/virtual/block/dm-0/slaves/nvme0n1").symlink_to(head / "nvme0n1")
    write(root / "devices/virtual/block/loop3/loop/backing_file", "/srv/image")
    return root


@pytest.fixture
def mountinfo(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTINFO)
    return path


def test_facts(sysfs: Path, mountinfo: Path) -> None:
    found = {facts.name: facts for facts in devices.devices(sysfs, mountinfo)}
    assert {name: facts.transport for name, facts in found.items()} == {
        "dm-0": "dm",
        "loop3": "loop",
        "nvme0n1": "nvme tcp",
        "nvme1n1": "nvme pcie",
        "sda": "sata",
        "vdb": "virtio",
    }
    head = found["nvme0n1"]
    assert head.device == 259 << 20 | 1
    assert head.size_bytes == 2097143 * 512
    assert (head.rotational, found["sda"].rotational) == (False, True)
    assert head.scheduler == "mq-deadline"
    assert (head.nr_requests, head.logical_block_bytes) == (1023, 4096)
    assert (head.read_ahead_bytes, head.max_request_bytes) == (131 << 10, 1280 << 10)
    assert head.mounts == ("/", "/srv/bind")
    assert found["dm-0"].mounts == ("/kv cache",)


def test_unreadable_facts_are_unknown(sysfs: Path, mountinfo: Path) -> None:
    queue = sysfs / "block/vdb/queue"
    (queue / "nr_requests").write_text("many\n")
    (queue / "rotational").unlink()
    (queue / "scheduler").write_text("none\n")
    facts = {f.name: f for f in devices.devices(sysfs, mountinfo)}["vdb"]
    assert facts.nr_requests is None and facts.rotational is None and facts.scheduler == "none"
    assert devices.facts_of("gone", sysfs, ()) is None


def storage(
    path: str, number: str, sysfs: Path, mountinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> devices.PathStorage:
    """``storage_of`` for a path that exists only in the made-up mount table."""
    major, minor = map(int, number.split(":"))
    status = os.stat_result((0o40755, 1, os.makedev(major, minor), 2, 0, 0, 0, 0, 0, 0))
    real_stat, real_path = os.stat, os.path.realpath
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "realpath", lambda p, **kw: p if p == path else real_path(p, **kw))
        patch.setattr(os, "stat", lambda p, **kw: status if p == path else real_stat(p, **kw))
        return storage_of(path, sysfs, mountinfo)


def test_paths(sysfs: Path, mountinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = storage("/srv/data", "259:2", sysfs, mountinfo, monkeypatch)
    assert root.device is not None
    assert (root.device.name, root.partition, root.mount_point) == ("nvme0n1", "nvme0n1p2", "/")
    assert root.fs_device == 259 << 20 | 2
    bind = storage("/srv/bind/a", "259:2", sysfs, mountinfo, monkeypatch)
    assert bind.mount_point == "/srv/bind"
    stacked = storage("/kv cache/a", "253:0", sysfs, mountinfo, monkeypatch)
    assert stacked.device is not None
    assert (stacked.device.name, stacked.below, stacked.filesystem) == ("dm-0", ("nvme0n1",), "xfs")


@pytest.mark.parametrize(
    ("path", "number", "word"),
    [("/mem/a", "0:50", "memory"), ("/nfs/a", "0:51", "network"), ("/over/a", "0:52", "/up")],
)
def test_paths_without_a_device_say_why(
    path: str,
    number: str,
    word: str,
    sysfs: Path,
    mountinfo: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = storage(path, number, sysfs, mountinfo, monkeypatch)
    assert found.device is None
    assert word in found.why


def test_nvme_controllers(tmp_path: Path) -> None:
    for name, transport, state, queues in (
        ("nvme1", "tcp", "connecting", "9"),
        ("nvme0", "", "", ""),
    ):
        folder = tmp_path / "class/nvme" / name
        write(folder / "transport", transport)
        write(folder / "state", state)
        write(folder / "queue_count", queues)
    write(tmp_path / "class/nvme/nvme1/address", "traddr=10.0.0.7,trsvcid=4420")
    first, second = nvme.controllers(tmp_path)
    assert (first.name, first.transport, first.address, first.queues) == (
        "nvme0",
        "unknown",
        None,
        None,
    )
    assert (second.transport, second.state, second.queues) == ("tcp", "connecting", 9)
    assert second.address == "traddr=10.0.0.7,trsvcid=4420"
    assert nvme.native_multipath(tmp_path) is None
    write(tmp_path / "module/nvme_core/parameters/multipath", "Y")
    assert nvme.native_multipath(tmp_path) is True


def test_a_path_that_does_not_exist() -> None:
    with pytest.raises(KvprobeError, match="/nonexistent/kv: No such file"):
        storage_of("/nonexistent/kv")


def test_as_lsblk_sees_them() -> None:
    if not shutil.which("lsblk"):
        pytest.skip("lsblk is not installed")
    columns = "NAME,MAJ:MIN,SIZE,ROTA,SCHED,RQ-SIZE,RA,LOG-SEC"
    text = subprocess.run(
        ["lsblk", "--json", "--bytes", "--nodeps", "--output", columns],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    ours = {facts.name: facts for facts in devices.devices()}
    checked = 0
    for row in json.loads(text)["blockdevices"]:
        facts = ours.get(row["name"])
        if facts is None:  # bound, or unbound, in between
            continue
        assert f"{facts.device >> 20}:{facts.device & 0xFFFFF}" == row["maj:min"]
        assert facts.size_bytes == row["size"]
        assert facts.rotational == row["rota"]
        assert facts.nr_requests == row["rq-size"]
        assert facts.read_ahead_bytes == row["ra"] << 10
        assert facts.logical_block_bytes == row["log-sec"]
        checked += 1
    assert checked


@pytest.mark.parametrize("node", ["/dev/null", "/dev/tty"])
def test_a_node_of_no_disk(node: str) -> None:
    with pytest.raises(KvprobeError, match=f"{node} is a device, but no disk"):
        storage_of(node)


@pytest.mark.root
def test_a_file_system_on_a_loop_device(tmp_path: Path) -> None:
    image, point = tmp_path / "image", tmp_path / "mount"
    image.write_bytes(bytes(16 << 20))
    point.mkdir()
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, point], check=True)
    try:
        (point / "file").write_text("x")
        found = storage_of(str(point / "file"))
        assert found.device is not None
        node = storage_of(f"/dev/{found.device.name}")
        listed = subprocess.run(
            ["losetup", "--noheadings", "--output", "NAME", "--associated", image],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    finally:
        subprocess.run(["umount", point], check=True)
    assert found.device is not None
    assert f"/dev/{found.device.name}" == listed
    assert found.device.transport == "loop"
    assert found.device.size_bytes == 16 << 20
    assert found.device.mounts == (str(point),)
    assert found.backing_file == str(image)
    assert (found.filesystem, found.mount_point) == ("ext4", str(point))
    assert found.fs_device == found.device.device
    assert (node.device, node.backing_file) == (found.device, str(image))
    assert (node.filesystem, node.mount_point, node.why) == ("", "", "")
