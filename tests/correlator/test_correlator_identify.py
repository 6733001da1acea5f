"""Which file an operation was about: recycled inodes, temporary names, descriptors open before."""

import errno
from typing import Any

from kvprobe.correlator.identify import KVFiles, identify
from kvprobe.schema import LookupKind, OpKind
from tests.correlator.rows import FS, frame, lookup, op, opened, renamed

Rows = list[dict[str, Any]]


def names(lookups: Rows, ops: Rows) -> list[str | None]:
    """The KV key of each operation."""
    files = identify(frame("lookups", lookups), frame("ops", ops))
    return [files.keys[k] if k >= 0 else None for k in files.op_key]


def of_lookups(lookups: Rows) -> tuple[list[str | None], list[bool]]:
    files: KVFiles = identify(frame("lookups", lookups), frame("ops", []))
    keys = [files.keys[k] if k >= 0 else None for k in files.lookup_key]
    return keys, files.lookup_temporary.tolist()


def test_an_inode_is_named_by_its_last_open() -> None:
    lookups = [opened("/kv/a.bin", 100, 7), opened("/kv/b.bin", 200, 7)]
    ops = [op(110, 120), op(203, 210), op(202, 210), op(900, 901)]
    assert names(lookups, ops) == ["a", "b", "a", "b"]


def test_a_recycled_inode_that_is_no_kv_file_any_more() -> None:
    lookups = [opened("/kv/a.bin", 100, 7), opened("/var/log/x", 200, 7)]
    assert names(lookups, [op(110, 120), op(210, 220)]) == ["a", None]


def test_operations_before_any_open_stay_unnamed() -> None:
    lookups = [opened("/kv/a.bin", 100, 7)]
    assert names(lookups, [op(50, 60), op(102, 120), op(103, 120)]) == [None, None, "a"]


def test_a_descriptor_open_before_the_window_names_from_the_start() -> None:
    already = lookup(LookupKind.ALREADY_OPEN, "/kv/a.bin", 5000, inode=7)
    lookups = [already, opened("/kv/b.bin", 6000, 7)]
    assert names(lookups, [op(50, 60), op(5500, 5600), op(6003, 6100)]) == ["a", "a", "b"]


def test_failed_opens_name_nothing() -> None:
    lookups = [
        opened("/kv/a.bin", 100, 7),
        opened("/kv/b.bin", 200, 7, result=-errno.EACCES),
    ]
    assert names(lookups, [op(210, 220)]) == ["a"]


def test_equal_inodes_of_two_file_systems_are_two_files() -> None:
    lookups = [opened("/kv/a.bin", 100, 7), opened("/mnt/b.bin", 200, 7, fs_device=FS + 1)]
    ops = [op(300, 310), op(300, 310, fs_device=FS + 1), op(300, 310, fs_device=FS + 2)]
    assert names(lookups, ops) == ["a", "b", None]


def test_files_that_no_recogniser_knows_are_not_kv() -> None:
    assert names([opened("/etc/passwd", 100, 7)], [op(200, 210)]) == [None]


def test_a_temporary_name_with_its_own_key() -> None:
    lookups = [opened("/kv/a.bin.tmp", 100, 7), *renamed("/kv/a.bin.tmp", "/kv/a.bin", 300)]
    assert names(lookups, [op(200, 210, kind=OpKind.WRITE)]) == ["a"]
    assert of_lookups(lookups)[1] == [True, True, False]


def test_a_temporary_name_without_key_gets_the_key_it_is_renamed_to() -> None:
    lookups = [opened("/kv/.t1", 100, 7), *renamed("/kv/.t1", "/kv/a.bin", 300)]
    assert names(lookups, [op(200, 210, kind=OpKind.WRITE)]) == ["a"]
    assert of_lookups(lookups) == (["a", "a", "a"], [True, True, False])


def test_one_temporary_name_used_for_file_after_file() -> None:
    lookups: Rows = []
    for number, key in enumerate(("a", "b", "c")):
        at = 1000 * number
        lookups += [
            opened("/kv/.scratch", at, 7),
            *renamed("/kv/.scratch", f"/kv/{key}.bin", at + 500),
        ]
    lookups.append(opened("/kv/.scratch", 3000, 7))
    ops = [op(1000 * number + 100, 1000 * number + 200) for number in range(4)]
    assert names(lookups, ops) == ["a", "b", "c", None]


def test_failed_renames_do_not_name() -> None:
    lookups = [
        opened("/kv/.t1", 100, 7),
        *renamed("/kv/.t1", "/kv/a.bin", 300, result=-errno.EXDEV),
    ]
    assert names(lookups, [op(200, 210)]) == [None]
    assert of_lookups(lookups) == ([None, None, "a"], [False, False, False])


def test_renames_of_two_threads_at_one_time_do_not_mix() -> None:
    first, second = (
        renamed("/kv/.t1", "/kv/a.bin", 300, tid=1),
        renamed("/kv/.t2", "/kv/b.bin", 300, tid=2),
    )
    lookups = [
        opened("/kv/.t1", 100, 7),
        opened("/kv/.t2", 100, 8),
        first[0],
        second[0],
        second[1],
        first[1],
    ]
    assert names(lookups, [op(200, 210, inode=7), op(200, 210, inode=8)]) == ["a", "b"]


def test_a_final_name_that_is_moved_away_stays_a_final_name() -> None:
    lookups = [
        lookup(LookupKind.ACCESS, "/kv/a.bin", 100),
        *renamed("/kv/a.bin", "/trash/1", 300),
        lookup(LookupKind.ACCESS, "/kv/a.bin", 400, result=-errno.ENOENT),
    ]
    assert of_lookups(lookups) == (["a", "a", None, "a"], [False] * 4)


def test_rows_without_a_path_keep_the_key_they_have() -> None:
    row = lookup(LookupKind.ACCESS, "/kv/a.bin", 100) | {"path": None}
    bare = lookup(LookupKind.ACCESS, "/kv/x", 100) | {"path": None}
    moved = [r | {"path": None} for r in renamed("/kv/x", "/kv/b.bin", 300)]
    assert of_lookups([row, bare, *moved])[0] == ["a", None, None, "b"]


def test_empty_tables() -> None:
    assert names([], [op(100, 110)]) == [None]
    assert names([opened("/kv/a.bin", 100, 7)], []) == []
