"""Shared libraries whose functions are probed: which files they are, and where in them.

A library is looked for in the memory maps of all processes, so that containers count with what
they bring themselves, and in the folders of the dynamic linker, for processes that start later.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

PROCFS = Path("/proc")
LINKER_FOLDERS = Path("/etc/ld.so.conf.d")
_USUAL = ("lib64", "usr/lib64", "usr/lib/*-linux-gnu", "usr/local/lib", "usr/local/cuda*/lib64")
_USUAL_TARGETS = "usr/local/cuda*/targets/*/lib"

_ELF64_LITTLE = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<32xQQ6xHHHHH")  # e_phoff, e_shoff, phentsize, phnum, shentsize, shnum ..
_SEGMENT = struct.Struct("<I4xQQ8xQ16x")  # p_type, p_offset, p_vaddr, p_filesz
_SECTION = struct.Struct("<4xI16xQQI12xQ")  # sh_type, sh_offset, sh_size, sh_link, sh_entsize
_SYMBOL = struct.Struct("<IBxHQ8x")  # st_name, st_info, st_shndx, st_value
_PT_LOAD, _SHT_DYNSYM, _FUNCTION = 1, 11, 2
_MOST_BYTES = 16 << 20
"""Of a symbol table or its names: more is no library of this kind."""
_LARGEST_FILE = 1 << 40


@dataclass(frozen=True)
class Library:
    """One file: a path by which this process reaches it, how others see it, its functions.

    ``functions`` maps each exported function to its offset in the file.
    """

    path: str
    name: str
    functions: dict[str, int]


def find(library: str, procfs: Path = PROCFS, root: Path = Path("/")) -> tuple[Library, ...]:
    """Every file of a library, any version of it, that a process has mapped or the linker finds.

    Args:
        library: its name up to ``.so``, as ``libcufile.so``.
        procfs: where procfs is.
        root: below which the linker's folders are.
    """
    found: dict[tuple[int, int], Library] = {}
    for path, name in (*_installed(library, root), *_mapped(library, procfs)):
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity not in found:
                    found[identity] = Library(path, name, exported(file))
        except (OSError, ValueError, struct.error):
            continue  # gone meanwhile, or no library
    return tuple(found.values())


def exported(file: BinaryIO) -> dict[str, int]:
    """Functions that a shared library exports, each with its offset in the file.

    Raises:
        ValueError: not a 64-bit little-endian ELF file, or a damaged one.
    """
    head = _read(file, 0, 64)
    if not head.startswith(_ELF64_LITTLE):
        raise ValueError("not a 64-bit little-endian ELF file")
    segments_at, sections_at, segment_bytes, segments, section_bytes, sections, _ = _HEADER.unpack(
        head
    )
    loaded = [
        (address, size, offset)
        for kind, offset, address, size in _table(
            file, _SEGMENT, segments_at, segment_bytes, segments
        )
        if kind == _PT_LOAD
    ]
    listed = list(_table(file, _SECTION, sections_at, section_bytes, sections))
    found = {}
    for kind, offset, size, link, entry in listed:
        if kind != _SHT_DYNSYM or entry != _SYMBOL.size or link >= len(listed):
            continue
        names = _read(file, listed[link][1], listed[link][2])
        symbols = _read(file, offset, size - size % entry)
        for name, info, section, address in _SYMBOL.iter_unpack(symbols):
            place = next((o + address - a for a, s, o in loaded if a <= address < a + s), None)
            if info & 15 == _FUNCTION and section and place is not None:
                end = names.index(b"\0", name)
                found[names[name:end].decode("ascii", "replace")] = place
    return found


def _table(
    file: BinaryIO, entry: struct.Struct, offset: int, entry_bytes: int, count: int
) -> Iterator[tuple[int, ...]]:
    if count and entry_bytes != entry.size:
        raise ValueError("entries of an unexpected size")
    return entry.iter_unpack(_read(file, offset, entry_bytes * count))


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    if size > _MOST_BYTES or offset > _LARGEST_FILE:
        raise ValueError("too large")
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise ValueError("cut off")
    return data


def _mapped(library: str, procfs: Path) -> Iterator[tuple[str, str]]:
    """Paths that reach what processes have mapped, each with the path that its process sees."""
    path = rf"/.*/{re.escape(library)}[.\d]*"
    wanted = re.compile(rf"^([0-9a-f]+-[0-9a-f]+) .* ({path})(?: \(deleted\))?$")
    own = str(os.getpid())
    seen = set()
    for process in procfs.iterdir():
        if not process.name.isdigit() or process.name == own:
            continue
        try:
            text = (process / "maps").read_text(errors="surrogateescape")
        except OSError:
            continue
        if library not in text:
            continue
        for line in text.splitlines():
            if (match := wanted.match(line)) and (process.name, match[2]) not in seen:
                seen.add((process.name, match[2]))
                # By the mapping itself, because its path may be deleted, or another file's by now.
                yield f"{process}/map_files/{match[1]}", match[2]


def _installed(library: str, root: Path) -> Iterator[tuple[str, str]]:
    folders = [folder for usual in (*_USUAL, _USUAL_TARGETS) for folder in sorted(root.glob(usual))]
    for file in sorted((root / LINKER_FOLDERS.relative_to("/")).glob("*.conf")):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        folders += [root / line.strip().lstrip("/") for line in lines if line.startswith("/")]
    for folder in folders:
        for path in sorted(folder.glob(f"{library}*")):
            if re.fullmatch(r"[.\d]*", path.name.removeprefix(library)):
                yield str(path), str(path)
