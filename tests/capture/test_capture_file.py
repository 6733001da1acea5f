"""What goes into a capture comes out: values, nulls, text, facts; read back by others too."""

import json
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvprobe.capture import Tables
from kvprobe.capture.archive import write_archive
from kvprobe.capture.frames import frame_from_rows, frame_length
from kvprobe.capture.reader import open_capture
from kvprobe.capture.typed_json import to_json
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import Frame
from kvprobe.schema import TABLES
from tests.capture.fake_source import block_rows, manifest, op_rows


def parquet(path: Path, table: str) -> dict[str, list[object]]:
    """A table of the file as pyarrow alone shows it."""
    with zipfile.ZipFile(path) as archive:
        return dict(pq.read_table(BytesIO(archive.read(f"{table}.parquet"))).to_pydict())


def test_the_file_is_a_zip_of_json_and_parquet(whole: Path) -> None:
    with zipfile.ZipFile(whole) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0] == "manifest.json"
        assert all(m.compress_type == zipfile.ZIP_STORED for m in archive.infolist())
        facts = json.loads(archive.read("manifest.json"))
        stored = pq.read_schema(BytesIO(archive.read("block.parquet")))
    assert (facts["format"], facts["format_version"]) == ("kvcap", 1)
    assert {field.name: str(field.type) for field in stored} == {
        c.name: {"u8": "uint64", "u4": "uint32", "u1": "uint8"}[c.dtype]
        for c in TABLES["block"].columns
    }


def test_unknown_is_null_in_the_file_and_minus_one_in_a_frame(whole: Path) -> None:
    raw = block_rows(211)
    stored = parquet(whole, "block")
    with open_capture(whole) as capture:
        frame = capture.frame("block")
    for name, absent in (("inode", 0), ("offset", 2**64 - 1), ("hw_queue", 2**32 - 1)):
        unknown = raw[name] == absent
        assert np.count_nonzero(unknown) == 43
        assert [value is None for value in stored[name]] == unknown.tolist()
        assert (frame[name] == -1).tolist() == unknown.tolist()
        assert (frame[name][~unknown] == raw[name][~unknown]).all()
    assert frame["sector"].dtype == np.int64
    assert frame["sector"].tolist() == raw["sector"].tolist()


def test_a_result_of_minus_one_is_eperm_not_unknown(whole: Path) -> None:
    expected = op_rows(107)["result"].tolist()
    assert expected.count(-1) == 16
    assert parquet(whole, "ops")["result"] == expected
    with open_capture(whole) as capture:
        assert capture.frame("ops")["result"].tolist() == expected


def test_text_is_printable_and_keys_are_recognised(whole: Path) -> None:
    with open_capture(whole) as capture:
        frame = capture.frame("lookups")
    assert frame["path"][51:].tolist() == [r"/mnt/other/\xff.bin", r"/mnt/\x1b[31mred"]
    assert frame["kv_key"][:3].tolist() == [f"abcde{i:011x}" for i in range(3)]
    assert frame["kv_temporary"][:4].tolist() == [1, 0, 0, 1]
    assert frame["kv_key"][51:].tolist() == [None, None]
    assert frame["kv_temporary"][51:].tolist() == [-1, -1]


def test_tables_made_in_python(whole: Path) -> None:
    with open_capture(whole) as capture:
        requests, host = capture.frame("requests"), capture.frame("host")
        keys = capture.frame("keys")
    assert requests["id"].tolist() == [f"req-{i}" for i in range(13)]
    assert requests["first_token_ns"][11:].tolist() == [5_011_070_001, -1]
    assert parquet(whole, "requests")["first_token_ns"][12] is None
    assert np.isnan(host["value"]).tolist() == [False, True, False]
    assert host["subject"].tolist() == ["nvme0n1", "enx0123456789ab", ""]
    assert keys["position"].tolist() == list(range(11))


def test_facts_come_back_as_they_were(whole: Path) -> None:
    with open_capture(whole) as capture:
        assert capture.manifest == manifest()
        assert not capture.complete


def test_a_table_that_was_not_recorded_has_no_rows_and_all_columns(whole: Path) -> None:
    with open_capture(whole) as capture:
        frame = capture.frame("histogram")
        assert list(frame) == [c.name for c in TABLES["histogram"].columns]
        assert frame_length(frame) == 0
        with pytest.raises(KeyError):
            capture.frame("no_such_table")


def test_frames_are_read_once(whole: Path) -> None:
    with open_capture(whole) as capture:
        tables: Tables = capture
        assert tables.frame("block") is tables.frame("block")


def rewritten(path: Path, table: str, columns: dict[str, Any]) -> Path:
    """A copy of a capture with columns of one table replaced, added or (None) dropped."""
    import pyarrow as pa

    copy = path.with_name("rewritten.kvcap")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == f"{table}.parquet":
                content = pq.read_table(BytesIO(data))
                for column, values in columns.items():
                    if column in content.column_names:
                        content = content.drop_columns([column])
                    if values is not None:
                        content = content.append_column(column, pa.array(values))
                buffer = BytesIO()
                pq.write_table(content, buffer)
                data = buffer.getvalue()
            new.writestr(name, data)
    return copy


@pytest.fixture
def only_block(tmp_path: Path) -> Path:
    """A capture of 7 block rows."""
    path = tmp_path / "block.kvcap"
    frame: Frame = frame_from_rows(TABLES["block"], block_rows(7))
    write_archive(path, manifest(), {"block": iter([frame])})
    return path


def test_a_missing_column_that_may_be_unknown_is_unknown(only_block: Path) -> None:
    with open_capture(rewritten(only_block, "block", {"inode": None})) as capture:
        assert capture.frame("block")["inode"].tolist() == [-1] * 7


def test_a_further_column_is_ignored(only_block: Path) -> None:
    with open_capture(rewritten(only_block, "block", {"news": list("abcdefg")})) as capture:
        assert set(capture.frame("block")) == {c.name for c in TABLES["block"].columns}


@pytest.mark.parametrize(
    ("column", "values", "word"),
    [
        ("bytes", None, "missing"),
        ("sector", list("abcdefg"), "type"),
        ("inode", [0.5] * 7, "type"),
    ],
)
def test_a_column_that_is_needed_or_of_another_type_is_damage(
    only_block: Path, column: str, values: object, word: str
) -> None:
    with open_capture(rewritten(only_block, "block", {column: values})) as capture:
        with pytest.raises(KvprobeError, match=f"{column}.*{word}") as caught:
            capture.frame("block")
        assert caught.value.exit_code == ExitCode.INCOMPLETE


def test_what_int64_cannot_hold_is_unknown_and_said(only_block: Path) -> None:
    values = np.array([2**64 - 1, 2**63, 2**63 - 1, 3, 2, 1, 0], dtype=np.uint64)
    with open_capture(rewritten(only_block, "block", {"sector": values})) as capture:
        assert capture.frame("block")["sector"].tolist() == [-1, -1, 2**63 - 1, 3, 2, 1, 0]
        assert "block.sector: 2 values" in capture.notes[-1]


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "future.kvcap"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", to_json(replace(manifest(), format_version=9)))
    with pytest.raises(KvprobeError, match=r"newer kvprobe \(format 9\).* up to 1") as caught:
        open_capture(path)
    assert caught.value.exit_code == ExitCode.USAGE
