"""A lab case: one TOML file that says what is built, done, disturbed and expected."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tests.lab.kernels import SOURCES

CASES = Path(__file__).parent / "cases"
TRANSPORTS = ("tcp", "rdma", "pci", "none")
TOOLS = ("fio", "kv")
ACTIONS = ("disconnect", "connect", "rescan", "netem")
T = TypeVar("T")


@dataclass(frozen=True)
class Backing:
    """The store behind the target, or the disk itself where there is no transport.

    Attributes:
        kind: ``null_blk`` or ``brd``.
        size_mib: size; memory is used for what is written.
        memory_backed: null_blk keeps what is written.
        completion_ms: null_blk completes a command after this time.
        hw_queue_depth: commands that null_blk takes at once, per queue.
    """

    kind: str = "null_blk"
    size_mib: int = 512
    memory_backed: bool = False
    completion_ms: float = 0
    hw_queue_depth: int = 128


@dataclass(frozen=True)
class Topology:
    """What commands go through.

    Attributes:
        transport: one of TRANSPORTS; ``none`` is the backing itself.
        paths: controllers of the one namespace, at 127.0.0.1, 127.0.0.2 ..
        io_queues, queue_size: as `nvme connect` takes them.
        inline_data_bytes: writes up to this size travel inside their command.
        max_sectors_kb: set on head and paths; 0 leaves the kernel's choice.
        iopolicy: of the subsystem; empty leaves the kernel's choice.
        file_system: ``ext4`` or empty for the raw disk.
    """

    transport: str = "none"
    paths: int = 1
    io_queues: int = 2
    queue_size: int = 32
    inline_data_bytes: int = 16384
    max_sectors_kb: int = 0
    iopolicy: str = ""
    file_system: str = ""
    backing: Backing = Backing()


@dataclass(frozen=True)
class Fault:
    """Something done to a path.

    Attributes:
        action: one of ACTIONS.
        at_s: seconds after the workload began; negative: before recording began.
        path: which one, from 1.
        delay_ms, loss_percent: for ``netem``, on what the target sends on this path.
    """

    action: str
    at_s: float = -1
    path: int = 1
    delay_ms: float = 0
    loss_percent: float = 0


@dataclass(frozen=True)
class Work:
    """One run of a workload; runs follow each other.

    Attributes:
        tool: ``fio`` on the disk, or ``kv``: kvprobe's own generator of KV traffic, which needs a
            file system and stores what it will read before recording begins.
        jobs: options of its command line; of fio for each job, one job after the other. It does
            direct I/O.
    """

    tool: str
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expected:
    """What the capture must say. Counts are of the path's disks (of the disk, without paths).

    Attributes:
        commands: read, write, flush -> NVMe commands.
        requests: the same for block requests with data; left out: as many as commands.
        bytes: read, write -> bytes.
        findings, no_findings: slugs that the report must have, must not have.
        subjects: slug -> a text that the finding's subject holds.
        device_ms: least time of a read between driver and completion; the mean is what fio
            measured, within ``tolerance``.
        fabric: kinds of fabric events that must be there.
    """

    commands: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    no_findings: tuple[str, ...] = ()
    subjects: Mapping[str, str] = field(default_factory=dict)
    device_ms: float | None = None
    tolerance: float = 0.05
    fabric: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One case; ``core`` ones run in `make test`, all run in `make lab`."""

    name: str
    summary: str
    kernels: tuple[str, ...]
    core: bool
    topology: Topology
    faults: tuple[Fault, ...]
    work: tuple[Work, ...]
    expected: Expected


def names() -> list[str]:
    """Every case, sorted."""
    return sorted(path.stem for path in CASES.glob("*.toml"))


def load(name: str) -> Case:
    """Read one case.

    Raises:
        ValueError: a word that no case has, or a value that is none of the known ones.
    """
    table = tomllib.loads((CASES / f"{name}.toml").read_text())
    topology = table.pop("topology")
    backing = _made(Backing, topology.pop("backing", {}), name)
    case = Case(
        name=name,
        summary=table.pop("summary"),
        kernels=tuple(table.pop("kernels", SOURCES)),
        core=table.pop("core", False),
        topology=_made(Topology, {**topology, "backing": backing}, name),
        faults=tuple(_made(Fault, fault, name) for fault in table.pop("fault", [])),
        work=tuple(_made(Work, work, name) for work in table.pop("work")),
        expected=_made(Expected, table.pop("expected"), name),
    )
    _one_of(case.topology.transport, TRANSPORTS, name)
    for work in case.work:
        _one_of(work.tool, TOOLS, name)
    for fault in case.faults:
        _one_of(fault.action, ACTIONS, name)
    if table or not set(case.kernels) <= set(SOURCES):
        raise ValueError(f"{name}: {sorted(table)} or one of {case.kernels} is unknown")
    return case


def _made(kind: type[T], table: dict[str, Any], name: str) -> T:
    known = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    if not set(table) <= known:
        raise ValueError(f"{name}: {kind.__name__} has no {sorted(set(table) - known)}")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})


def _one_of(value: str, known: tuple[str, ...], name: str) -> None:
    if value not in known:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")
