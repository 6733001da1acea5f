"""Rows of existence tests, opens and renames: paths, answers, filters."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprobe.bpf.session import open_session
from kvprobe.model import Filters, Rows
from kvprobe.schema import PATH_BYTES, U32_MAX, LookupKind

from .conftest import LoopFs, Watch, rows_of, run_python

pytestmark = pytest.mark.root


@pytest.fixture
def folder(loop_fs: LoopFs) -> Iterator[Path]:
    path = loop_fs.mountpoint / "lookups" / "kv"
    path.mkdir(parents=True, exist_ok=True)
    yield path
    for file in path.parent.rglob("*"):
        if file.is_file():
            file.unlink()


def collect(watch: Watch, code: str, *arguments: object) -> Rows:
    watch.begin()
    run_python(code, *arguments)
    return watch.session.poll()["lookups"]


def told(rows: Rows) -> list[tuple[str, str, int]]:
    return [
        (LookupKind(row["kind"]).name, os.path.basename(bytes(row["path"]).decode()), row["result"])
        for row in rows
    ]


def test_existence_tests_tell_path_and_answer(folder: Path, watch: Watch) -> None:
    (folder / "there").write_bytes(b"x")
    code = """
    import os, sys
    for name in ("there", "gone"):
        path = os.path.join(sys.argv[1], name)
        for n in range(7): os.access(path, os.R_OK)
        for n in range(11): os.path.exists(path)
        for n in range(3): os.path.lexists(path)
    print(os.getpid())
    """
    rows = collect(watch, code, folder)
    expected = []
    for name, result in (("there", 0), ("gone", -errno.ENOENT)):
        expected += [("ACCESS", name, result)] * 7 + [("STAT", name, result)] * 14
    assert told(rows) == expected
    assert (rows["start_ns"] < rows["end_ns"]).all()
    assert set(rows["open_flags"]) == {U32_MAX}
    assert not rows["cut"].any()
    assert not rows["reserved"].any()
    assert bytes(rows["path"][0]) == str(folder / "there").encode()


def test_opens_tell_the_file_and_their_flags(folder: Path, watch: Watch) -> None:
    path = folder / "data"
    path.write_bytes(b"x")
    code = """
    import os, sys
    for n in range(13): os.close(os.open(sys.argv[1], os.O_RDONLY | os.O_CLOEXEC))
    os.close(os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT))
    try: os.open(sys.argv[1] + ".not", os.O_RDONLY)
    except FileNotFoundError: pass
    """
    rows = collect(watch, code, path)
    opened = rows[rows["result"] >= 0]
    assert len(opened) == len(rows_of(opened, path)) == 14
    assert set(rows["kind"]) == {LookupKind.OPEN}
    assert opened["open_flags"].tolist() == 13 * [os.O_CLOEXEC] + [
        os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    ]
    (failed,) = rows[rows["result"] < 0]
    assert failed["result"] == -errno.ENOENT
    assert failed["inode"] == 0
    assert bytes(failed["path"]).endswith(b"/data.not")


def test_a_rename_is_two_rows_with_equal_times(folder: Path, watch: Watch) -> None:
    code = """
    import os, sys
    for n in range(17):
        old, new = (os.path.join(sys.argv[1], f"{n}{end}") for end in (".tmp", ""))
        os.close(os.open(old, os.O_CREAT | os.O_WRONLY))
        os.rename(old, new)
    try: os.rename(sys.argv[1] + "/none", sys.argv[1] + "/other")
    except FileNotFoundError: pass
    """
    rows = collect(watch, code, folder)
    source = rows[rows["kind"] == LookupKind.RENAME_FROM]
    target = rows[rows["kind"] == LookupKind.RENAME_TO]
    assert [bytes(path).rpartition(b"/")[2] for path in source["path"]] == [
        *(b"%d.tmp" % n for n in range(17)), b"none",
    ]  # fmt: skip
    assert [bytes(path).rpartition(b"/")[2] for path in target["path"]] == [
        *(b"%d" % n for n in range(17)), b"other",
    ]  # fmt: skip
    for column in ("start_ns", "end_ns", "tid", "result"):
        assert source[column].tolist() == target[column].tolist()
    assert target["result"].tolist() == [0] * 17 + [-errno.ENOENT]


def test_a_sibling_whose_name_begins_the_same_is_left_out(folder: Path) -> None:
    sibling = folder.parent / "kv2"
    sibling.mkdir(exist_ok=True)
    (sibling / "data").write_bytes(b"x")
    (folder / "data").write_bytes(b"x")
    code = """
    import os, sys
    for folder in sys.argv[1:]:
        path = os.path.join(folder, "data")
        os.access(path, 0); os.stat(path); os.close(os.open(path, 0)); os.access(path + "-", 0)
    """
    with open_session(["lookups"], Filters(root=str(folder))) as session:
        session.poll()
        run_python(code, sibling, folder, sibling)
        rows = session.poll()["lookups"]
    assert told(rows) == [
        ("ACCESS", "data", 0), ("STAT", "data", 0), ("OPEN", "data", 3),
        ("ACCESS", "data-", -errno.ENOENT),
    ]  # fmt: skip
    assert all(bytes(path).startswith(str(folder).encode()) for path in rows["path"])


def test_relative_paths_become_absolute_and_keep_to_the_root(folder: Path) -> None:
    (folder / "data").write_bytes(b"x")
    code = """
    import os, sys, time
    os.access("data", 0)
    os.access("../kv/data", 0)
    os.access("../elsewhere", 0)
    os.chdir("..")
    os.access("kv/data", 0)
    os.access("data", 0)
    dir = os.open("kv", os.O_DIRECTORY)
    os.stat("data", dir_fd=dir)
    print("ready", flush=True)
    sys.stdin.readline()
    """
    with open_session(["lookups"], Filters(root=str(folder))) as session:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", textwrap.dedent(code)],
            cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        rows = session.poll()["lookups"]
        process.communicate("\n")
    rows = rows[(rows["tgid"] == process.pid) & (rows["kind"] != LookupKind.OPEN)]
    inside = [bytes(path) for path in rows["path"]]
    # The working directory has changed by the time of the poll: best effort, never outside.
    assert all(path.startswith(str(folder).encode() + b"/") for path in inside)
    assert inside[-1] == str(folder / "data").encode()
    assert str(folder / "data").encode() in inside[:-1]


def test_a_path_that_is_too_long_is_cut_and_marked(folder: Path, watch: Watch) -> None:
    code = """
    import os, sys
    room = int(sys.argv[2]) - 1 - len(sys.argv[1]) - 1
    for length in (room, room + 1):
        path = sys.argv[1] + "/" + "x" * length
        try: os.stat(path)
        except OSError: pass
    """
    rows = collect(watch, code, folder, PATH_BYTES)
    assert rows["cut"].tolist() == [0, 1]
    assert [len(bytes(path)) for path in rows["path"]] == [PATH_BYTES - 1] * 2


def test_files_open_at_the_start_are_told(folder: Path, loop_fs: LoopFs) -> None:
    path = folder / "early"
    path.write_bytes(b"x")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c",
         "import os, sys; os.open(sys.argv[1], os.O_RDWR); print(flush=True); sys.stdin.read()",
         str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()
        for filters in (Filters(root=str(folder)), Filters(tgids=(process.pid,))):
            with open_session(["lookups"], filters) as session:
                rows = session.poll()["lookups"]
                assert session.losses()["lookups"].rows == len(rows)
            (row,) = rows_of(rows, path)
            assert row["kind"] == LookupKind.ALREADY_OPEN
            assert row["tgid"] == process.pid
            assert bytes(row["path"]) == str(path).encode()
            assert row["open_flags"] & os.O_RDWR
    finally:
        process.communicate("")
