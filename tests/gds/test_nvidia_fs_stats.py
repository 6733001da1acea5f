"""Counters of the driver nvidia-fs, in the forms in which its versions print them."""

from pathlib import Path

import pytest

from kvprobe.sources.host import HostSampler

HEAD = """GDS Version: 1.13.0.11
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.24.2)
Mellanox PeerDirect Supported: False
IO stats: {on}, peer IO stats: Disabled
Logging level: info

Active Shadow-Buffer (MiB): 128
Active Process: 1
"""
NEWEST = HEAD.format(on="Enabled") + (
    "Batches\t\t\t\t: n=17 ok=17 err=0 Avg-Submit-Latency(usec)=3\n"
    "Reads\t\t\t\t: n=7919 ok=7918 err=1 readMiB=126703 io_state_err=2\n"
    "Reads\t\t\t\t: Bandwidth(MiB/s)=11983 Avg-Latency(usec)=1331\n"
    "Sparse Reads\t\t        : n=3 io=4 holes=5 pages=6 \n"
    "Writes\t\t\t\t: n=101 ok=101 err=0 writeMiB=1616 io_state_err=0 pg-cache=0 pg-cache-fail=0\n"
    "Writes\t\t\t\t: Bandwidth(MiB/s)=0 Avg-Latency(usec)=0\n"
    "Mmap\t\t\t\t: n=11 ok=11 err=0 munmap=3\n"
    "Error\t\t\t\t: cpu-gpu-pages=0 sg-ext=0 dma-map=0 dma-ref=0\n"
    "Ops\t\t\t\t: Read=5 Write=6 BatchIO=0\n"
)
OFF = HEAD.format(on="Disabled") + (
    "Reads\t\t\t\t: err=0 io_state_err=0\n"
    "Sparse Reads\t\t        : n=0 io=0 holes=0 pages=0 \n"
    "Writes\t\t\t\t: err=3 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0\n"
    "Ops\t\t\t\t: Read=0 Write=0 BatchIO=0\n"
)
OLD = (
    "NVFS statistics(ver: 1.0)\nActive Shadow-Buffer (MB): 0\n"
    "Reads\t\t\t\t: n=13 ok=13 err=0 readmb=52 io_state_err=0\n"
    "Writes\t\t\t\t: n=0 ok=0 err=0 writemb=0 io_state_err=0\n"
)
DAMAGED = "NVFS\nReads\nReads : n= readMiB=much\nWrites : ====\nReads : err=x\n\0\n"


def sampled(procfs: Path, text: str | None) -> dict[str, float]:
    if text is not None:
        place = procfs / "driver/nvidia-fs/stats"
        place.parent.mkdir(parents=True)
        place.write_text(text)
    rows = HostSampler(procfs).sample()
    found = {row["metric"]: row["value"] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (
            NEWEST,
            {
                "gds_driver": 1,
                "gds_reads": 7919,
                "gds_read_bytes": 126703 << 20,
                "gds_read_errors": 3,
                "gds_writes": 101,
                "gds_write_bytes": 1616 << 20,
                "gds_write_errors": 0,
            },
        ),
        (OFF, {"gds_driver": 1, "gds_read_errors": 0, "gds_write_errors": 3}),
        (
            OLD,
            {
                "gds_driver": 1,
                "gds_reads": 13,
                "gds_read_bytes": 52 << 20,
                "gds_read_errors": 0,
                "gds_writes": 0,
                "gds_write_bytes": 0,
                "gds_write_errors": 0,
            },
        ),
        (DAMAGED, {}),
        ("", {}),
        (None, {}),
    ],
    ids=["newest", "statistics off", "old", "damaged", "empty", "not loaded"],
)
def test_each_version(tmp_path: Path, text: str | None, values: dict[str, float]) -> None:
    assert sampled(tmp_path, text) == values
