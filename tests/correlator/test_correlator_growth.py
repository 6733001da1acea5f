"""The join takes time in proportion to what was recorded: twice the rows, about twice the time."""

import time
from typing import Any

import pytest

from kvprobe.capture.tables import FixedTables
from kvprobe.correlator import correlate
from kvprobe.schema import LookupKind
from tests.correlator.simulate import Node


def capture(requests: int, **shape: Any) -> FixedTables:
    """Five operations a file and three block requests an operation."""
    lookups = shape.pop("lookups", True)
    node = Node(3, 16, requests=requests, pieces=5, **shape).run()
    if not lookups:
        node.tables["lookups"] = [r for r in node.tables["lookups"] if r["kind"] == LookupKind.OPEN]
    node.tables["block"] = [row for row in node.tables["block"] for _ in range(3)]
    return node.capture()


def seconds(tables: FixedTables) -> float:
    """Best of two, of this thread's own time: other processes do not count."""
    best = float("inf")
    for _ in range(2):
        begin = time.thread_time()
        correlate(tables)
        best = min(best, time.thread_time() - begin)
    return best


@pytest.mark.parametrize(
    "shape", [{}, {"lookups": False}, {"named": True}, {"prefixes": 1}], ids=str
)
def test_time_grows_with_the_rows(shape: dict[str, Any]) -> None:
    small, large = capture(150, **shape), capture(300, **shape)
    correlate(small)
    assert len(large.frame("block")["done_ns"]) > 80_000
    ratio = seconds(large) / seconds(small)
    rows = len(large.frame("ops")["tid"]) / len(small.frame("ops")["tid"])
    assert ratio / rows < 1.5
