"""Recording: what a kill, a full disk or a name already taken leaves behind."""

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvprobe.capture import record as record_module
from kvprobe.capture.part import part_of
from kvprobe.capture.reader import open_capture
from kvprobe.capture.record import SEGMENT_NS, record
from kvprobe.capture.recorder import Recorder, pack
from kvprobe.capture.typed_json import to_json
from kvprobe.clock import ClockSample
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.schema import TABLES
from kvprobe.sources import Batch
from kvprobe.sources.live import LiveSource
from tests.capture.fake_source import (
    START_NS,
    FakeSession,
    FakeSignal,
    block_rows,
    chunk_paths,
    lookup_rows,
    manifest,
    op_rows,
)

ROOT = Path(__file__).parents[2]


@contextmanager
def recording(out: Path, seconds: float, rows_per_poll: int) -> Iterator[subprocess.Popen[str]]:
    """A recorder in a process of its own; killed in the end if it still runs."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.capture.fake_source",
            *map(str, (out, seconds, rows_per_poll)),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def says(process: subprocess.Popen[str], word: str) -> list[str]:
    """Words of the next line that starts with ``word``."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.split()
    raise AssertionError(f"ended without saying {word}")


def record_small(out: Path, polls: int = 5, count: int = 1009) -> None:
    """Record ``polls * count`` block rows, four requests and three keys."""
    asked = iter(range(polls - 1))
    source = LiveSource(FakeSession(count, total=polls * count), FakeSignal())
    recorder = Recorder(out)
    final = record(source, recorder, manifest(), lambda _: next(asked, None) is None)
    recorder.finish(replace(final, complete=True))


def test_what_a_source_gave_is_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "a.kvcap"
    record_small(out)
    assert [path.name for path in tmp_path.iterdir()] == ["a.kvcap"]
    with open_capture(out) as capture:
        block, requests = capture.frame("block"), capture.frame("requests")
        facts = capture.manifest
        assert capture.frame("depth")["time_ns"].tolist() == [1_000_003] * 2
    assert capture.complete
    assert block["done_ns"].tolist() == block_rows(5045)["done_ns"].tolist()
    assert requests["id"].tolist() == [f"req-{i}" for i in range(4)]
    assert requests["first_token_ns"][3] == -1
    assert facts.losses["block"].rows == 5045
    assert facts.losses["block"].lost == 13
    assert facts.losses["requests"].rows == 4
    assert facts.cost.programs[0].run_ns == 5045 * 103
    assert facts.cost.measured_ns == 500_009
    assert facts.cost.agent_cpu_ns is not None and facts.cost.agent_cpu_ns > 0
    assert facts.engine is not None and facts.engine.unit_tokens == 16
    assert facts.end_ns > facts.start_ns


