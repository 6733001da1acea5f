"""Damaged, foreign and hostile files: one line and an exit code; no wrong rows, no crash."""

import io
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.capture.archive import MAX_MEMBERS
from kvprobe.capture.manifest import Manifest
from kvprobe.capture.parquet import MAX_RATIO
from kvprobe.capture.reader import open_capture
from kvprobe.capture.typed_json import to_json
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import Frame
from kvprobe.schema import TABLES
from tests.capture.fake_source import manifest

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0\x90wS\xde"


def everything(path: Path) -> tuple[Manifest, dict[str, Frame]]:
    """All that can be read from a capture."""
    with open_capture(path) as capture:
        frames = {name: capture.frame(name) for name in TABLES}
        return capture.manifest, frames


def equal(one: dict[str, Frame], other: dict[str, Frame]) -> bool:
    return all(
        np.array_equal(one[t][c], other[t][c], equal_nan=one[t][c].dtype.kind == "f")
        for t in one
        for c in one[t]
    )


def zipped(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def refused(path: Path) -> KvprobeError:
    """The error of reading everything; its message is one line."""
    with pytest.raises(KvprobeError) as caught:
        everything(path)
    assert "\n" not in caught.value.message
    return caught.value


@given(data=st.data())
def test_flipped_cut_or_overwritten_anywhere(
    data: st.DataObject, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Either the file is refused, or nothing that was read differs (the ZIP has unused bytes)."""
    content = bytearray(whole.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "zeros", "insert"]))
    if how == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[place:]
    elif how == "zeros":
        end = min(len(content), place + 512)
        content[place:end] = bytes(end - place)
    else:
        content[place:place] = b"\xa5" * 7
    path = tmp_path_factory.mktemp("damage") / "damaged.kvcap"
    path.write_bytes(content)
    try:
        facts, frames = everything(path)
    except KvprobeError as error:
        assert "\n" not in error.message
        in_time = place < 43 or how == "cut"  # the first bytes are what tells that it is ours
        allowed = {ExitCode.INCOMPLETE, ExitCode.USAGE} if in_time else {ExitCode.INCOMPLETE}
        assert error.exit_code in allowed
    else:
        expected_facts, expected = everything(whole)
        assert facts == expected_facts
        assert equal(frames, expected)


MUTATE = """
import random, resource, sys, zipfile
from pathlib import Path
from kvprobe.capture.reader import open_capture
from kvprobe.errors import KvprobeError
from kvprobe.schema import TABLES
whole, path, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
members = {}
with zipfile.ZipFile(whole) as archive:
    members = {name: archive.read(name) for name in archive.namelist()}
rng = random.Random(seed)
seen = {"refused": 0, "read": 0}
for _ in range(211):
    name = rng.choice(sorted(members))
    data = bytearray(members[name])
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        data[rng.randrange(len(data))] = rng.choice([0, 0xFF, rng.randrange(256)])
    with zipfile.ZipFile(path, "w") as archive:
        for other, content in members.items():
            archive.writestr(other, bytes(data) if other == name else content)
    try:
        with open_capture(path) as capture:
            for table in TABLES:
                lengths = {len(column) for column in capture.frame(table).values()}
                assert len(lengths) == 1
        seen["read"] += 1
    except KvprobeError as error:
        assert error.exit_code in (2, 4) and "\\n" not in error.message
        seen["refused"] += 1
assert seen["refused"] > 100, seen
"""


def test_a_member_that_was_changed_and_signed_again(whole: Path, tmp_path: Path) -> None:
    """A stranger's Parquet reaches pyarrow; it runs apart, so that a crash would be seen."""
    seed = random.randrange(1 << 30)
    done = subprocess.run(
        [sys.executable, "-c", MUTATE, str(whole), str(tmp_path / "changed.kvcap"), str(seed)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"


@pytest.mark.parametrize(
    "content",
    [b"", b"P", b"PK\3\4", PNG, b"\0" * 8192, b"{}", b"PAR1" + b"\0" * 64 + b"PAR1"],
    ids=["empty", "one byte", "magic only", "png", "zeros", "json", "parquet"],
)
def test_other_files_are_not_captures(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert refused(path).exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    "members",
    [
        {"hello.txt": b"hello"},
        {"manifest.json": b'{"manifest_version": 3, "name": "a browser extension"}'},
        {"manifest.json": b"[1]"},
    ],
)
def test_other_zips_are_not_captures(tmp_path: Path, members: dict[str, bytes]) -> None:
    assert refused(zipped(tmp_path / "a.zip", members)).exit_code == ExitCode.USAGE


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "absent", Path("/dev/null")):
        assert refused(path).exit_code == ExitCode.USAGE


@pytest.mark.parametrize("name", ["../escape", "/etc/cron.d/x", "a/b.parquet", "..", "a\\b"])
def test_names_that_leave_the_file_are_refused(tmp_path: Path, name: str) -> None:
    path = zipped(tmp_path / "a.kvcap", {"manifest.json": to_json(manifest()), name: b"x"})
    assert refused(path).exit_code == ExitCode.INCOMPLETE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.kvcap"]


def test_packed_members_and_too_many_are_refused(tmp_path: Path) -> None:
    facts = to_json(manifest())
    bomb = zipped(
        tmp_path / "bomb.kvcap",
        {"manifest.json": facts, "block.parquet": bytes(1 << 20)},
        zipfile.ZIP_DEFLATED,
    )
    many = {"manifest.json": facts, **{f"m{i}.json": b"{}" for i in range(MAX_MEMBERS)}}
    assert "packed" in refused(bomb).message
    assert "members" in refused(zipped(tmp_path / "many.kvcap", many)).message


def test_a_small_table_that_would_fill_memory_is_refused(tmp_path: Path) -> None:
    rows = 20_000_000
    column = pa.array(np.zeros(rows, dtype=np.uint64))
    buffer = io.BytesIO()
    pq.write_table(pa.table({"done_ns": column, "sector": column}), buffer, compression="zstd")
    assert rows * 8 > MAX_RATIO * len(buffer.getvalue())
    path = zipped(
        tmp_path / "bomb.kvcap",
        {"manifest.json": to_json(manifest()), "block.parquet": buffer.getvalue()},
    )
    error = refused(path)
    assert "would become" in error.message
    assert error.exit_code == ExitCode.INCOMPLETE


@pytest.mark.parametrize(
    "text",
    [
        b'{"format": "kvcap", "format_version": 1}',
        b'{"format": "kvcap", "format_version": "1"}',
        b"[" * 100_000,
        b'{"format": "kvcap", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b" " * (9 << 20),
        b"\xff\xfe",
        to_json(manifest()).replace(b'"start_ns": 5000000000', b'"start_ns": NaN'),
        to_json(manifest()).replace(b'"start_ns": 5000000000', b'"start_ns": 1e99'),
        to_json(manifest()).replace(b'"start_ns": 5000000000', b'"start_ns": ' + b"9" * 30),
        to_json(manifest()).replace(b'"probes": [', b'"probes": [{}, '),
    ],
)
def test_a_manifest_that_is_none_is_damage(tmp_path: Path, text: bytes) -> None:
    assert refused(zipped(tmp_path / "a.kvcap", {"manifest.json": text})).exit_code == (
        ExitCode.INCOMPLETE
    )


def test_names_in_a_manifest_cannot_drive_a_terminal(tmp_path: Path) -> None:
    text = to_json(manifest()).replace(b"secrethost.corp.example", rb"a\u001b]0;x\u0007b\ud800c")
    with open_capture(zipped(tmp_path / "a.kvcap", {"manifest.json": text})) as capture:
        assert capture.manifest.host.hostname == r"a\x1b]0;x\x07b\ud800c"
