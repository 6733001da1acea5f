"""The finished capture: one ZIP with ``manifest.json`` and a Parquet file per table.

Members are stored, not deflated: Parquet is compressed already, a reader needs no further bound
against inflation, and the CRC of a member is checked before its bytes reach pyarrow.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from kvprobe.capture.frames import empty_frame
from kvprobe.capture.manifest import FORMAT, FORMAT_VERSION, Manifest
from kvprobe.capture.typed_json import MAX_BYTES, from_json, parse_json, to_json
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import Frame
from kvprobe.schema import TABLES, Table

MANIFEST = "manifest.json"
MAX_MEMBERS = 64
MAX_MEMBER_BYTES = 8 << 30
_LOCAL_HEADER = b"PK\x03\x04"
_NAME_AT = 30
_RECAPTURE = "the file was cut or changed after it was written: copy it again"


# ---------------------------------------------------------------- writing


def write_archive(
    path: Path,
    manifest: Manifest,
    tables: Mapping[str, Iterable[Frame]],
    derived: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Write a capture to ``path``, which must not exist; returns rows per table.

    A table without rows is left out. ``progress`` is told the rows written so far. The bytes are
    on the disk when this returns.

    Raises:
        OSError: the disk is full or gone; ``path`` is removed again.
    """
    from kvprobe.capture.parquet import TableWriter

    counts: dict[str, int] = {}
    try:
        with open(path, "xb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                archive.writestr(zipfile.ZipInfo(MANIFEST), to_json(manifest))
                for name, parts in tables.items():
                    iterator = iter(parts)
                    first = next(iterator, None)
                    if first is None:
                        continue
                    with archive.open(
                        zipfile.ZipInfo(f"{name}.parquet"), "w", force_zip64=True
                    ) as member:
                        writer = TableWriter(member, TABLES[name], derived)
                        for frame in _chain(first, iterator):
                            writer.write(frame)
                            if progress is not None:
                                progress(sum(counts.values()) + writer.rows)
                        writer.close()
                        counts[name] = writer.rows
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return counts


def _chain(first: Frame, rest: Iterator[Frame]) -> Iterator[Frame]:
    yield first
    yield from rest


# ---------------------------------------------------------------- reading


class Archive:
    """A finished capture, open for reading.

    Raises:
        KvprobeError: not a capture (exit 2), made by a newer kvprobe (2), or damaged (4).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.notes: list[str] = []
        self._file = _open(path)
        try:
            ours = _looks_like_ours(self._file, path)
            try:
                self._zip = zipfile.ZipFile(self._file)
                self._members = _check_members(self._zip, os.fstat(self._file.fileno()).st_size)
            except (ValueError, OSError, zipfile.BadZipFile, NotImplementedError) as error:
                raise _damaged(path, str(error)) if ours else _foreign(path) from error
            self.manifest = self._read_manifest()
        except BaseException:
            self._file.close()
            raise

    def frame(self, table: Table) -> Frame:
        """The rows of one table.

        Raises:
            KvprobeError: this table is damaged (exit 4).
        """
        from kvprobe.capture.parquet import DamagedTable, read_table

        name = f"{table.name}.parquet"
        if name not in self._members:
            return empty_frame(table)
        try:
            frame, beyond = read_table(self._read(name), table)
        except DamagedTable as error:
            raise _damaged(self._path, f"table {table.name}: {error}") from error
        self.notes += [
            f"{table.name}.{column}: {count} values are beyond all bounds and taken as unknown"
            for column, count in beyond.items()
        ]
        return frame

    def close(self) -> None:
        """Close the file; frames already read stay."""
        self._file.close()

    def _read_manifest(self) -> Manifest:
        if MANIFEST not in self._members:
            raise _foreign(self._path)
        return parse_manifest(self._read(MANIFEST, MAX_BYTES), self._path)

    def _read(self, name: str, limit: int = MAX_MEMBER_BYTES) -> bytes:
        """A member's bytes, its CRC checked."""
        member = self._members[name]
        if member.file_size > limit:
            raise _damaged(self._path, f"{name} is larger than {limit} bytes")
        try:
            return self._zip.read(member)
        except (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
            raise _damaged(self._path, f"{name}: {error}") from error


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """The manifest in ``data``.

    Raises:
        KvprobeError: not a capture's manifest (exit 2), of a newer format (2), or damaged (4).
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        raise _damaged(path, f"{MANIFEST}: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _foreign(path)
    version = value.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise KvprobeError(
            f"{path} was made by a newer kvprobe (format {version}), "
            f"this one reads up to {FORMAT_VERSION}",
            "upgrade kvprobe on this machine",
        )
    try:
        return from_json(Manifest, value)
    except ValueError as error:
        raise _damaged(path, f"{MANIFEST}: {error}") from error


def _open(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise KvprobeError(
            f"cannot open {path}: {error.strerror}", "name a file made by kvprobe capture"
        ) from error


def _looks_like_ours(file: IO[bytes], path: Path) -> bool:
    """Whether the first bytes are those of a capture, so that what follows is damage."""
    head = file.read(_NAME_AT + len(MANIFEST))
    if not head:
        raise KvprobeError(f"{path} is empty", "name a file made by kvprobe capture")
    return head.startswith(_LOCAL_HEADER) and head[_NAME_AT:] == MANIFEST.encode()


def _check_members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """The members by name.

    Raises:
        ValueError: names, sizes or methods that no capture has.
    """
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"{len(members)} members")
    for member in members:
        if not member.filename.replace(".", "").replace("_", "").isalnum():
            raise ValueError(f"member name {member.filename!r}")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 0x1:
            raise ValueError(f"member {member.filename} is packed or encrypted")
    if sum(member.file_size for member in members) > size:
        raise ValueError("members are larger than the file")
    if len({member.filename for member in members}) != len(members):
        raise ValueError("two members of one name")
    return {member.filename: member for member in members}


def _foreign(path: Path) -> KvprobeError:
    return KvprobeError(f"{path} is not a kvprobe capture", "name a file made by kvprobe capture")


def _damaged(path: Path, why: str) -> KvprobeError:
    return KvprobeError(f"{path} is damaged: {why}", _RECAPTURE, ExitCode.INCOMPLETE)