def test_a_killed_recording_opens_without_its_last_second(tmp_path: Path) -> None:
    out = tmp_path / "killed.kvcap"
    with recording(out, 60, 500) as process:
        for _ in range(3):
            rows = int(says(process, "rows")[1])
        time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        died_ns = time.monotonic_ns()
    assert not out.exists()
    for path in (out, part_of(out)):
        with open_capture(path) as capture:
            assert not capture.complete
            assert capture.notes == ()
            done_ns = capture.frame("block")["done_ns"]
            number = (capture.frame("block")["sector"] // 8).tolist()
            facts = capture.manifest
            assert len(capture.frame("requests")["id"]) == 3
        assert number == list(range(len(number))), "rows are gone from the middle"
        assert len(number) >= rows
        assert facts.losses["block"].rows == len(number)
        # A second of rows, and what a busy machine adds to it.
        assert died_ns - done_ns.max() < 2_500_000_000
        assert died_ns - facts.end_ns < 2_500_000_000


def test_packing_what_a_kill_left(tmp_path: Path) -> None:
    out = tmp_path / "killed.kvcap"
    with recording(out, 60, 500) as process:
        says(process, "rows")
        with pytest.raises(KvprobeError, match="another kvprobe is recording"):
            Recorder(out, force=True)
    with open_capture(out) as capture:
        expected = capture.frame("block")["done_ns"].tolist()
    pack(part_of(out), out)
    assert [path.name for path in tmp_path.iterdir()] == ["killed.kvcap"]
    with open_capture(out) as capture:
        assert not capture.complete
        assert capture.frame("block")["done_ns"].tolist() == expected


def test_a_recording_loads_nothing_heavy(tmp_path: Path) -> None:
    out = tmp_path / "light.kvcap"
    with recording(out, 1.2, 100) as process:
        assert says(process, "heavy") == ["heavy", "[]"]
        says(process, "finished")
        assert process.wait(30) == 0
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None


def segments_of(tmp_path: Path) -> Path:
    """A folder with three segments of 101 rows in each of three tables."""
    recorder = Recorder(tmp_path / "a.kvcap")
    for number in range(3):
        first = number * 101
        tables = {
            "block": block_rows(101, first),
            "ops": op_rows(101, first),
            "lookups": lookup_rows(chunk_paths(101)),
        }
        recorder.add(Batch(START_NS, tables))
        recorder.roll(replace(manifest(), end_ns=START_NS + number), START_NS)
    recorder.leave()
    return recorder.part


@pytest.mark.parametrize("how", ["cut", "flip", "empty", "header"])
def test_a_torn_segment_is_skipped_and_counted(tmp_path: Path, how: str) -> None:
    part = segments_of(tmp_path)
    segment = sorted(part.glob("*.seg"))[2]
    content = bytearray(segment.read_bytes())
    if how == "cut":
        del content[-1:]
    elif how == "flip":
        content[len(content) // 2] ^= 4
    elif how == "empty":
        content.clear()
    else:
        content[20] ^= 1
    segment.write_bytes(content)
    with open_capture(part) as capture:
        assert (capture.frame("block")["sector"] // 8).tolist() == list(range(202))
        assert len(capture.frame("lookups")["path"]) == 202
        assert capture.manifest.losses["ops"].rows == 202
        assert len(capture.notes) == 1 and "1 segments" in capture.notes[0]
        assert "damaged" in capture.notes[0]


def test_a_manifest_older_than_the_last_segment(tmp_path: Path) -> None:
    part = segments_of(tmp_path)
    (part / "manifest.json").write_bytes(to_json(manifest()))
    with open_capture(part) as capture:
        assert capture.manifest.end_ns == START_NS + 2
        assert {name: loss.rows for name, loss in capture.manifest.losses.items()} == {
            "block": 303, "ops": 303, "lookups": 303,
        }  # fmt: skip


def test_a_lost_segment_is_counted(tmp_path: Path) -> None:
    part = segments_of(tmp_path)
    sorted(part.glob("*.seg"))[1].unlink()
    with open_capture(part) as capture:
        assert len(capture.frame("ops")["tid"]) == 202
        assert "gone" in capture.notes[0]


def test_segments_keep_values_and_text(tmp_path: Path) -> None:
    with open_capture(segments_of(tmp_path)) as capture:
        lookups, ops = capture.frame("lookups"), capture.frame("ops")
    assert lookups["path"].tolist() == [path.decode() for path in chunk_paths(101)] * 3
    assert lookups["open_flags"].tolist() == [-1] * 303
    raw = np.concatenate([op_rows(101, 101 * i) for i in range(3)])
    for column in TABLES["ops"].columns:
        if column.null is None:
            assert ops[column.name].tolist() == raw[column.name].tolist(), column.name


def test_text_behind_a_nul_is_not_kept(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.kvcap")
    recorder.add(Batch(START_NS, {"lookups": lookup_rows([b"/kv/a\0secret", b"", b"/kv/b"])}))
    recorder.roll(manifest(), START_NS)
    recorder.leave()
    with open_capture(recorder.part) as capture:
        assert capture.frame("lookups")["path"].tolist() == ["/kv/a", "", "/kv/b"]
    assert not any(b"secret\0" in path.read_bytes() for path in recorder.part.glob("*.seg"))


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    out = tmp_path / "a.kvcap"
    out.write_bytes(b"precious")
    with pytest.raises(KvprobeError, match="exists") as caught:
        Recorder(out)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "--force" in caught.value.hint
    recorder = Recorder(out, force=True)
    recorder.roll(manifest(), START_NS)
    recorder.stop()
    assert out.read_bytes() == b"precious", "gone before there is anything in its place"
    recorder.finish(manifest())
    with open_capture(out) as capture:
        assert capture.manifest.capture_id == manifest().capture_id


def test_an_unfinished_recording_is_not_overwritten(tmp_path: Path) -> None:
    part = segments_of(tmp_path)
    with pytest.raises(KvprobeError, match="not finished"):
        Recorder(tmp_path / "a.kvcap")
    (part / "notes.txt").write_text("mine")
    with pytest.raises(KvprobeError, match=r"did not make, such as notes\.txt"):
        Recorder(tmp_path / "a.kvcap", force=True)
    assert len(list(part.glob("*.seg"))) == 3
    (part / "notes.txt").unlink()
    Recorder(tmp_path / "a.kvcap", force=True).leave()
    assert list(part.glob("*.seg")) == []


@pytest.mark.parametrize("name", ["absent/a.kvcap", "."])
def test_places_where_no_file_can_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(KvprobeError) as caught:
        Recorder(tmp_path / name)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB in memory."""
    point = tmp_path / "disk"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "kvcap-test", str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.mark.root
def test_a_full_disk_ends_the_recording_and_keeps_what_is_there(small_disk: Path) -> None:
    out = small_disk / "a.kvcap"
    source = LiveSource(FakeSession(100))
    recorder = Recorder(out)
    began = time.monotonic()
    final = record(
        source, recorder, manifest(time.monotonic_ns()), lambda _: time.monotonic() - began > 30
    )
    assert time.monotonic() - began < 25, "went on with a full disk"
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(KvprobeError, match="No space left") as caught:
        recorder.finish(replace(final, complete=True))
    assert caught.value.exit_code == ExitCode.INCOMPLETE
    assert str(part_of(out)) in caught.value.hint
    assert not out.exists()
    with open_capture(out) as capture:
        number = (capture.frame("block")["sector"] // 8).tolist()
        assert len(number) > 300
        assert number == list(range(len(number)))
    filler.unlink()
    facts = pack(part_of(out), out)
    assert not facts.complete
    assert os.listdir(small_disk) == ["a.kvcap"]


@pytest.mark.root
def test_a_full_disk_with_room_for_the_packed_file(small_disk: Path) -> None:
    out = small_disk / "a.kvcap"
    recorder = Recorder(out)
    # Repeated rows take their whole size in a segment and next to nothing in Parquet.
    for count in (101, 4001, 4001, 4001, 4001):
        recorder.add(Batch(START_NS, {"block": block_rows(count)}))
        recorder.roll(manifest(), START_NS)
    recorder.finish(replace(manifest(), complete=True))
    assert os.listdir(small_disk) == ["a.kvcap"]
    with open_capture(out) as capture:
        assert not capture.complete
        assert "cut short: No space left" in capture.notes[0]
        assert 101 <= len(capture.frame("block")["tid"]) < 101 + 4 * 4001


def test_a_jump_of_the_wall_clock_is_counted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = iter([1_000, 1_030, 5_000_000_970, 5_000_000_990])
    monkeypatch.setattr(
        record_module, "sample_clocks", lambda: ClockSample(0, next(offsets), uncertainty_ns=20)
    )
    clock_ns = iter(range(START_NS, START_NS + 10 * SEGMENT_NS, SEGMENT_NS))
    source = LiveSource(FakeSession(7, total=21), clock=lambda: next(clock_ns))
    asked = iter(range(2))
    recorder = Recorder(tmp_path / "a.kvcap")
    final = record(source, recorder, manifest(), lambda _: next(asked, None) is None)
    recorder.leave()
    assert (final.clock.before_ns, final.clock.after_ns) == (1_000, 5_000_000_990)
    assert (final.clock.uncertainty_ns, final.clock.steps) == (20, 1)
    assert final.notes == ("the wall clock jumped by +5.000000 s during the recording",)


def test_the_source_is_closed_when_recording_fails(tmp_path: Path) -> None:
    session = FakeSession(10)

    def broken(_: int) -> bool:
        raise KeyboardInterrupt

    recorder = Recorder(tmp_path / "a.kvcap")
    with pytest.raises(KeyboardInterrupt):
        record(LiveSource(session), recorder, manifest(time.monotonic_ns()), broken)
    assert session.closed
    recorder.leave()
    with open_capture(tmp_path / "a.kvcap") as capture:
        assert len(capture.frame("block")["tid"]) == session.given == 20
