"""Finding a library's files and functions: in processes' maps, in the linker's folders."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.bpf import catalog, libraries, machine
from kvprobe.bpf.libraries import exported, find

NAME = "libcufile.so"


def processes(folder: Path, *mapped: tuple[int, str, Path]) -> Path:
    """A procfs in which each process has one file mapped, under a path of its own."""
    procfs = folder / "proc"
    for pid, path, file in mapped:
        (procfs / str(pid) / "map_files").mkdir(parents=True)
        (procfs / str(pid) / "map_files/7f00-7f10").symlink_to(file)
        lines = [
            "55a0-55b0 r-xp 00000000 00:1b 10 /usr/bin/python3.11",
            f"7f00-7f10 r-xp 00000000 00:1b 11 {path}",
            "7ffd-7ffe rw-p 00000000 00:00 0 [stack]",
        ]
        (procfs / str(pid) / "maps").write_text("\n".join(lines) + "\n")
    procfs.mkdir(exist_ok=True)
    (procfs / "version").write_text("Linux")
    return procfs


def test_functions_are_where_nm_says(cufile: Path) -> None:
    """The stand-in's segments begin at 0, so addresses and offsets of its code differ by none."""
    with cufile.open("rb") as file:
        found = exported(file)
    printed = subprocess.run(["nm", "-D", cufile], capture_output=True, text=True, check=True)
    words = [line.split() for line in printed.stdout.splitlines()]
    assert found == {line[2]: int(line[0], 16) for line in words if line[1:2] == ["T"]}
    assert {"cuFileRead", "cuFileBatchIOSubmit"} <= set(found)


def test_an_offset_in_the_file_is_no_address(tmp_path: Path) -> None:
    source = tmp_path / "moved.c"
    source.write_text("int before(void) { return 1; }\nint cuFileRead(void) { return 3511; }\n")
    library = tmp_path / "libmoved.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-nostdlib", "-Wl,-Ttext-segment=0x400000", source,
         "-o", library],
        check=True,
    )  # fmt: skip
    with library.open("rb") as file:
        offset = exported(file)["cuFileRead"]
        file.seek(offset)
        code = file.read(16)
    assert (3511).to_bytes(4, "little") in code


@given(st.binary(max_size=300))
def test_what_is_no_library_is_refused(noise: bytes) -> None:
    place = Path(f"/proc/self/fd/{os.memfd_create('noise')}")
    place.write_bytes(b"\x7fELF\x02\x01" + noise)
    try:
        with place.open("rb") as file, pytest.raises(ValueError):
            exported(file)
    finally:
        os.close(int(place.name))


def test_a_damaged_library_never_raises_anything_else(cufile: Path, tmp_path: Path) -> None:
    whole = bytearray(cufile.read_bytes())
    damaged = tmp_path / "damaged.so"
    for place in [*range(0, 64), *range(len(whole) - 1024, len(whole), 7)]:
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        damaged.write_bytes(changed)
        with damaged.open("rb") as file:
            try:
                exported(file)
            except ValueError:
                continue


def test_each_file_is_found_once_by_the_name_its_process_knows(
    cufile: Path, tmp_path: Path
) -> None:
    other = tmp_path / "container" / "libcufile.so.1.13.1"
    other.parent.mkdir()
    other.write_bytes(cufile.read_bytes())
    inside = "/usr/local/cuda/targets/x86_64-linux/lib/libcufile.so.1.13.1"
    procfs = processes(
        tmp_path,
        (11, "/opt/a/libcufile.so.0", cufile),
        (12, "/opt/a/libcufile.so.0", cufile),
        (13, inside, other),
        (14, "/opt/a/libcufile_rdma.so.1", other),
        (15, "/opt/b/libcufile.so.1.2 (deleted)", cufile),
        (os.getpid(), "/opt/own/libcufile.so.0", other),
    )
    found = find(NAME, procfs, tmp_path)
    assert sorted(library.name for library in found) == ["/opt/a/libcufile.so.0", inside]
    assert all("cuFileRead" in library.functions for library in found)


def test_the_linker_s_folders_count_for_processes_to_come(cufile: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for folder in ("etc/ld.so.conf.d", "usr/local/cuda-12.8/lib64", "opt/lib", "usr/lib64"):
        (root / folder).mkdir(parents=True)
    (root / "etc/ld.so.conf.d/cuda.conf").write_text("# a comment\n/opt/lib\n/not/there\n")
    procfs = processes(tmp_path)
    assert find(NAME, procfs, root) == ()
    copy = root / "opt/lib/libcufile.so.1.11.0"
    copy.write_bytes(cufile.read_bytes())
    (root / "usr/lib64/libcufile.so").symlink_to(copy)
    (root / "usr/lib64/libcufile.so.bak").write_bytes(cufile.read_bytes())
    (root / "usr/local/cuda-12.8/lib64/libcufile.so.0").write_bytes(b"no library")
    (found,) = find(NAME, procfs, root)
    assert os.path.samefile(found.path, copy)


def test_without_a_library_the_probe_has_nothing_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = catalog.available()["cufile"]
    monkeypatch.setattr(libraries, "find", lambda library: ())
    here, (line,) = machine.present([probe, catalog.available()["ops"]])
    assert [each.name for each in here] == ["ops"]
    assert (line.what, line.why) == ("library libcufile.so", "it is not here")
