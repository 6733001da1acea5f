"""A request's restore is the same, whether its engine reads by system calls or through cuFile."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from kvprobe.capture.frames import select
from kvprobe.capture.tables import FixedTables
from kvprobe.correlator import Ledger, correlate
from kvprobe.correlator.gds import DataPath
from kvprobe.model import Frame
from kvprobe.schema import TABLES, OpKind
from tests.correlator.simulate import Node

SHAPES: list[dict[str, Any]] = [{"fan_out": 1}, {"fan_out": 4, "pieces": 2}]


def through_cufile(ops: Frame, compat: bool) -> Frame:
    """The same reads as cuFile calls; in compatibility mode each has two preads of a worker."""
    reads = ops["kind"] < OpKind.WRITE
    calls = {**ops, "kind": np.where(reads, int(OpKind.CUFILE_READ), ops["kind"])}
    if not compat:
        return calls
    inner = select(ops, reads)
    half = inner["requested"] // 2
    parts = [calls]
    for offset in (0, half):
        parts.append(
            {
                **inner,
                "tid": inner["tid"] + 5000,
                "start_ns": inner["start_ns"] + 1,
                "end_ns": inner["end_ns"] - 1,
                "offset": inner["offset"] + offset,
                "requested": half,
                "result": half,
            }
        )
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ops}
    return select(joined, np.argsort(joined["end_ns"], kind="stable"))


def correlated(tables: FixedTables, ops: Frame) -> Ledger:
    frames = {name: tables.frame(name) for name in TABLES}
    return correlate(FixedTables(tables.manifest, {**frames, "ops": ops}))


@pytest.mark.parametrize("shape", SHAPES, ids=["one reader", "four, in pieces"])
@pytest.mark.parametrize("compat", [False, True], ids=["native", "compat"])
def test_restores_are_those_of_the_engine_s_own_reads(shape: dict[str, Any], compat: bool) -> None:
    node = Node(3, 4, requests=67, **shape).run()
    tables = node.capture(reads_in_flight=shape["fan_out"])
    plain = correlated(tables, tables.frame("ops"))
    ledger = correlated(tables, through_cufile(tables.frame("ops"), compat))
    assert plain.gds is None and plain.accounts
    assert sum(a.restore.bytes for a in plain.accounts if a.restore) > 0
    for before, after in zip(plain.accounts, ledger.accounts, strict=True):
        assert asdict(after) == asdict(before)
    assert ledger.attributed_bytes == plain.attributed_bytes
    assert len(ledger.ops["start_ns"]) == len(plain.ops["start_ns"])
    assert ledger.gds
    reads = ledger.gds.reads
    assert ledger.gds.path is (DataPath.COMPAT if compat else DataPath.NATIVE)
    assert reads.bytes == sum(plain.attributed_bytes.values())
    assert reads.below_bytes == compat * reads.bytes
    assert reads.unseen_bytes == 0
