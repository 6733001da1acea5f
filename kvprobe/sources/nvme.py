"""NVMe as sysfs shows it: controllers, subsystems, and every path to every namespace.

Under native multipath a namespace has one visible disk, the head ``nvmeSnN``, and a hidden disk
``nvmeScCnN`` for each controller that reaches it; without it each controller has a visible disk.
Names and numbers are given anew when a controller connects again: ``NvmePath.key`` is what stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvprobe.model import NvmePath
from kvprobe.sources.devices import (
    DISKSTATS,
    SYSFS,
    disk_number,
    head_of,
    names_in,
    read_number,
    read_text,
    read_word,
)
from kvprobe.sources.queues import hardware_queues

_CONTROLLER = re.compile(r"nvme(\d{1,5})")
_PLAIN_DISK = re.compile(r"nvme\d+n\d+")
_NOBODY = re.compile(r"[0:\s-]*")
"""An identifier of zeros only: the namespace has none."""


@dataclass(frozen=True)
class NvmeController:
    """One controller: a local device, or one path to a target of NVMe over Fabrics.

    ``queues`` counts the I/O queues and the admin queue. ``queue_size`` is entries of each I/O
    queue, the ``--queue-size`` of ``nvme connect``. ``source`` is the local address of its
    connection, known only while it is live.
    """

    name: str
    transport: str
    address: str | None
    state: str | None
    queues: int | None
    instance: int | None = None
    nqn: str | None = None
    queue_size: int | None = None
    numa_node: int | None = None
    controller_id: int | None = None
    source: str | None = None

    @property
    def io_queues(self) -> int | None:
        """Queues besides the admin queue."""
        return None if self.queues is None else max(self.queues - 1, 0)


@dataclass(frozen=True)
class NvmeSubsystem:
    """What one NQN names; ``controllers`` are the ways to it."""

    name: str
    nqn: str | None
    iopolicy: str | None
    controllers: tuple[str, ...]


def controllers(sysfs: Path = SYSFS) -> tuple[NvmeController, ...]:
    """Every controller, ordered by name; none where the driver is not loaded."""
    folder = sysfs / "class/nvme"
    return tuple(
        controller_of(folder / name) for name in names_in(folder) if _CONTROLLER.fullmatch(name)
    )


def controller_of(folder: Path) -> NvmeController:
    """The controller of a sysfs folder; what cannot be read is None."""
    found = _CONTROLLER.fullmatch(folder.name)
    last_entry = read_number(folder / "sqsize")
    address = parse_address(read_word(folder / "address") or "")
    source = address.pop("src_addr", None)
    return NvmeController(
        name=folder.name,
        transport=read_word(folder / "transport") or "unknown",
        address=",".join(f"{k}={v}" if v else k for k, v in address.items()) or None,
        state=read_word(folder / "state"),
        queues=read_number(folder / "queue_count"),
        instance=int(found[1]) if found else None,
        nqn=read_word(folder / "subsysnqn"),
        queue_size=None if last_entry is None else last_entry + 1,  # sqsize counts from zero
        numa_node=read_number(folder / "numa_node"),
        controller_id=read_number(folder / "cntlid"),
        source=source,
    )


def parse_address(text: str) -> dict[str, str]:
    """The parts of a controller's ``address``, in order.

    ``traddr=10.0.0.7,trsvcid=4420,src_addr=10.0.0.9`` over fabrics. A word without ``=``, as a
    PCI address is, is a key with an empty value.
    """
    parts = [part.strip().partition("=") for part in text.split(",")]
    return {key: value for key, _, value in parts if key}


def short_address(address: str | None) -> str:
    """An address for people: ``10.0.0.7:4420``, ``[fd00::7]:4420`` or a PCI address."""
    parts = parse_address(address or "")
    host, port = parts.get("traddr"), parts.get("trsvcid")
    if not host:
        return address or ""
    if ":" in host and port:
        host = f"[{host}]"
    return f"{host}:{port}" if port else host


def subsystems(sysfs: Path = SYSFS) -> tuple[NvmeSubsystem, ...]:
    """Every subsystem, ordered by name."""
    return tuple(
        NvmeSubsystem(
            name=name,
            nqn=read_word(folder / "subsysnqn"),
            iopolicy=read_word(folder / "iopolicy"),
            controllers=tuple(n for n in names_in(folder) if _CONTROLLER.fullmatch(n)),
        )
        for name in names_in(sysfs / "class/nvme-subsystem")
        for folder in (sysfs / "class/nvme-subsystem" / name,)
    )


def native_multipath(sysfs: Path = SYSFS) -> bool | None:
    """Whether the driver joins paths to one device itself; None where it is not loaded."""
    text = read_text(sysfs / "module/nvme_core/parameters/multipath")
    return None if text is None else text == "Y"


# ---------------------------------------------------------------- paths


def nvme_paths(sysfs: Path = SYSFS, diskstats: Path = DISKSTATS) -> tuple[NvmePath, ...]:
    """Every path to every namespace, ordered by name; heads are not paths."""
    policies = {
        controller: subsystem.iopolicy
        for subsystem in subsystems(sysfs)
        for controller in subsystem.controllers
    }
    found = (_path_of(name, policies, sysfs, diskstats) for name in path_names(sysfs))
    return tuple(path for path in found if path is not None)


def path_names(sysfs: Path = SYSFS) -> Iterator[str]:
    """Names of the disks that commands are sent to: hidden paths, and disks without multipath."""
    for name in names_in(sysfs / "block"):
        if head_of(name) or (_PLAIN_DISK.fullmatch(name) and not is_head(name, sysfs)):
            yield name


def is_head(name: str, sysfs: Path = SYSFS) -> bool:
    """Whether a disk is the one that native multipath shows: it hangs below a subsystem."""
    folder = sysfs / "block" / name / "device"
    return _PLAIN_DISK.fullmatch(name) is not None and (
        (folder / "iopolicy").exists() or not (folder / "transport").exists()
    )


def paths_of_head(name: str, sysfs: Path = SYSFS) -> list[str]:
    """Names of the hidden disks below a multipath disk.

    Since Linux 6.15 the head lists them; before, their names tell.
    """
    listed = names_in(sysfs / "block" / name / "multipath")
    return listed or [path for path in names_in(sysfs / "block") if head_of(path) == name]


def _path_of(
    name: str, policies: dict[str, str | None], sysfs: Path, diskstats: Path
) -> NvmePath | None:
    """One path; None if it has just gone."""
    folder = sysfs / "block" / name
    device = disk_number(name, sysfs, diskstats)
    controller = controller_of(resolved(folder / "device"))
    if device is None or controller.instance is None:
        return None
    head = head_of(name)
    return NvmePath(
        device=device,
        name=name,
        head=head or name,
        controller=controller.instance,
        transport=controller.transport,
        head_device=device if head is None else disk_number(head, sysfs, diskstats),
        nqn=controller.nqn,
        address=controller.address,
        nsid=read_number(folder / "nsid"),
        namespace=_namespace(folder),
        state=controller.state,
        ana_state=read_word(folder / "ana_state"),
        io_queues=controller.io_queues,
        queue_size=_in_flight(folder, controller),
        iopolicy=None if head is None else policies.get(controller.name),
        numa_node=controller.numa_node,
    )


def _in_flight(folder: Path, controller: NvmeController) -> int | None:
    """Commands that fit into each queue; its entries but one where the disk does not tell."""
    fit = [queue.commands for queue in hardware_queues(folder) if queue.commands is not None]
    if fit:
        return min(fit)
    return None if controller.queue_size is None else controller.queue_size - 1


def _namespace(folder: Path) -> str | None:
    """UUID, NGUID or EUI, the first that is there and is not zero."""
    found = (read_word(folder / name) for name in ("uuid", "nguid", "eui"))
    return next((text for text in found if text and not _NOBODY.fullmatch(text)), None)


def resolved(link: Path) -> Path:
    """Where a sysfs link leads; the link itself where it leads nowhere."""
    try:
        return link.resolve(strict=True)
    except (OSError, RuntimeError):
        return link
