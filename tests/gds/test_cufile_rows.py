"""Rows of cuFile calls against a program that made a known, prime number of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvprobe.bpf import core_object, libraries
from kvprobe.bpf.session import Session, open_session
from kvprobe.model import Filters, Rows
from kvprobe.schema import U64_MAX, OpKind
from tests.gds.cufile_process import Program, program

pytestmark = pytest.mark.root
LOADERS = ("core", "bcc")
PLACES = [(n * 40961, 30011) for n in range(103)]
"""Offsets and sizes without any common divisor."""


@pytest.fixture(scope="module", params=[*LOADERS, "plain"])
def user(request: pytest.FixtureRequest, cufile: Path) -> Iterator[tuple[Session, Program]]:
    """A session that began when the program was there, and the program.

    ``plain`` is the object for kernels without bpf_rdonly_cast.
    """
    plain = request.param == "plain"
    with ExitStack() as stack:
        it = stack.enter_context(program(cufile, "compat"))
        with mock.patch.object(core_object, "must_be_plain", lambda kernel: plain):
            loader = "core" if plain else request.param
            session = open_session(["cufile", "ops"], Filters(tgids=(it.pid,)), loader)
        yield stack.enter_context(session), it


def rows_of(session: Session) -> Rows:
    """All rows so far."""
    return session.poll()["ops"]


def cufile_rows(rows: Rows) -> Rows:
    kinds = [kind for kind in OpKind if kind.name.startswith("CUFILE")]
    found: Rows = rows[np.isin(rows["kind"], kinds)]
    return found


def assert_exact(
    rows: Rows, answer: dict[str, Any], places: list[tuple[int, int]], path: Path
) -> None:
    """Count, places, results and times are those of the program, in its order."""
    assert len(rows) == len(places)
    assert rows["offset"].tolist() == [offset for offset, _ in places]
    assert rows["requested"].tolist() == [size for _, size in places]
    assert rows["result"].tolist() == [result for _, _, result in answer["done"]]
    assert set(rows["inode"]) == {path.stat().st_ino}
    for row, (before, after, _) in zip(rows, answer["done"], strict=True):
        assert before < row["start_ns"] < row["end_ns"] < after


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_every_call_is_one_row(user: tuple[Session, Program], kv_file: Path, write: bool) -> None:
    session, it = user
    rows_of(session)
    it("register", name="a", path=str(kv_file))
    answer = it("transfer", name="a", places=PLACES, write=write)
    it("deregister", name="a")
    rows = cufile_rows(rows_of(session))
    assert set(rows["kind"]) == {OpKind.CUFILE_WRITE if write else OpKind.CUFILE_READ}
    assert_exact(rows, answer, PLACES, kv_file)
    assert [result for _, _, result in answer["done"]] == [30011] * 103
    assert set(rows["tgid"]) == set(rows["tid"]) == {it.pid}
    assert not rows["direct"].any()
    assert session.in_flight()["ops"] == 0


def test_what_the_library_reads_itself_has_rows_of_its_own(
    user: tuple[Session, Program], kv_file: Path
) -> None:
    session, it = user
    rows_of(session)
    it("register", name="a", path=str(kv_file))
    it("transfer", name="a", places=[(0, 2 << 20), (1 << 20, 1048583)])
    it("deregister", name="a")
    rows = rows_of(session)
    below = rows[rows["kind"] == OpKind.PREAD64]
    assert below["result"].sum() == (2 << 20) + 1048583
    assert set(below["tgid"]) == {it.pid} and it.pid not in below["tid"]
    calls = cufile_rows(rows)
    assert calls["start_ns"].min() < below["start_ns"].min()
    assert below["end_ns"].max() < calls["end_ns"].max()


def test_errors_short_reads_and_large_sizes(user: tuple[Session, Program], kv_file: Path) -> None:
    session, it = user
    rows_of(session)
    it("register", name="a", path=str(kv_file))
    size = kv_file.stat().st_size
    places = [(-4096, 4099), (size - 101, 4099), (size, 4099)]
    answer = it("transfer", name="a", places=places)
    it("deregister", name="a")
    assert [result for _, _, result in answer["done"]] == [-1, 101, 0]
    rows = cufile_rows(rows_of(session))
    assert rows["result"].tolist() == [-1, 101, 0]
    assert rows["offset"].tolist() == [U64_MAX - 4095, size - 101, size]


def test_a_refused_handle_names_nothing(user: tuple[Session, Program], tmp_path: Path) -> None:
    session, it = user
    rows_of(session)
    read, write = os.pipe()
    os.close(write)
    answer = it("register", name="pipe", path=f"/proc/{os.getpid()}/fd/{read}", flags=os.O_RDONLY)
    os.close(read)
    assert answer["error"] == 0  # the stand-in takes it; it is no regular file
    it("transfer", name="pipe", places=[(0, 13)])
    it("deregister", name="pipe")
    assert not len(cufile_rows(rows_of(session)))


def test_a_handle_that_is_used_again_names_its_new_file(
    user: tuple[Session, Program], tmp_path: Path
) -> None:
    session, it = user
    rows_of(session)
    addresses, files = set(), []
    for n in range(17):
        path = tmp_path / f"chunk{n}"
        path.write_bytes(bytes(7919))
        files.append(path.stat().st_ino)
        addresses.add(it("register", name="a", path=str(path))["address"])
        it("transfer", name="a", places=[(0, 7919)])
        it("deregister", name="a")
    assert len(addresses) < 17, "no address was used again: this test proves nothing"
    assert cufile_rows(rows_of(session))["inode"].tolist() == files


def test_what_is_handed_over_is_counted_and_not_timed(
    user: tuple[Session, Program], kv_file: Path
) -> None:
    session, it = user
    rows_of(session)
    it("register", name="a", path=str(kv_file))
    for write in (False, True):
        it("stream", name="a", places=PLACES[:11], write=write)
        it("batch", name="a", places=PLACES[:31], write=write)
    it("deregister", name="a")
    rows = cufile_rows(rows_of(session))
    for kind, count in (
        (OpKind.CUFILE_READ_ASYNC, 11),
        (OpKind.CUFILE_WRITE_ASYNC, 11),
        (OpKind.CUFILE_READ_BATCH, 31),
        (OpKind.CUFILE_WRITE_BATCH, 31),
    ):
        mine = rows[rows["kind"] == kind]
        assert mine["offset"].tolist() == [offset for offset, _ in PLACES[:count]]
        assert set(mine["requested"]) == {30011}
        assert set(mine["result"]) == {0}
        assert set(mine["inode"]) == {kv_file.stat().st_ino}
    assert len(rows) == 84
    assert session.counter("lost_ops") == 0


def test_a_batch_that_is_too_large_is_counted_as_lost(
    user: tuple[Session, Program], kv_file: Path
) -> None:
    session, it = user
    rows_of(session)
    before = session.counter("lost_ops")
    most = 128 if session.loader == "core" else 32
    it("register", name="a", path=str(kv_file))
    it("batch", name="a", places=[(n, 1) for n in range(131)])
    it("deregister", name="a")
    assert len(cufile_rows(rows_of(session))) == most
    assert session.counter("lost_ops") - before == 131 - most


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_batch_is_timed_when_the_program_asks(
    user: tuple[Session, Program], kv_file: Path, write: bool
) -> None:
    session, it = user
    rows_of(session)
    places = [*PLACES[:29], (-4096, 4099)]
    it("register", name="a", path=str(kv_file))
    answer = it("batch", name="a", places=places, reap=7, write=write)
    it("deregister", name="a")
    rows = cufile_rows(rows_of(session))
    done = rows[rows["kind"] == (OpKind.CUFILE_WRITE_DONE if write else OpKind.CUFILE_READ_DONE)]
    assert len(rows) == 2 * len(done) == 60
    assert done["offset"][:29].tolist() == [offset for offset, _ in PLACES[:29]]
    assert done["result"].tolist() == [30011] * 29 + [-1]
    assert set(done["inode"]) == {kv_file.stat().st_ino}
    assert set(done["tid"]) == {it.pid}
    for row, (before, after, result) in zip(done, answer["done"], strict=True):
        assert before < row["start_ns"] < row["end_ns"] < after
        assert row["result"] == result
    assert len(set(done["end_ns"])) > 4, "events that are told together end together"


def test_what_cannot_be_told_apart_or_was_refused_is_never_timed(
    user: tuple[Session, Program], kv_file: Path
) -> None:
    session, it = user
    rows_of(session)
    it("register", name="a", path=str(kv_file))
    it("batch", name="a", places=PLACES[:13], reap=13, same_cookie=True)
    it("batch", name="a", places=PLACES[:5], flags=1)
    it("deregister", name="a")
    rows = cufile_rows(rows_of(session))
    assert (rows["kind"] == OpKind.CUFILE_READ_DONE).sum() == 1  # the last of that name
    handed = rows[rows["kind"] == OpKind.CUFILE_READ_BATCH]
    assert handed["result"].tolist() == [0] * 13 + [-5013] * 5


@contextmanager
def watching(filters: Filters, loader: str) -> Iterator[Session]:
    with open_session(["cufile"], filters, loader) as session:
        yield session


@pytest.mark.parametrize("loader", LOADERS)
def test_handles_from_before_have_no_file_and_new_processes_are_seen(
    cufile: Path, kv_file: Path, loader: str
) -> None:
    with program(cufile, "invisible") as early:
        early("register", name="a", path=str(kv_file))
        with watching(Filters(), loader) as session:
            old = early("transfer", name="a", places=PLACES[:7])
            with program(cufile, "invisible") as late:
                late("register", name="a", path=str(kv_file))
                new = late("transfer", name="a", places=PLACES[:13])
            rows = cufile_rows(session.poll()["ops"])
            mine, theirs = rows[rows["tgid"] == early.pid], rows[rows["tgid"] == late.pid]
            assert_exact(theirs, new, PLACES[:13], kv_file)
            assert len(mine) == len(old["done"]) == 7
            assert set(mine["inode"]) == set(mine["fs_device"]) == {0}
            assert mine["offset"].tolist() == [offset for offset, _ in PLACES[:7]]


def test_only_files_below_the_root_count(cufile: Path, tmp_path: Path, kv_file: Path) -> None:
    inside = tmp_path / "kv" / "chunk"
    inside.parent.mkdir()
    inside.write_bytes(bytes(65537))
    with (
        program(cufile, "invisible") as it,
        watching(Filters(root=str(inside.parent)), "core") as session,
    ):
        it("register", name="in", path=str(inside))
        it("register", name="out", path=str(kv_file))
        it("transfer", name="in", places=PLACES[:1] * 11)
        it("transfer", name="out", places=PLACES[:1] * 5)
        assert len(cufile_rows(session.poll()["ops"])) == 11


def test_a_library_that_vanishes_is_still_probed(
    tmp_path: Path, cufile: Path, kv_file: Path
) -> None:
    copy = tmp_path / "libcufile.so.1.13.1"
    copy.write_bytes(cufile.read_bytes())
    with program(copy, "invisible") as it:
        copy.unlink()
        with watching(Filters(tgids=(it.pid,)), "core") as session:
            it("register", name="a", path=str(kv_file))
            it("transfer", name="a", places=PLACES[:3])
            assert len(cufile_rows(session.poll()["ops"])) == 3


def test_a_library_that_is_gone_before_it_is_probed_is_said(
    cufile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cufile.open("rb") as file:
        functions = {"cuFileRead": libraries.exported(file)["cuFileRead"]}
    there = libraries.Library(str(cufile), "/opt/there", functions)
    gone = libraries.Library(str(tmp_path / "gone"), "/opt/gone", functions)
    monkeypatch.setattr(libraries, "find", lambda library: (gone, there))
    with open_session(["cufile"], Filters(), "core") as session:
        assert session.attached["cufile"] == [
            "cuFileRead()",
            "return of cuFileRead()",
            "sched_process_exit",
        ]
        lost = {gap.what: gap for gap in session.missing if gap.what.startswith("/opt")}
    assert set(lost) == {"/opt/gone"}
    assert "No such file" in lost["/opt/gone"].why and "cuFileRead" in lost["/opt/gone"].effect


def test_without_the_library_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "find", lambda library: ())
    with open_session(["cufile", "ops"], Filters(), "core") as session:
        assert "cufile" not in session.attached
        (line,) = [gap for gap in session.missing if "libcufile" in gap.what]
    assert "GPUDirect Storage" in line.effect
