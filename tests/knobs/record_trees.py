"""Record ``tests/data/sysfs/KERNEL-TRANSPORT.json`` in a guest of the lab; one boot does all three.

    python -m tests.lab.guest 6.12 --nvme 64 --results tests/data/sysfs -- \
        .venv/bin/python -m tests.knobs.record_trees

The disk has one partition with an ext4 file system, which is mounted.
"""

import os
import struct
import sys
from pathlib import Path

from tests.knobs import copy_sysfs
from tests.lab.case import Backing, Topology
from tests.lab.stand import stand
from tests.lab.target import run, wait_for

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


if __name__ == "__main__":
    for name in sys.argv[1:] or ("tcp", "rdma", "pci"):
        record(name, Path(os.environ["KVPROBE_LAB_RESULTS"]))
