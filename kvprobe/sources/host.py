"""Counters and gauges of the host, sampled about once a second into ``host`` rows.

Plain text of procfs, a dozen small reads a sample. A file that is missing, or a line that does not
parse, makes that metric absent from the sample; it never ends a capture. Counters are cumulative
as the kernel keeps them: whoever reads two samples subtracts, and a device that vanished simply
has no further rows.

Per CPU (subject ``cpuN``) and for all (empty subject), from /proc/stat: ``cpu_busy_ns``,
``cpu_softirq_ns``, ``cpu_iowait_ns``. Per device, from /proc/diskstats: ``reads_completed``,
``read_bytes``, ``writes_completed``, ``write_bytes``, ``io_time_ns`` and the gauge ``in_flight``.
For the machine: ``psi_io_some_ns`` and ``psi_io_full_ns`` (time in which some or all tasks waited
for I/O), ``page_faults_major``, ``page_in_bytes``, ``file_refaults`` (pages that came back after
they had been evicted), and the gauges ``memory_free_bytes``, ``memory_available_bytes``,
``page_cache_bytes``, ``dirty_bytes``.

Of GPUDirect Storage, from /proc/driver/nvidia-fs/stats, where the module nvidia-fs is loaded: the
gauge ``gds_driver`` (always 1); ``gds_reads``, ``gds_read_bytes``, ``gds_writes`` and
``gds_write_bytes``, where its statistics are switched on; ``gds_read_errors``,
``gds_write_errors``. The driver tells bytes in MiB.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

PROCFS = Path("/proc")

Metric: TypeAlias = tuple[str, str, float]
"""Name, subject, value."""

_SECTOR_BYTES = 512  # the unit of /proc/diskstats whatever the device's block size
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")

_MEMORY = {
    "MemFree": "memory_free_bytes",
    "MemAvailable": "memory_available_bytes",
    "Cached": "page_cache_bytes",
    "Dirty": "dirty_bytes",
}
_PAGING = {
    "pgmajfault": ("page_faults_major", 1),
    "pgpgin": ("page_in_bytes", 1024),
    "workingset_refault_file": ("file_refaults", 1),
}


class HostSampler:
    """Makes ``host`` rows.

    Args:
        procfs: where procfs is.
        interval_ns: least time between two samples that ``due`` asks for.
    """

    def __init__(self, procfs: Path = PROCFS, interval_ns: int = 1_000_000_000) -> None:
        self._procfs = procfs
        self._interval_ns = interval_ns
        self._next_ns = 0

    def due(self, now_ns: int) -> bool:
        """Whether the interval has passed since the last sample (CLOCK_MONOTONIC)."""
        return now_ns >= self._next_ns

    def sample(self) -> list[dict[str, Any]]:
        """One sample: rows with the columns of ``schema.HOST``, all with the same time."""
        now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._next_ns = now_ns + self._interval_ns
        return [
            {"time_ns": now_ns, "metric": metric, "subject": subject, "value": float(value)}
            for file, parse in _READERS
            for line in self._lines(file)
            for metric, subject, value in _parsed(parse, line)
        ]

    def _lines(self, file: str) -> list[str]:
        try:
            return (self._procfs / file).read_text(errors="replace").splitlines()
        except OSError:
            return []


def _parsed(parse: Callable[[list[str]], Iterator[Metric]], line: str) -> list[Metric]:
    try:
        return list(parse(line.split()))
    except (ValueError, IndexError):
        return []


def _cpu(fields: list[str]) -> Iterator[Metric]:
    # cpu user nice system idle iowait irq softirq steal ..
    if not fields[0].startswith("cpu"):
        return
    subject = fields[0] if fields[0] != "cpu" else ""
    user, nice, system, _idle, iowait, irq, softirq = map(int, fields[1:8])
    steal = int(fields[8]) if len(fields) > 8 else 0
    yield "cpu_busy_ns", subject, (user + nice + system + irq + softirq + steal) * _TICK_NS
    yield "cpu_softirq_ns", subject, softirq * _TICK_NS
    yield "cpu_iowait_ns", subject, iowait * _TICK_NS


def _pressure(fields: list[str]) -> Iterator[Metric]:
    # some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS
    name, _, total = fields[-1].partition("=")
    if fields[0] in ("some", "full") and name == "total":
        yield f"psi_io_{fields[0]}_ns", "", int(total) * 1000


def _memory(fields: list[str]) -> Iterator[Metric]:
    # MemFree:  123 kB
    name = _MEMORY.get(fields[0].rstrip(":"))
    if name:
        yield name, "", int(fields[1]) * 1024


def _paging(fields: list[str]) -> Iterator[Metric]:
    found = _PAGING.get(fields[0])
    if found:
        yield found[0], "", int(fields[1]) * found[1]


def _disk(fields: list[str]) -> Iterator[Metric]:
    # major minor name, then: reads merged sectors ms writes merged sectors ms in-flight ms ..
    name = fields[2]
    reads, _, read_sectors, _, writes, _, write_sectors, _, in_flight, busy_ms = map(
        int, fields[3:13]
    )
    if reads + writes + in_flight == 0:
        return  # never used: unbound loop devices and the like
    yield "reads_completed", name, reads
    yield "read_bytes", name, read_sectors * _SECTOR_BYTES
    yield "writes_completed", name, writes
    yield "write_bytes", name, write_sectors * _SECTOR_BYTES
    yield "in_flight", name, in_flight
    yield "io_time_ns", name, busy_ms * 1_000_000


def _nvidia_fs(fields: list[str]) -> Iterator[Metric]:
    # NVFS statistics(ver: 4.0)
    # Reads : n=7 ok=7 err=0 readMiB=112 io_state_err=0, without n, ok and MiB where they are off
    if fields[0] == "NVFS" and fields[1].startswith("statistics"):
        yield "gds_driver", "", 1
    if fields[0] not in ("Reads", "Writes"):
        return
    direction = fields[0].lower().removesuffix("s")
    values = dict(word.lower().split("=", 1) for word in fields[1:] if "=" in word)
    if "n" in values:
        yield f"gds_{direction}s", "", int(values["n"])
    for unit in ("mib", "mb"):  # older drivers say MB and mean MiB
        if direction + unit in values:
            yield f"gds_{direction}_bytes", "", int(values[direction + unit]) << 20
    if "err" in values:
        errors = int(values["err"]) + int(values.get("io_state_err", 0))
        yield f"gds_{direction}_errors", "", errors


_READERS: tuple[tuple[str, Callable[[list[str]], Iterator[Metric]]], ...] = (
    ("stat", _cpu),
    ("pressure/io", _pressure),
    ("meminfo", _memory),
    ("vmstat", _paging),
    ("diskstats", _disk),
    ("driver/nvidia-fs/stats", _nvidia_fs),
)
