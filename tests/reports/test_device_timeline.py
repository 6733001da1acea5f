import numpy as np
import pytest

from kvprobe.capture.frames import empty_frame, frame_from_dicts
from kvprobe.correlator.timeline import timeline
from kvprobe.model import Frame
from kvprobe.schema import TABLES

DEVICE, OTHER = 7 << 20, 8 << 20
SECOND = 1_000_000_000


def depth(rows: list[tuple[int, int, int, int]], device: int = DEVICE) -> Frame:
    """Rows of second, direction, depth, time."""
    keys = ("start_ns", "end_ns", "device", "direction", "depth", "time_ns")
    return frame_from_dicts(
        TABLES["depth"],
        [
            dict(zip(keys, (at * SECOND, (at + 1) * SECOND, device, way, deep, time), strict=True))
            for at, way, deep, time in rows
        ],
    )


def histogram(rows: list[tuple[int, int, int, int, int, int]]) -> Frame:
    """Rows of second, direction, latency from, latency to, requests, bytes."""
    return frame_from_dicts(
        TABLES["histogram"],
        [
            {
                "start_ns": at * SECOND,
                "end_ns": (at + 1) * SECOND,
                "device": DEVICE,
                "direction": way,
                "size_low_bytes": 4096,
                "latency_low_ns": low,
                "latency_high_ns": high,
                "requests": requests,
                "bytes": size,
            }
            for at, way, low, high, requests, size in rows
        ],
    )


def test_rates_depth_and_quantiles_of_one_second() -> None:
    (point,) = timeline(
        depth([(5, 0, 0, SECOND // 4), (5, 0, 2, SECOND * 3 // 4), (5, 1, 1, SECOND)]),
        histogram(
            [
                (5, 0, 100, 200, 98, 98 * 4096),
                (5, 0, 800, 1600, 2, 2 * 4096),
                (5, 1, 50, 60, 7, 7919),
            ]
        ),
        (DEVICE,),
    )
    assert (point.start_ns, point.end_ns) == (5 * SECOND, 6 * SECOND)
    assert point.depth_mean == pytest.approx(2 * 3 / 4)  # of reads: the write does not count
    assert point.read_bytes_per_s == 100 * 4096
    assert point.write_bytes_per_s == 7919
    assert point.reads == 100
    assert point.read_p50_ns == pytest.approx(100 + 100 * 50 / 98)
    assert point.read_p99_ns == pytest.approx(800 + 800 / 2)


def test_no_quantile_exceeds_the_slowest_read_of_its_time() -> None:
    """Reads of 110 and 830 ns; a slower one a second later, and a slower write, are not theirs."""
    block = {
        "op": np.array([0, 0, 0, 1]),
        "device": np.full(4, DEVICE),
        "queued_ns": np.array([5 * SECOND + 7, 5 * SECOND + 11, 7 * SECOND, 5 * SECOND]),
    }
    block["done_ns"] = block["queued_ns"] + np.array([110, 830, 1590, 1490])
    counted = histogram([(5, 0, 100, 200, 1, 4096), (5, 0, 800, 1600, 1, 4096)])
    quiet = depth([(5, 0, 0, SECOND)])
    (loose,) = timeline(quiet, counted, (DEVICE,))
    (point,) = timeline(quiet, counted, (DEVICE,), block=block)
    assert loose.read_p99_ns is not None and loose.read_p99_ns > 1500
    assert point.read_p99_ns == 830
    assert point.read_p50_ns == loose.read_p50_ns == 200
    fewer = {name: column[[0, 3]] for name, column in block.items()}
    assert timeline(quiet, counted, (DEVICE,), block=fewer) == (loose,)


def test_seconds_stay_apart_and_unknown_stays_unknown() -> None:
    quiet = [(at, 0, 0, SECOND) for at in range(3)]
    points = timeline(depth(quiet), histogram([(1, 0, 10, 20, 3, 300)]), (DEVICE,))
    assert [point.reads for point in points] == [0, 3, 0]
    assert points[0].read_p99_ns is None
    assert [point.depth_mean for point in points] == [0, 0, 0]


def test_nothing_of_this_device() -> None:
    other = depth([(1, 0, 1, SECOND)], OTHER)
    assert timeline(other, empty_frame(TABLES["histogram"]), (DEVICE,)) == ()


@pytest.mark.parametrize("seconds", [1, 59, 60, 61, 211])
def test_many_seconds_are_merged_and_lose_nothing(seconds: int) -> None:
    rng = np.random.default_rng(seconds)
    counts = rng.integers(1, 1000, seconds).tolist()
    rows = [(at, 0, 10, 20, count, count * 4096) for at, count in enumerate(counts)]
    each = depth([(at, 0, 1, SECOND) for at in range(seconds)])
    points = timeline(each, histogram(rows), (DEVICE,))
    assert len(points) == min(60, seconds)
    assert sum(point.reads for point in points) == sum(counts)
    moved = sum(p.read_bytes_per_s * (p.end_ns - p.start_ns) / SECOND for p in points)
    assert moved == pytest.approx(sum(counts) * 4096)
    assert [p.start_ns for p in points[1:]] == [p.end_ns for p in points[:-1]]
