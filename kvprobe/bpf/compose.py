"""Join the dialect, generated records, constants and the chosen probes into one C text.

The dialect (``probes/kvprobe.bpf.h``) makes declarations recognisable by name, so nothing is
registered twice: hooks, maps, kernel fields, counters and constants are found in the sources.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvprobe import content, schema
from kvprobe.bpf.catalog import Probe
from kvprobe.errors import KvprobeError

DIALECT = "kvprobe.bpf.h"
SHARED = ("kernel.bpf.h", "filters.bpf.h")
"""Part of every text, before the probes; what they declare belongs to the part ``FILTERS``."""
FILTERS = "filters"

_INCLUDE = re.compile(r'^#include "([\w.]+\.bpf\.h)"$', re.M)
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_HOOK = re.compile(
    r"^(RAW_HOOK|(?:SYSCALL|FUNCTION|LIBRARY)_(?:ENTER|EXIT))\((\w+),([\w,\s]+)\)", re.M
)
_MAP = re.compile(r"^(HASH|LRU_HASH|ARRAY|PER_CPU_ARRAY|RING)\(([^()]*)\);$", re.M)
_FIELD = re.compile(
    r"\b(?:READ|READ_MODULE|ADDRESS|CONTAINER|HAS_FIELD)\(\s*(\w+)\s*,\s*(\w+)\s*[,)]"
)
_TYPE = re.compile(r"\b(?:TYPE_SIZE|HAS_TYPE)\(\s*(\w+)\s*\)")
_COUNTER = re.compile(r"\bCOUNT\(\s*(\w+)\s*,")
_CONSTANT = re.compile(r"\b(CONFIG|SYMBOL|ENUMERATOR|ARGUMENTS)\(\s*(\w+)\s*\)")
_HOOK_KINDS = {
    "RAW_HOOK": "raw",
    "SYSCALL_ENTER": "sys_enter",
    "SYSCALL_EXIT": "sys_exit",
    "FUNCTION_ENTER": "enter",
    "FUNCTION_EXIT": "exit",
    "LIBRARY_ENTER": "library_enter",
    "LIBRARY_EXIT": "library_exit",
}
_MAP_ARGUMENTS = {"HASH": 4, "LRU_HASH": 4, "ARRAY": 3, "PER_CPU_ARRAY": 3, "RING": 1}


@dataclass(frozen=True)
class Hook:
    """A place where a BPF program attaches, and which probe it belongs to."""

    name: str
    kind: str
    """``raw`` (kernel tracepoint), ``sys_enter``, ``sys_exit``, ``enter`` and ``exit`` of a kernel
    function, ``library_enter`` and ``library_exit`` of one that the probe's library exports."""
    event: str
    probe: str
    module: str = ""
    """The kernel module that brings the event or function; empty for the kernel itself."""

    @property
    def label(self) -> str:
        """The place as a person would write it."""
        if self.is_function or self.is_library:
            return f"return of {self.event}()" if self.is_return else f"{self.event}()"
        return self.event if self.kind == "raw" else f"{self.kind}_{self.event}"

    @property
    def is_function(self) -> bool:
        """Whether it takes a function probe (kprobe)."""
        return self.kind in ("enter", "exit")

    @property
    def is_library(self) -> bool:
        """Whether it takes a probe in user space (uprobe)."""
        return self.kind in ("library_enter", "library_exit")

    @property
    def is_return(self) -> bool:
        """Whether it is the end of a function."""
        return self.kind in ("exit", "library_exit")


@dataclass(frozen=True)
class Map:
    """One BPF map as declared. ``key`` and ``value`` are C types, empty for a ring.

    ``users`` are the probes whose sources hold it: several, where they include one file.
    """

    name: str
    kind: str
    key: str
    value: str
    entries: str
    users: tuple[str, ...]

    @property
    def probe(self) -> str:
        """The first of its users."""
        return self.users[0]


@dataclass(frozen=True)
class Source:
    """The composed text and what was found in it.

    ``constants`` are pairs (kind, name), kind being ``config``, ``symbol``, ``enumerator`` or
    ``arguments``, in the order of the 64-bit members of the C structure ``kv_constants``.
    """

    text: str
    hooks: tuple[Hook, ...]
    maps: tuple[Map, ...]
    fields: tuple[tuple[str, str], ...]
    types: tuple[str, ...]
    counters: tuple[str, ...]
    constants: tuple[tuple[str, str], ...]
    plain: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """The kernel modules that hooks name."""
        return _in_order(hook.module for hook in self.hooks if hook.module)


def compose(probes: Sequence[Probe], *, bcc: bool, plain: bool = False) -> Source:
    """Compose these probes for one of the two compilers.

    Args:
        probes: in the order in which their texts come.
        bcc: for bcc, else for clang.
        plain: for clang: without the kernel function ``bpf_rdonly_cast``.

    Raises:
        KvprobeError: a source cannot be read, or two probes use one name.
    """
    folder = content.directory("probes")
    users = {folder / name: [FILTERS] for name in SHARED}
    for probe in probes:
        for path in files_of(probe):
            users.setdefault(path, []).append(probe.name)
    texts = {path: _INCLUDE.sub("", _read(path)) for path in users}
    bare = [(tuple(users[path]), _COMMENT.sub("", text)) for path, text in texts.items()]
    everything = "\n".join(text for _, text in bare)
    hooks = [hook for names, text in bare for hook in _hooks(names[0], text)]
    maps = [item for names, text in bare for item in _maps(names, text)]
    programs = [(found[1], names[0]) for names, text in bare for found in _HOOK.findall(text)]
    _ensure_unique("program", programs)
    _ensure_unique("map", [(item.name, item.probe) for item in maps])
    rings = [item.name for item in maps if item.kind == "RING"]
    row_counters = [f"{what}_{ring}" for ring in rings for what in ("lost", "thinned")]
    counters = _in_order([*row_counters, *_COUNTER.findall(everything)])
    constants = _in_order((kind.lower(), name) for kind, name in _CONSTANT.findall(everything))
    pieces = [
        "#define KV_BCC 1\n" if bcc else "",
        "#define KV_PLAIN 1\n" if plain else "",
        _located(folder / DIALECT, _read(folder / DIALECT)),
        *(schema.c_struct(schema.TABLES[ring]) for ring in rings),
        _counters(counters),
        "" if bcc else _constants(constants),
    ]
    for path, text in texts.items():
        pieces.append(_located(path, _MAP.sub(_with_functions, text) if bcc else text))
    return Source(
        "\n".join(pieces),
        tuple(hooks),
        tuple(maps),
        _in_order(_FIELD.findall(everything)),
        _in_order(_TYPE.findall(everything)),
        counters,
        constants,
        plain,
    )


