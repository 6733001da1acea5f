"""The host side in a guest: controllers connected, disks set, faults brought about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.case import Fault, Topology
from tests.lab.target import (
    BLOCK,
    NQN,
    SERVICE,
    addresses,
    backing_store,
    load_modules,
    run,
    target,
    wait_for,
)

CONTROLLERS = Path("/sys/class/nvme")
MOUNT = Path("/mnt/kvlab")
HOST_ID = "5d8b5c1e-0d0a-4a51-9d0e-6b76b4c0a001"
HOST_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"

STAT = {"read": (0, 2), "write": (4, 6), "flush": (15, None)}
"""Kind -> fields of /sys/block/NAME/stat: completed requests, sectors of 512 bytes."""


@dataclass(frozen=True)
class Stand:
    """What a case works on.

    Attributes:
        topology: as asked for.
        backing: name of the backing disk, "" for PCI.
    """

    topology: Topology
    backing: str

    @property
    def disk(self) -> str:
        """The disk that is used: the head of a multipath namespace, or the only one."""
        if self.topology.transport == "none":
            return self.backing
        return next(path.name for path in BLOCK.iterdir() if _is_head(path.name))

    @property
    def path_disks(self) -> dict[str, str]:
        """Disk whose requests become commands -> address of its controller."""
        if self.topology.transport == "none":
            return {self.backing: ""}
        found = {}
        for path in sorted(BLOCK.iterdir()):
            hidden = re.fullmatch(r"nvme\d+c(\d+)n\d+", path.name)
            plain = re.fullmatch(r"nvme(\d+)n\d+", path.name)
            if hidden:
                found[path.name] = _address(f"nvme{hidden[1]}")
            elif plain and self.topology.transport == "pci":
                found[path.name] = _address(f"nvme{plain[1]}")
        return found

    def counts(self) -> dict[str, dict[str, int]]:
        """By disk of ``path_disks`` and kind: ``requests``, ``bytes`` that the kernel counted."""
        counted: dict[str, dict[str, int]] = {}
        for disk in self.path_disks:
            stat = [int(word) for word in (BLOCK / disk / "stat").read_text().split()]
            counted[disk] = {}
            for kind, (requests, sectors) in STAT.items():
                counted[disk][kind] = stat[requests]
                if sectors is not None:
                    counted[disk][f"{kind}_bytes"] = 512 * stat[sectors]
        return counted

    def store(self) -> dict[str, int]:
        """The backing disk: its dev_t, and how many requests it has completed."""
        if not self.backing:
            return {"device": 0, "requests": 0}
        major, minor = (BLOCK / self.backing / "dev").read_text().split(":")
        stat = [int(word) for word in (BLOCK / self.backing / "stat").read_text().split()]
        completed = sum(stat[requests] for requests, _ in STAT.values())
        return {"device": int(major) << 20 | int(minor), "requests": completed}

    def apply(self, fault: Fault) -> None:
        """Bring a fault about.

        Raises:
            RuntimeError: the tool for it failed.
        """
        address = addresses(self.topology)[fault.path - 1]
        if fault.action == "netem":
            _netem(address, fault)
        elif fault.action == "connect":
            connect(self.topology, address)
        else:
            controller = _controller(address)
            if fault.action == "disconnect":
                run("nvme", "disconnect", "-d", controller)
            else:
                run("nvme", "ns-rescan", f"/dev/{controller}")


@contextmanager
def stand(topology: Topology, patient: bool = True) -> Iterator[Stand]:
    """Build it, and take it down whatever happens.

    Args:
        topology: what to build.
        patient: TCP on loopback waits for seconds before it sends anything again.

    Raises:
        RuntimeError: a step failed.
    """
    load_modules(topology.transport)
    with ExitStack() as undo:
        disk = ""
        if topology.transport == "pci":
            undo.callback(run, "modprobe", "-r", "nvme")  # else its disk is there in other cases
        else:
            disk = undo.enter_context(backing_store(topology.backing))
        if topology.transport in ("tcp", "rdma"):
            _set_patience(patient)
            undo.enter_context(target(topology, disk))
            undo.callback(run, "nvme", "disconnect", "-n", NQN)
            for address in addresses(topology):
                connect(topology, address)
        built = Stand(topology, disk)
        wait_for(lambda: _is_whole(built), "the disks of all paths")
        _set_up(built)
        if topology.transport == "tcp":
            undo.callback(_no_netem)
        if topology.file_system:
            undo.enter_context(_mounted(built.disk, topology.file_system))
        yield built


def _set_patience(patient: bool) -> None:
    """Emulated processors pause for longer than TCP usually waits: it would take that for loss."""
    run("sysctl", "-q", f"net.ipv4.tcp_early_retrans={0 if patient else 3}")
    rto_min = ["rto_min", "5s"] if patient else []
    run("ip", "route", "replace", "local", "127.0.0.0/8", "dev", "lo", "table", "local",
        "proto", "kernel", "scope", "host", "src", "127.0.0.1", *rto_min)  # fmt: skip


def connect(topology: Topology, address: str) -> None:
    """Connect one path.

    Raises:
        RuntimeError: the target does not answer.
    """
    run(
        "nvme", "connect", "-t", topology.transport, "-a", address, "-s", SERVICE, "-n", NQN,
        "--hostnqn", HOST_NQN, "--hostid", HOST_ID, "--nr-io-queues", str(topology.io_queues),
        "--queue-size", str(topology.queue_size), "--keep-alive-tmo", "60",
        "--reconnect-delay", "1",
    )  # fmt: skip


def _is_whole(built: Stand) -> bool:
    if len(built.path_disks) < built.topology.paths:
        return False
    if built.topology.transport == "none":
        return _size(built.disk) > 0
    return any(_is_head(path.name) and _size(path.name) for path in BLOCK.iterdir())


def _is_head(disk: str) -> bool:
    return re.fullmatch(r"nvme\d+n\d+", disk) is not None


def _size(disk: str) -> int:
    return int((BLOCK / disk / "size").read_text())


def _set_up(built: Stand) -> None:
    topology = built.topology
    if topology.max_sectors_kb:
        for disk in {built.disk, *built.path_disks}:
            (BLOCK / disk / "queue/max_sectors_kb").write_text(str(topology.max_sectors_kb))
    if topology.iopolicy:
        for policy in Path("/sys/class/nvme-subsystem").glob("*/iopolicy"):
            policy.write_text(topology.iopolicy)


@contextmanager
def _mounted(disk: str, file_system: str) -> Iterator[None]:
    run(f"mkfs.{file_system}", "-q", "-F", "-E", "lazy_itable_init=0,nodiscard", f"/dev/{disk}")
    MOUNT.mkdir(exist_ok=True)
    run("mount", "-o", "noatime", f"/dev/{disk}", str(MOUNT))
    try:
        yield
    finally:
        run("umount", str(MOUNT))


def _address(controller: str) -> str:
    text = (CONTROLLERS / controller / "address").read_text().strip()
    found = re.search(r"traddr=([^,]*)", text)
    return found[1] if found else text


def _controller(address: str) -> str:
    for path in sorted(CONTROLLERS.iterdir()):
        if _address(path.name) == address:
            return path.name
    raise RuntimeError(f"no controller at {address}")


def _netem(address: str, fault: Fault) -> None:
    """Disturb what the target sends from that address; everything else goes as before."""
    for module in ("sch_prio", "sch_netem", "cls_u32"):
        run("modprobe", module)
    _no_netem()
    run("tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "prio",
        "priomap", *(["0"] * 16))  # fmt: skip
    settings = []
    if fault.delay_ms:
        settings += ["delay", f"{fault.delay_ms}ms"]
    if fault.loss_percent:
        settings += ["loss", f"{fault.loss_percent}%"]
    run("tc", "qdisc", "add", "dev", "lo", "parent", "1:3", "handle", "30:", "netem",
        "limit", "100000", *settings)  # fmt: skip
    run("tc", "filter", "add", "dev", "lo", "parent", "1:0", "protocol", "ip", "u32",
        "match", "ip", "src", f"{address}/32", "match", "ip", "sport", SERVICE, "0xffff",
        "flowid", "1:3")  # fmt: skip


def _no_netem() -> None:
    if "prio" in run("tc", "qdisc", "show", "dev", "lo"):
        run("tc", "qdisc", "delete", "dev", "lo", "root")
