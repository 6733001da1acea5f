"""What ``kvprobe sweep`` says it has measured, with a disk and without one."""

from dataclasses import replace

import pytest

from kvprobe.commands.sweep import table
from kvprobe.model import DeviceFacts, ServiceCell
from kvprobe.sources.devices import storage_of
from kvprobe.workload.sweep import Plan, Sweep

SIZE = 1 << 16


@pytest.mark.parametrize("disk", [False, True])
def test_the_first_line_names_the_storage_once(disk: bool) -> None:
    storage = replace(
        storage_of("/"),
        device=DeviceFacts(device=1, name="nvme7n1", transport="nvme pcie") if disk else None,
        filesystem="ext4" if disk else "tmpfs",
        why="" if disk else "tmpfs keeps its files in memory",
    )
    plan = Plan(sizes=(SIZE,), depths=(1,))
    cells = (ServiceCell(SIZE, 1, True, 1e9, 0.9e9, 1.1e9, 2, "sweep"),)
    sweep = Sweep("2026-01-01", storage, plan, 2, "fio-3.33", "io_uring", cells)
    where = "nvme7n1 (nvme pcie), ext4" if disk else "tmpfs (tmpfs keeps its files in memory)"
    first = table(sweep).splitlines()[0]
    assert first == f"direct reads from {where}, 2 repeats, fio-3.33, io_uring beyond depth 1"
