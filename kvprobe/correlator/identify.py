"""Which file each operation and each lookup was about, and whether it is KV traffic.

A file is named by the opens and renames that were seen. Inode numbers are recycled once a file is
gone, so a name holds for an inode only from one open to the next. Which names are KV cache is the
word of the engine's recogniser (``kv_key``). Thread names are never used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.model import Frame
from kvprobe.schema import LookupKind

Ints = NDArray[np.int64]
_NAMING = (LookupKind.OPEN, LookupKind.ALREADY_OPEN)


@dataclass(frozen=True)
class KVFiles:
    """The KV keys of a window and who touched which; -1 is "not KV traffic".

    ``lookup_key`` is -1 also for files that many prompts share: a test of one is no hit or miss.
    """

    keys: tuple[str, ...]
    lookup_key: Ints
    lookup_temporary: NDArray[np.bool_]
    op_key: Ints


def identify(lookups: Frame, ops: Frame) -> KVFiles:
    """Name every operation's file and pick the KV keys.

    Args:
        lookups: frame of the ``lookups`` table with its derived columns.
        ops: frame of the ``ops`` table.
    """
    path_code = _codes(lookups["path"])
    key_of_row = _codes(lookups["kv_key"])
    temporary = lookups["kv_temporary"] == 1
    for row, key in _names_to_be(lookups, path_code, key_of_row):
        key_of_row[row], temporary[row] = key, True
    named = _open_of_ops(lookups, ops)
    return KVFiles(
        keys=tuple(dict.fromkeys(key for key in lookups["kv_key"] if key is not None)),
        lookup_key=np.where(lookups["kv_shared"] == 1, -1, key_of_row),
        lookup_temporary=temporary,
        op_key=np.append(key_of_row, -1)[named],
    )


def _codes(values: NDArray[np.object_]) -> Ints:
    """Dictionary encoding in order of first appearance; None is code -1."""
    codes: dict[str, int] = {}
    encoded = (-1 if v is None else codes.setdefault(v, len(codes)) for v in values)
    return np.fromiter(encoded, np.int64, len(values))


def _names_to_be(lookups: Frame, path_code: Ints, key: Ints) -> list[tuple[int, int]]:
    """Rows of names without a key that were renamed to one with a key: (row, key).

    A rename is two rows of one thread with equal times. An engine may use one temporary name for
    file after file: the rename that follows tells what it was used for.
    """
    done = (lookups["result"] >= 0) & (path_code >= 0)
    call = list(zip(lookups["tid"].tolist(), lookups["end_ns"].tolist(), strict=True))
    new = np.flatnonzero(done & (lookups["kind"] == LookupKind.RENAME_TO) & (key >= 0))
    target = {call[i]: int(key[i]) for i in new.tolist()}
    old = np.flatnonzero(done & (lookups["kind"] == LookupKind.RENAME_FROM) & (key < 0))
    old = np.array([i for i in old.tolist() if call[i] in target], np.int64)
    wanted = np.flatnonzero((key < 0) & np.isin(path_code, path_code[old]))
    # The next rename of that name is the last one when time runs backwards.
    order = old[np.lexsort((-lookups["end_ns"][old], path_code[old]))]
    place = last_not_after(
        path_code[order], -lookups["end_ns"][order], path_code[wanted], -lookups["end_ns"][wanted]
    )
    found = place >= 0
    keys = [target[call[i]] for i in order[place[found]].tolist()]
    return list(zip(wanted[found].tolist(), keys, strict=True))


def _open_of_ops(lookups: Frame, ops: Frame) -> Ints:
    """For each op, the row of the last open of its inode before it started, or -1."""
    naming = np.flatnonzero(
        np.isin(lookups["kind"], _NAMING) & (lookups["inode"] >= 0) & (lookups["result"] >= 0)
    )
    result = np.full(len(ops["start_ns"]), -1, np.int64)
    if not len(naming) or not len(result):
        return result
    identity = np.concatenate([_identity(lookups, naming), _identity(ops, slice(None))])
    _, group = np.unique(identity, axis=0, return_inverse=True)
    group = group.reshape(-1)
    opened, wanted = group[: len(naming)], group[len(naming) :]
    # A descriptor that was open before the window has no time of its own: it names from the start.
    opened_ns = np.where(
        lookups["kind"][naming] == LookupKind.ALREADY_OPEN, 0, lookups["end_ns"][naming]
    )
    order = np.lexsort((opened_ns, opened))
    place = last_not_after(opened[order], opened_ns[order], wanted, ops["start_ns"])
    known = place >= 0
    result[known] = naming[order[place[known]]]
    return result


def _identity(frame: Frame, rows: Ints | slice) -> Ints:
    return np.stack([frame["fs_device"][rows], frame["inode"][rows]], axis=1)


def last_not_after(group: Ints, time: Ints, wanted: Ints, at: Ints) -> Ints:
    """Place of the last entry of group ``wanted`` whose time is <= ``at``; -1 where none.

    ``group`` and ``time`` are sorted by (group, time). Works by ranking times, so that one binary
    search over a combined integer answers all questions at once.
    """
    if not len(group):
        return np.full(len(wanted), -1, np.int64)
    times = np.unique(np.concatenate([time, at]))
    width = len(times) + 1
    entry = group * width + np.searchsorted(times, time)
    question = wanted * width + np.searchsorted(times, at)
    place = np.searchsorted(entry, question, side="right") - 1
    place[(place >= 0) & (group[np.maximum(place, 0)] != wanted)] = -1
    return place
