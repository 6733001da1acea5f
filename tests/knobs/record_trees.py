"""Record ``tests/data/sysfs/KERNEL-KIND.json`` in a guest of the lab; one boot does three kinds.

    python -m tests.lab.guest 6.12 --nvme 64 --results tests/data/sysfs -- \
        .venv/bin/python -m tests.knobs.record_trees

The disk has one partition with an ext4 file system, which is mounted. ``separate`` as an argument,
in a boot of its own, records two paths by TCP without native multipath.
"""

import os
import struct
import sys
from pathlib import Path

from tests.knobs import copy_sysfs
from tests.lab.case import Backing, Topology
from tests.lab.stand import connect, stand
from tests.lab.target import (
    NQN,
    addresses,
    backing_store,
    load_modules,
    run,
    target,
    wait_for,
)

POINT = Path("/mnt/kvtree")
FIRST_SECTOR = 2048


def partition(disk: str) -> str:
    """Give a disk one partition for all its sectors; returns the partition's name."""
    sectors = int(Path(f"/sys/block/{disk}/size").read_text()) - FIRST_SECTOR
    entry = struct.pack("<BBBBBBBBII", 0, 0, 2, 0, 0x83, 0xFF, 0xFF, 0xFF, FIRST_SECTOR, sectors)
    table = bytes(446) + entry + bytes(48) + b"\x55\xaa"
    with open(f"/dev/{disk}", "r+b") as device:
        device.write(table)
        device.flush()
        os.fsync(device.fileno())
    run("blockdev", "--rereadpt", f"/dev/{disk}")
    name = f"{disk}p1"
    wait_for(Path(f"/dev/{name}").exists, f"/dev/{name}")
    return name


def record(transport: str, out: Path) -> None:
    paths = 1 if transport == "pci" else 2
    topology = Topology(transport, paths, backing=Backing(size_mib=64, memory_backed=True))
    with stand(topology) as built:
        part = partition(built.disk)
        run("mkfs.ext4", "-q", "-F", f"/dev/{part}")
        POINT.mkdir(exist_ok=True)
        run("mount", f"/dev/{part}", str(POINT))
        try:
            copy_sysfs.main(str(out / f"{os.environ['KVPROBE_LAB_KERNEL']}-{transport}.json"))
            print(transport, built.path_disks, flush=True)
        finally:
            run("umount", str(POINT))


def record_separate(out: Path) -> None:
    """Each path has a disk of its own where the driver does not join them."""
    run("modprobe", "nvme_core", "multipath=N")
    topology = Topology("tcp", 2, backing=Backing(size_mib=64, memory_backed=True))
    load_modules("tcp")
    with backing_store(topology.backing) as disk, target(topology, disk):
        for address in addresses(topology):
            connect(topology, address)
        try:
            wait_for(Path("/dev/nvme1n1").exists, "/dev/nvme1n1")
            copy_sysfs.main(str(out / f"{os.environ['KVPROBE_LAB_KERNEL']}-separate.json"))
        finally:
            run("nvme", "disconnect", "-n", NQN)


if __name__ == "__main__":
    results = Path(os.environ["KVPROBE_LAB_RESULTS"])
    if sys.argv[1:] == ["separate"]:
        record_separate(results)
    else:
        for name in ("tcp", "rdma", "pci"):
            record(name, results)
