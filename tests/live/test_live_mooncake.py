"""Mooncake Store with SSD offload, in a network of its own: bytes against its own counters."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvprobe import engines
from kvprobe.correlator import Ledger
from kvprobe.schema import OpKind
from kvprobe.workload.scratch import Scratch
from tests.live.engine_capture import capturing, seen
from tests.live.engine_process import EngineMissingError, python_of

OBJECTS, OBJECT_BYTES = 101, 1 << 20
KEY_BYTES = len("default\0" + "tiny@tp_rank:0@pp_rank:0@") + 64
"""What a bucket holds of each object besides: tenant and key."""
DRIVER = Path(__file__).parent / "drivers" / "mooncake_store.py"


@pytest.fixture(scope="module")
def run(disk: Scratch, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], Ledger]:
    """The client's own counters, and what kvprobe saw."""
    try:
        python = python_of("mooncake")
    except EngineMissingError as missing:
        pytest.skip(str(missing))
    root = Path(disk.root, "mooncake")
    root.mkdir()
    words = f"ip link set lo up && exec {python} {DRIVER} {root} {OBJECTS} {OBJECT_BYTES}"
    out = tmp_path_factory.mktemp("kvprobe-mooncake") / "look.kvcap"
    with capturing(out, "--root", root):
        done = subprocess.run(
            ["unshare", "--net", "--", "sh", "-c", words],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(engines.recognise(str(path)) for path in root.glob("*.bucket"))
    return json.loads(done.stdout.splitlines()[-1]), seen(out).ledger


def test_objects_came_back_from_memory_and_disk(run: tuple[dict[str, int], Ledger]) -> None:
    """Mooncake may throw an object out of memory before it is on disk; none came back changed."""
    counted, _ = run
    assert counted["equal"] + counted["missing"] == OBJECTS
    assert counted["equal"] > OBJECTS // 2


def test_read_bytes_are_the_clients(run: tuple[dict[str, int], Ledger]) -> None:
    counted, ledger = run
    reads = ledger.ops["kind"] < OpKind.WRITE
    read = int(ledger.ops["result"][reads].sum())
    assert read == counted["mooncake_ssd_read_bytes_total"] > 0
    assert sum(ledger.attributed_bytes.values()) == read


def test_written_bytes_are_the_clients_and_their_keys(run: tuple[dict[str, int], Ledger]) -> None:
    counted, ledger = run
    writes = ledger.ops["kind"] >= OpKind.WRITE
    objects, rest = divmod(counted["mooncake_ssd_write_bytes_total"], OBJECT_BYTES)
    assert rest == 0
    written = int(ledger.ops["result"][writes].sum())
    assert written == objects * (OBJECT_BYTES + KEY_BYTES)
