"""One small whole capture, made once; each test works on a copy or only reads."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprobe.capture.archive import write_archive
from kvprobe.capture.frames import frame_from_dicts, frame_from_rows
from kvprobe.model import Frame
from kvprobe.schema import TABLES
from tests.capture.fake_source import (
    block_rows,
    chunk_paths,
    lookup_rows,
    manifest,
    op_rows,
    request_dicts,
)


def small_tables() -> dict[str, Iterator[Frame]]:
    """Prime numbers of rows; ``lookups`` has one path that is not UTF-8 and one with an escape."""
    paths = [*chunk_paths(51), b"/mnt/other/\xff.bin", b"/mnt/\x1b[31mred"]
    keys = [{"request_id": f"req-{i}", "position": i, "key": f"abcde{i:011x}"} for i in range(11)]
    host = [
        {"time_ns": 5, "metric": "softirq_s", "subject": name, "value": value}
        for name, value in (("nvme0n1", 0.5), ("enx0123456789ab", None), ("", 2.0))
    ]
    return {
        "block": iter([frame_from_rows(TABLES["block"], block_rows(211))]),
        "ops": iter([frame_from_rows(TABLES["ops"], op_rows(107))]),
        "lookups": iter([frame_from_rows(TABLES["lookups"], lookup_rows(paths))]),
        "requests": iter([frame_from_dicts(TABLES["requests"], request_dicts(13))]),
        "keys": iter([frame_from_dicts(TABLES["keys"], keys)]),
        "host": iter([frame_from_dicts(TABLES["host"], host)]),
    }


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished capture; do not change it."""
    path = tmp_path_factory.mktemp("capture") / "whole.kvcap"
    write_archive(path, manifest(), small_tables())
    return path
