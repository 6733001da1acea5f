"""Hand-made rows of the kernel tables, with defaults for what a test does not care about."""

from __future__ import annotations

from typing import Any

from kvprobe.capture.frames import frame_from_dicts
from kvprobe.model import Frame
from kvprobe.schema import TABLES, BlockMethod, LookupKind, OpKind

FS = 0x700003
DISK = 0x700003


def frame(table: str, rows: list[dict[str, Any]]) -> Frame:
    return frame_from_dicts(TABLES[table], rows)


def key_of(path: str) -> tuple[str | None, int]:
    """The rule of these tests: NAME.bin is KV cache, NAME.bin.tmp its temporary name."""
    name = path.rsplit("/", 1)[-1]
    if name.endswith(".bin.tmp"):
        return name.removesuffix(".bin.tmp"), 1
    return (name.removesuffix(".bin"), 0) if name.endswith(".bin") else (None, -1)


def lookup(kind: LookupKind, path: str, at: int, **more: Any) -> dict[str, Any]:
    key, temporary = key_of(path)
    return {
        "start_ns": at,
        "end_ns": at + 3,
        "tgid": 10,
        "tid": 11,
        "result": 0,
        "kind": kind,
        "cut": 0,
        "path": path,
        "kv_key": key,
        "kv_temporary": temporary,
        "fs_device": FS,
    } | more


def opened(path: str, at: int, inode: int, **more: Any) -> dict[str, Any]:
    return lookup(LookupKind.OPEN, path, at, inode=inode, **({"open_flags": 0} | more))


def renamed(old: str, new: str, at: int, **more: Any) -> list[dict[str, Any]]:
    return [
        lookup(LookupKind.RENAME_FROM, old, at, **more),
        lookup(LookupKind.RENAME_TO, new, at, **more),
    ]


def op(start: int, end: int, inode: int = 7, offset: int = 0, **more: Any) -> dict[str, Any]:
    requested = more.get("requested", 4096)
    return {
        "start_ns": start,
        "end_ns": end,
        "inode": inode,
        "offset": offset,
        "requested": requested,
        "result": requested,
        "fs_device": FS,
        "tgid": 10,
        "tid": 21,
        "kind": OpKind.PREAD64,
        "direct": 1,
        "reserved": 0,
    } | more


def block(queued: int, done: int, inode: int = 7, offset: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "queued_ns": queued,
        "issued_ns": queued,
        "done_ns": done,
        "inode": inode,
        "offset": offset,
        "bytes": 4096,
        "sector": 8,
        "device": DISK,
        "fs_device": FS,
        "tgid": 10,
        "tid": 21,
        "flags": 0,
        "op": 0,
        "method": BlockMethod.DIRECT,
        "status": 0,
        "held": 0,
    } | more
