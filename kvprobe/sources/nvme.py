"""NVMe controllers as sysfs shows them: transport, address, state, queues, multipath."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvprobe.sources.devices import SYSFS, read_number, read_text


@dataclass(frozen=True)
class NvmeController:
    """One controller: a local device, or one path to a target of NVMe over Fabrics.

    ``queues`` counts the I/O queues and the admin queue.
    """

    name: str
    transport: str
    address: str | None
    state: str | None
    queues: int | None


def controllers(sysfs: Path = SYSFS) -> tuple[NvmeController, ...]:
    """Every controller, ordered by name; none where the driver is not loaded."""
    return tuple(
        NvmeController(
            name=folder.name,
            transport=read_text(folder / "transport") or "unknown",
            address=read_text(folder / "address") or None,
            state=read_text(folder / "state"),
            queues=read_number(folder / "queue_count"),
        )
        for folder in sorted((sysfs / "class/nvme").glob("nvme*"))
    )


def native_multipath(sysfs: Path = SYSFS) -> bool | None:
    """Whether the driver joins paths to one device itself; None where it is not loaded."""
    text = read_text(sysfs / "module/nvme_core/parameters/multipath")
    return None if text is None else text == "Y"
