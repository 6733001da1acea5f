"""The target side in a guest: a backing store, and the kernel's NVMe target on two addresses."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.lab.case import Backing, Topology

NQN = "nqn.2014-08.org.nvmexpress:kvprobe-lab"
SERVICE = "4420"
CONFIG = Path("/sys/kernel/config")
BLOCK = Path("/sys/block")
RDMA_DEVICE = "kvlab"


def run(*command: str) -> str:
    """Run a program.

    Raises:
        RuntimeError: it failed; with its last line.
    """
    ran = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False
    )
    if ran.returncode:
        said = (ran.stderr or ran.stdout).strip().splitlines() or [f"status {ran.returncode}"]
        raise RuntimeError(f"{' '.join(command)}: {said[-1]}")
    return ran.stdout


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """Wait until something is so.

    Raises:
        RuntimeError: it never was.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


def load_modules(transport: str) -> None:
    """Everything that a transport needs, host and target."""
    names = {
        "tcp": ("nvme-tcp", "nvmet", "nvmet-tcp"),
        # rxe asks for its checksum by a name that only the generic module answers to
        "rdma": ("crc32_generic", "dummy", "rdma_rxe", "nvme-rdma", "nvmet", "nvmet-rdma"),
        "pci": ("nvme",),
        "none": (),
    }[transport]
    for name in names:
        run("modprobe", name)


def addresses(topology: Topology) -> list[str]:
    """One for each path."""
    network = {"tcp": "127.0.0", "rdma": "192.0.2"}.get(topology.transport)
    return [f"{network}.{n}" for n in range(1, topology.paths + 1)] if network else []


@contextmanager
def backing_store(backing: Backing) -> Iterator[str]:
    """A disk; yields its name."""
    if backing.kind == "brd":
        run("modprobe", "brd", "rd_nr=1", f"rd_size={backing.size_mib << 10}")
        try:
            yield "ram0"
        finally:
            run("modprobe", "-r", "brd")
        return
    run("modprobe", "null_blk", "nr_devices=0")
    folder = CONFIG / "nullb" / "kvlab"
    before = set(BLOCK.iterdir())
    folder.mkdir()
    try:
        settings = {
            "size": backing.size_mib,
            "memory_backed": int(backing.memory_backed),
            "irqmode": 2 if backing.completion_ms else 1,
            "completion_nsec": round(backing.completion_ms * 1e6),
            "hw_queue_depth": backing.hw_queue_depth,
            "submit_queues": 2,
            "max_sectors": 2560,
            "power": 1,
        }
        for name, value in settings.items():
            (folder / name).write_text(str(value))
        yield next(path.name for path in set(BLOCK.iterdir()) - before)
    finally:
        folder.rmdir()


@contextmanager
def target(topology: Topology, disk: str) -> Iterator[None]:
    """A subsystem with that disk as namespace 1, at every address."""
    root = CONFIG / "nvmet"
    with ExitStack() as undo:
        if topology.transport == "rdma":
            undo.enter_context(_rdma_device(addresses(topology)))
        subsystem = _folder(undo, root / "subsystems" / NQN)
        (subsystem / "attr_allow_any_host").write_text("1")
        namespace = _folder(undo, subsystem / "namespaces" / "1")
        (namespace / "device_path").write_text(f"/dev/{disk}")
        (namespace / "enable").write_text("1")
        undo.callback((namespace / "enable").write_text, "0")
        for number, address in enumerate(addresses(topology), 1):
            port = _folder(undo, root / "ports" / str(number))
            (port / "addr_trtype").write_text(topology.transport)
            (port / "addr_adrfam").write_text("ipv4")
            (port / "addr_traddr").write_text(address)
            (port / "addr_trsvcid").write_text(SERVICE)
            if topology.transport == "tcp":
                (port / "param_inline_data_size").write_text(str(topology.inline_data_bytes))
            link = port / "subsystems" / NQN
            link.symlink_to(subsystem)
            undo.callback(link.unlink)
        yield


def _folder(undo: ExitStack, path: Path) -> Path:
    path.mkdir()
    undo.callback(path.rmdir)
    return path


@contextmanager
def _rdma_device(own: list[str]) -> Iterator[None]:
    """RDMA in software over a network device that leads nowhere."""
    run("ip", "link", "add", RDMA_DEVICE, "type", "dummy")
    try:
        for address in own:
            run("ip", "address", "add", f"{address}/24", "dev", RDMA_DEVICE)
        run("ip", "link", "set", RDMA_DEVICE, "up")
        run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", RDMA_DEVICE)
        try:
            yield
        finally:
            run("rdma", "link", "delete", "rxe0")
    finally:
        run("ip", "link", "delete", RDMA_DEVICE)