def files_of(probe: Probe) -> tuple[Path, ...]:
    """A probe's source, and before it the files that it includes from the same folder.

    Raises:
        KvprobeError: a file cannot be read, or files include each other.
    """
    return tuple(dict.fromkeys(_in_reading_order(probe.source, ())))


def _in_reading_order(path: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    if path in above:
        raise KvprobeError(f"{path} includes itself")
    for name in _INCLUDE.findall(_read(path)):
        yield from _in_reading_order(path.parent / name, (*above, path))
    yield path


def kernel_name(structure: str) -> str:
    """The kernel's name of a structure that may be written as a flavour, ``request___mine``."""
    return structure.split("___")[0]


def _hooks(probe: str, text: str) -> list[Hook]:
    found = []
    for macro, program, arguments in _HOOK.findall(text):
        words = [word.strip() for word in arguments.split(",")]
        kind = _HOOK_KINDS[macro]
        if macro.startswith(("SYSCALL", "LIBRARY")):
            found += [Hook(program, kind, call, probe) for call in words]
        elif len(words) <= 2:
            found.append(Hook(program, kind, words[0], probe, *words[1:]))
        else:
            raise KvprobeError(f"probe {probe}: {macro}({program}, ..) has too many arguments")
    return found


def _maps(users: tuple[str, ...], text: str) -> list[Map]:
    probe = users[0]
    found = []
    for kind, arguments in _MAP.findall(text):
        words = [word.strip() for word in arguments.split(",")]
        if len(words) != _MAP_ARGUMENTS[kind]:
            raise KvprobeError(
                f"probe {probe}: {kind}({arguments}) needs {_MAP_ARGUMENTS[kind]} arguments"
            )
        table = schema.TABLES.get(words[0])
        if kind == "RING" and not (table and table.kernel):
            raise KvprobeError(f"probe {probe}: RING({words[0]}) is no kernel table of the schema")
        name, rest = words[0], words[1:]
        key = rest.pop(0) if len(rest) == 3 else "u32"
        value, entries = rest if rest else ("", "")
        found.append(Map(name, kind, key if rest else "", value, entries, users))
    return found


def _with_functions(match: re.Match[str]) -> str:
    """For bcc: after a map's declaration, on the same line, one function per operation."""
    item = _maps(("",), match.group(0))[0]
    name = item.name
    inline = "inline_always"
    if item.kind == "RING":
        row = f"struct kv_{name}"
        functions = [
            f"{inline} {row} *{name}_reserve(void) "
            f"{{ {row} *row = {name}.ringbuf_reserve(sizeof({row})); return row; }}",
            f"{inline} void {name}_submit({row} *row) {{ {name}.ringbuf_submit(row, 1); }}",
        ]
    else:
        functions = [
            f"{inline} {item.value} *{name}_lookup({item.key} *key) "
            f"{{ return ({item.value} *){name}.lookup(key); }}"
        ]
        if item.kind in ("HASH", "LRU_HASH"):
            functions += [
                f"{inline} long {name}_update({item.key} *key, {item.value} *value) "
                f"{{ return {name}.update(key, (struct {name}_bytes *)value); }}",
                f"{inline} long {name}_delete({item.key} *key) {{ return {name}.delete(key); }}",
            ]
    return " ".join([match.group(0), *functions])


def _counters(counters: Sequence[str]) -> str:
    names = ", ".join(f"KV_COUNTER_{name}" for name in counters)
    return (
        f"enum {{ {names}, KV_COUNTERS }};\n"
        "static inline __attribute__((always_inline)) void kv_count(u32 counter, u64 n);\n"
    )


def _constants(constants: Sequence[tuple[str, str]]) -> str:
    members = " ".join(f"u64 {kind}_{name};" for kind, name in constants)
    return (
        f"struct kv_constants {{ {members} }};\n"
        'const volatile struct kv_constants kv_constants SEC(".rodata.constants") = {0};\n'
    )


def _located(path: Path, text: str) -> str:
    """The text with a line directive, so that a compiler's message names the probe's file."""
    return f'#line 1 "{path.name}"\n{text}'


def _read(path: Path) -> str:
    content.ensure_trusted(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvprobeError(f"cannot read {path}: {error}") from error


def _ensure_unique(what: str, named: Iterable[tuple[str, str]]) -> None:
    owners: dict[str, str] = {}
    for name, probe in named:
        if name in owners:
            raise KvprobeError(
                f"probes {owners[name]} and {probe} both have a {what} named {name}",
                "begin every name in a probe with the probe's own name",
            )
        owners[name] = probe


_T = TypeVar("_T", bound=Hashable)


def _in_order(items: Iterable[_T]) -> tuple[_T, ...]:
    """The distinct items in order of first appearance."""
    return tuple(dict.fromkeys(items))
