"""The chain that serves a path, as a tree for people: one line a layer, then its queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from kvprobe.commands._terminal import Style
from kvprobe.sources.nvme import short_address
from kvprobe.sources.queues import HardwareQueue, ranges
from kvprobe.sources.topology import Kind, Layer
from kvprobe.units import size

_QUEUES_SHOWN = 8
"""More queues than this are shown together where they are alike."""


def chain_lines(layer: Layer, style: Style) -> Iterator[str]:
    """The tree. Lines may be longer than the width: names are not cut."""
    yield _line(layer)
    yield from _branches(layer, style)


def queues_in_words(io_queues: int) -> str:
    """How many I/O queues a controller has, the admin queue left out."""
    return f"{io_queues} I/O queue" + ("" if io_queues == 1 else "s")


def _branches(layer: Layer, style: Style) -> Iterator[str]:
    on, last, bar = ("|- ", "`- ", "|  ") if style.ascii_only else ("├─ ", "└─ ", "│  ")
    queues = list(_queue_lines(layer))
    for index, below in enumerate(layer.below):
        ends = index == len(layer.below) - 1 and not queues
        yield (last if ends else on) + _line(below)
        yield from (("   " if ends else bar) + line for line in _branches(below, style))
    for index, line in enumerate(queues):
        yield (last if index == len(queues) - 1 else on) + line


def _line(layer: Layer) -> str:
    number = layer.device
    place = f" ({number >> 20}:{number & 0xFFFFF})" if number is not None else ""
    words = [word for word in _WORDS[layer.kind](layer) if word]
    return f"{layer.name}{place}: {', '.join(words)}"


def _mount(layer: Layer) -> list[str]:
    return [str(layer.facts["filesystem"]), str(layer.facts.get("why") or "")]


def _volume(layer: Layer) -> list[str]:
    volume = layer.facts.get("volume")
    made_by = str(layer.facts.get("made_by") or "dm volume")
    return [f"{made_by} {volume}" if volume else made_by, _size(layer)]


def _raid(layer: Layer) -> list[str]:
    chunk = layer.facts.get("chunk_bytes")
    return [
        str(layer.facts.get("level") or "md"),
        _size(layer),
        f"chunks of {_size_of(chunk)}" if chunk else "",
    ]


def _loop(layer: Layer) -> list[str]:
    why = layer.facts.get("why")
    return [
        f"loop device on {layer.facts.get('backing_file') or 'nothing'}",
        _size(layer),
        str(why or ""),
    ]


def _head(layer: Layer) -> list[str]:
    facts = layer.facts
    return [
        "NVMe multipath disk",
        _size(layer),
        f"namespace {_or_unknown(facts.get('nsid'))} of {_or_unknown(facts.get('nqn'))}",
        f"I/O policy {facts['iopolicy']}" if facts.get("iopolicy") else "",
        "" if layer.below else "no path",
    ]


def _path(layer: Layer) -> list[str]:
    return ["path", str(layer.facts.get("ana_state") or "")]


def _controller(layer: Layer) -> list[str]:
    facts = layer.facts
    address = facts.get("address")
    where = short_address(address) if isinstance(address, str) else ""
    queues, entries = facts.get("io_queues"), facts.get("queue_size")
    return [
        f"{facts.get('transport')} {where}".rstrip()
        + (f" from {facts['source']}" if facts.get("source") else ""),
        f"{facts.get('state') or 'unknown state'}",
        f"{queues_in_words(queues)} of {entries} entries"
        if isinstance(queues, int) and entries
        else "",
        f"NUMA node {facts['numa_node']}" if facts.get("numa_node") is not None else "",
    ]


def _disk(layer: Layer) -> list[str]:
    return ["disk", _size(layer)]


def _partition(layer: Layer) -> list[str]:
    return ["partition", _size(layer)]


_WORDS: dict[Kind, Callable[[Layer], list[str]]] = {
    Kind.MOUNT: _mount,
    Kind.PARTITION: _partition,
    Kind.DM: _volume,
    Kind.MD: _raid,
    Kind.LOOP: _loop,
    Kind.DISK: _disk,
    Kind.HEAD: _head,
    Kind.PATH: _path,
    Kind.CONTROLLER: _controller,
}


def _queue_lines(layer: Layer) -> Iterator[str]:
    """The queues, NVMe's by the number of the queue pair as the table ``nvme`` has it."""
    nvme = layer.name.startswith("nvme")
    groups: Sequence[Sequence[HardwareQueue]] = [[queue] for queue in layer.queues]
    if len(layer.queues) > _QUEUES_SHOWN:
        alike = groupby(layer.queues, key=lambda queue: (queue.commands, queue.use))
        groups = [list(members) for _, members in alike]
    for group in groups:
        numbers = ranges(tuple(queue.number + nvme for queue in group))
        many = len(group) > 1
        name = ("queue pair" if nvme else "queue") + ("s" if many else "")
        commands, use = group[0].commands, group[0].use
        words = [
            f"{name} {numbers}",
            f"for {use}s" if use in ("read", "poll") else "",
            f"{_or_unknown(commands)} commands" + (" each" if many else ""),
            f"CPUs {ranges(tuple(cpu for queue in group for cpu in queue.cpus)) or 'none'}",
        ]
        yield ", ".join(word for word in words if word)


def _size(layer: Layer) -> str:
    return _size_of(layer.facts.get("size_bytes"))


def _size_of(value: object) -> str:
    return size(value) if isinstance(value, int) else ""


def _or_unknown(value: object) -> str:
    return "unknown" if value is None else str(value)
