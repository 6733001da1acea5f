"""Layouts and names of the running kernel, read from its BTF: no headers, no external tool.

BTF is the kernel's own type description (``/sys/kernel/btf``; format: ``Documentation/bpf/btf.rst``
in the kernel source). A type is a record of variable length, so finding record N means walking all
records before it. That walk is done once, over 32-bit words; everything else is an array search.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvprobe.errors import ExitCode, KvprobeError

VMLINUX = Path("/sys/kernel/btf/vmlinux")
TRACEPOINT_TYPEDEF = "btf_trace_"

_MAGIC = 0xEB9F
_HEADER = struct.Struct("<HBBIIIII")
_INT, _PTR, _ARRAY, _STRUCT, _UNION, _ENUM, _FWD, _TYPEDEF = 1, 2, 3, 4, 5, 6, 7, 8
_VOLATILE, _CONST, _RESTRICT, _FUNC, _FUNC_PROTO, _VAR, _DATASEC = 9, 10, 11, 12, 13, 14, 15
_FLOAT, _DECL_TAG, _TYPE_TAG, _ENUM64 = 16, 17, 18, 19
_TRANSPARENT = frozenset((_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _TYPE_TAG))

_WORDS = {
    **dict.fromkeys((_PTR, _FWD, _TYPEDEF, _VOLATILE, _CONST, _RESTRICT), (3, 0)),
    **dict.fromkeys((_FUNC, _FLOAT, _TYPE_TAG), (3, 0)),
    **dict.fromkeys((_INT, _VAR, _DECL_TAG), (4, 0)),
    **dict.fromkeys((_STRUCT, _UNION, _DATASEC, _ENUM64), (3, 3)),
    **dict.fromkeys((_ENUM, _FUNC_PROTO), (3, 2)),
    _ARRAY: (6, 0),
}
"""Length of a record in 32-bit words by kind: fixed part, and per element."""
_MAX_NESTING = 64
"""Longest chain of typedefs, or of anonymous members in each other; a longer one is a cycle."""


@dataclass(frozen=True)
class Field:
    """Where a member is. ``bits`` is 0 unless it is a bit field, then ``bit_offset`` counts."""

    offset: int
    size: int
    bit_offset: int = 0
    bits: int = 0


class _RecordLength(dict[int, int]):
    """Words of a record by its ``info`` word; few differ, so nearly all look-ups are hits."""

    def __missing__(self, info: int) -> int:
        fixed, per_element = _WORDS[(info >> 24) & 0x1F]
        self[info] = fixed + per_element * (info & 0xFFFF)
        return self[info]


class Btf:
    """One BTF image: vmlinux, or a module on top of its ``base``.

    Args:
        data: the image.
        base: the image that type ids and string offsets continue; modules need vmlinux here.
        source: named in errors.

    Raises:
        KvprobeError: the image is not BTF, is cut short, or its records do not add up.
    """

    def __init__(self, data: bytes, base: Btf | None = None, source: str = "BTF") -> None:
        self._source = source
        self._base = base
        if len(data) < _HEADER.size:
            raise self._broken("shorter than its header")
        magic, version, _flags, header, type_at, type_bytes, str_at, str_bytes = (
            _HEADER.unpack_from(data)
        )
        if magic != _MAGIC or version != 1:
            raise self._broken("no little-endian BTF version 1")
        if header + type_at + type_bytes > len(data) or header + str_at + str_bytes > len(data):
            raise self._broken("cut short")
        if type_bytes % 4 or (header + type_at) % 4:
            raise self._broken("type section is not aligned")
        start = header + str_at
        self._strings = data[start : start + str_bytes]
        self._words: NDArray[np.uint32] = np.frombuffer(
            data, "<u4", type_bytes // 4, header + type_at
        )
        self._first_id = base.type_count if base else 1
        self._first_string = base._string_end if base else 0
        self._at = self._index()
        self._found: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}

    @classmethod
    def load(cls, path: Path = VMLINUX, base: Btf | None = None) -> Btf:
        """Read an image from sysfs or a file.

        Raises:
            KvprobeError: no such file, not readable, or not BTF.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise KvprobeError(
                f"cannot read kernel type information at {path}: {error.strerror}",
                "kvprobe needs a kernel built with CONFIG_DEBUG_INFO_BTF; see: kvprobe doctor",
                ExitCode.UNSUPPORTED,
            ) from error
        return cls(data, base, str(path))

    @property
    def type_count(self) -> int:
        """The first type id after this image; id 0 (``void``) is counted."""
        return self._first_id + len(self._at)

    # ------------------------------------------------------------ questions

    def field(self, struct_name: str, path: str) -> Field | None:
        """Find a member of a struct or union; None where this kernel has no such member.

        Args:
            struct_name: tag without ``struct``.
            path: member name, or names joined by dots through embedded structs. Members of
                anonymous structs and unions are found by their own name.

        Raises:
            KvprobeError: two structs of that name place the member differently.
        """
        places = set()
        for type_id in self._ids(struct_name, (_STRUCT, _UNION)):
            place = self._walk(type_id, path.split("."))
            if place is not None:
                places.add(place)
        if len(places) > 1:
            raise self._broken(f"struct {struct_name} has two layouts for {path}")
        return places.pop() if places else None

    def size(self, struct_name: str) -> int | None:
        """Bytes of a struct or union; None where the kernel has none of that name."""
        for type_id in self._ids(struct_name, (_STRUCT, _UNION)):
            return self._size(type_id)
        return None

    def enumerator(self, name: str) -> int | None:
        """Value of an enumerator in any enum; None where there is none of that name."""
        for offset in self._string_offsets(name):
            for kind, step in ((_ENUM, 2), (_ENUM64, 3)):
                value = self._enumerator(offset, kind, step)
                if value is not None:
                    return value
        return self._base.enumerator(name) if self._base else None

    def has_function(self, name: str) -> bool:
        """Whether the kernel has a function of that name (it may still not be traceable)."""
        return bool(self._ids(name, (_FUNC,)))

    def has_string(self, name: str) -> bool:
        """Whether anything in this image or its base has this name."""
        return next(self._string_offsets(name), None) is not None

    def tracepoint_args(self, name: str) -> int | None:
        """How many arguments a raw tracepoint passes; None where there is no such tracepoint."""
        for type_id in self._ids(TRACEPOINT_TYPEDEF + name, (_TYPEDEF,)):
            kind, count, target = self._head(self._target(type_id))
            if kind == _PTR:
                kind, count, _ = self._head(target)
            if kind == _FUNC_PROTO and count > 0:
                return count - 1  # the first parameter is the registration's private data
        return None

    # ------------------------------------------------------------ records

    def _index(self) -> NDArray[np.int64]:
        """Word position of each record, by type id from ``_first_id``."""
        words = memoryview(self._words.data)
        length = _RecordLength()
        positions: list[int] = []
        at, end = 0, len(words)
        try:
            while at < end:
                positions.append(at)
                at += length[words[at + 1]]
        except (IndexError, KeyError):
            raise self._broken("a record of an unknown kind, or cut short") from None
        if at != end:
            raise self._broken("records run past the end")
        return np.array(positions, np.int64)

    @cached_property
    def _names(self) -> NDArray[np.uint32]:
        return self._words[self._at]

    @cached_property
    def _kinds(self) -> NDArray[np.int64]:
        return (self._words[self._at + 1].astype(np.int64) >> 24) & 0x1F

    @property
    def _string_end(self) -> int:
        return self._first_string + len(self._strings)

    def _string_offsets(self, name: str) -> Iterator[int]:
        """Offsets where exactly ``name`` stands, the base's first: a module shares its strings."""
        if self._base:
            yield from self._base._string_offsets(name)
        wanted = b"\0" + name.encode() + b"\0"
        found = self._strings.find(wanted)
        while found >= 0:
            yield self._first_string + found + 1
            found = self._strings.find(wanted, found + 1)

    def _ids(self, name: str, kinds: tuple[int, ...]) -> tuple[int, ...]:
        """Type ids with this name and one of these kinds; a module's image asks its base first."""
        key = (name, kinds)
        if key not in self._found:
            own = self._find_ids(name, kinds)
            self._found[key] = (self._base._ids(name, kinds) if self._base else ()) + own
        return self._found[key]

    def _find_ids(self, name: str, kinds: tuple[int, ...]) -> tuple[int, ...]:
        # Strings are normally stored once, so the first place that names a type ends the search.
        for offset in self._string_offsets(name):
            places = np.flatnonzero(self._names == offset).tolist()
            ids = tuple(self._first_id + i for i in places if int(self._kinds[i]) in kinds)
            if ids:
                return ids
        return ()

    def _owner(self, type_id: int) -> tuple[Btf, int]:
        """The image that holds a type and the word position of its record."""
        if type_id < self._first_id and self._base:
            return self._base._owner(type_id)
        index = type_id - self._first_id
        if not 0 <= index < len(self._at):
            raise self._broken(f"type id {type_id} is out of range")
        return self, int(self._at[index])

    def _head(self, type_id: int) -> tuple[int, int, int]:
        """Kind, element count and size-or-type of a record; ``void`` is kind 0."""
        if type_id == 0:
            return 0, 0, 0
        owner, at = self._owner(type_id)
        info = int(owner._words[at + 1])
        return (info >> 24) & 0x1F, info & 0xFFFF, int(owner._words[at + 2])

    def _target(self, type_id: int) -> int:
        """The type behind typedefs and qualifiers."""
        for _ in range(_MAX_NESTING):
            kind, _count, target = self._head(type_id)
            if kind not in _TRANSPARENT:
                return type_id
            type_id = target
        raise self._broken("a typedef refers to itself")

    def _size(self, type_id: int, depth: int = 0) -> int:
        if depth > _MAX_NESTING:
            raise self._broken("an array contains itself")
        type_id = self._target(type_id)
        kind, _count, size = self._head(type_id)
        if kind == _PTR:
            return 8
        if kind == _ARRAY:
            owner, at = self._owner(type_id)
            element, _index, length = owner._words[at + 3 : at + 6].tolist()
            return int(length) * self._size(int(element), depth + 1)
        return size if kind in (_INT, _STRUCT, _UNION, _ENUM, _FLOAT, _ENUM64) else 0

    def _members(self, type_id: int) -> Iterator[tuple[str, int, int, int]]:
        """Name, type, bit offset and bit-field width (0: none) of each member."""
        owner, at = self._owner(type_id)
        info = int(owner._words[at + 1])
        packed = bool(info >> 31)
        rows = owner._words[at + 3 : at + 3 + 3 * (info & 0xFFFF)].reshape(-1, 3).tolist()
        for name, member_type, offset in rows:
            bits = offset >> 24 if packed else 0
            yield owner._text(name), member_type, offset & 0xFFFFFF if packed else offset, bits

    def _text(self, offset: int) -> str:
        if offset < self._first_string and self._base:
            return self._base._text(offset)
        start = offset - self._first_string
        end = self._strings.find(b"\0", start)
        if not 0 <= start < len(self._strings) or end < 0:
            raise self._broken(f"name offset {offset} is out of range")
        return self._strings[start:end].decode("utf-8", "replace")

    def _walk(self, type_id: int, names: list[str]) -> Field | None:
        bit_offset = bits = 0
        for name in names:
            step = self._member(self._target(type_id), name)
            if step is None:
                return None
            type_id, member_offset, bits = step
            bit_offset += member_offset
        if bits:
            return Field(bit_offset // 8, (bits + 7) // 8, bit_offset % 8, bits)
        return Field(bit_offset // 8, self._size(type_id))

    def _member(self, type_id: int, name: str, depth: int = 0) -> tuple[int, int, int] | None:
        """Type, bit offset and bit-field width of a member, anonymous members searched too."""
        if depth > _MAX_NESTING:
            raise self._broken("a struct contains itself")
        if self._head(type_id)[0] not in (_STRUCT, _UNION):
            return None
        for found, member_type, offset, bits in self._members(type_id):
            if found == name:
                return member_type, offset, bits
            if not found:
                inner = self._member(self._target(member_type), name, depth + 1)
                if inner:
                    return inner[0], offset + inner[1], inner[2]
        return None

    def _enumerator(self, name_offset: int, kind: int, step: int) -> int | None:
        """Search the enums of one kind for an enumerator with this name."""
        for hit in np.flatnonzero(self._words == name_offset).tolist():
            index = int(np.searchsorted(self._at, hit, "right")) - 1
            at = int(self._at[index])
            if hit < at + 3 or (hit - at - 3) % step or int(self._kinds[index]) != kind:
                continue
            width = 64 if kind == _ENUM64 else 32
            value = int(self._words[hit + 1])
            if kind == _ENUM64:
                value |= int(self._words[hit + 2]) << 32
            signed = bool(int(self._words[at + 1]) >> 31)
            return value - (1 << width) if signed and value >> (width - 1) else value
        return None

    def _broken(self, what: str) -> KvprobeError:
        return KvprobeError(
            f"kernel type information in {self._source} is damaged: {what}",
            "check the file with: bpftool btf dump file PATH",
            ExitCode.UNSUPPORTED,
        )
