"""Which device a row belongs to, where names and numbers change while the recording runs.

Under native multipath a row carries the hidden disk of a path. A controller that reconnects may
come back with another disk name and another number; NQN, address and namespace id stay. So rows
are counted under one number for each of these keys: the one it had last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.ledger import PathAccount, PathEvents
from kvprobe.model import DeviceFacts, Frame, NvmePath
from kvprobe.schema import FabricKind

Ints = NDArray[np.int64]

CWR = 2
"""From this state of a connection's congestion control on it sends less than it may."""


def distinct_pairs(first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """The distinct pairs (one a row, sorted), and the row of each; ``second`` is -1 or 16 bits."""
    both = first << 17 | second + 1
    kinds = np.unique(both)
    pairs = np.stack([kinds >> 17, (kinds & 0x1FFFF) - 1], axis=1)
    return pairs, np.searchsorted(kinds, both)


class Paths:
    """The NVMe paths of a recording.

    Args:
        paths: all that were there at some time, oldest first.
    """

    def __init__(self, paths: Sequence[NvmePath]) -> None:
        self._versions: dict[tuple[object, ...], list[NvmePath]] = {}
        for path in paths:
            key = path.key if path.address is not None else (path.name,)
            self._versions.setdefault(key, []).append(path)
        self._latest = {versions[-1].device: versions for versions in self._versions.values()}
        self._number = {
            path.device: versions[-1].device
            for versions in self._versions.values()
            for path in versions
        }
        # A number that a path gave up may belong to another one now: the controller tells.
        self._by_controller = {
            (path.device, path.controller): versions[-1].device
            for versions in self._versions.values()
            for path in versions
        }

    def device_of(self, device: Ints, controller: Ints) -> Ints:
        """The number under which rows are counted; a device that is no path keeps its own."""
        pairs, place = distinct_pairs(device, controller)
        numbers = [
            self._by_controller.get((d, c), self._number.get(d, d)) for d, c in pairs.tolist()
        ]
        return np.array(numbers, np.int64)[place]

    def numbers(self, device: int) -> tuple[int, ...]:
        """Every number that this device had."""
        versions = self._latest.get(device, ())
        return tuple(dict.fromkeys(path.device for path in versions)) or (device,)

    def head(self, device: int) -> str | None:
        """The mounted disk of a path; None for what is no NVMe path."""
        versions = self._latest.get(device)
        return versions[-1].head if versions else None

    def sisters(self, device: int) -> tuple[int, ...]:
        """The device and the other paths to its head."""
        head = self.head(device)
        others = (d for d, versions in self._latest.items() if versions[-1].head == head)
        return (device, *(d for d in others if d != device)) if head else (device,)

    def facts(self, device: int, known: Sequence[DeviceFacts]) -> DeviceFacts:
        """What is known of a device: its own facts, else those of its head under its own name."""
        versions = self._latest.get(device)
        own = next((facts for facts in known if facts.device == device), None)
        if own is not None:
            return own
        if versions is None:
            return DeviceFacts(device, f"{device >> 20}:{device & 0xFFFFF}", "unknown")
        path = versions[-1]
        plain = DeviceFacts(device, path.name, f"nvme {path.transport}")
        head = next((facts for facts in known if facts.name == path.head), None)
        if head is None:
            return plain
        # The head has no requests of its own: limits that it shows are not those of the path.
        return replace(
            plain,
            size_bytes=head.size_bytes,
            rotational=head.rotational,
            logical_block_bytes=head.logical_block_bytes,
            mounts=head.mounts,
        )

    def account(
        self, device: int, fabric: Frame, recorded: bool, served_ns: Ints
    ) -> PathAccount | None:
        """A path with what happened to it; None for what is no NVMe path.

        Args:
            device: the number it is counted under.
            fabric: frame of the ``fabric`` table.
            recorded: whether that table was recorded at all.
            served_ns: set-up of each command that it served.
        """
        versions = self._latest.get(device)
        if versions is None:
            return None
        names = tuple(dict.fromkeys(path.name for path in versions))
        if not recorded:
            return PathAccount(versions[-1], names, None)
        rows = self.events_of(device, fabric)
        outages = _outages(fabric, rows, np.sort(served_ns))
        facts = versions[-1]
        # Its state was read at the start, or when it was first seen.
        if outages and outages[-1][1] is not None:
            facts = replace(facts, state="live")
        elif outages and facts.state in (None, "live"):
            facts = replace(facts, state="lost")
        return PathAccount(facts, names, _events(fabric, rows), outages)

    def events_of(self, device: int, fabric: Frame) -> NDArray[np.bool_]:
        """The rows of ``fabric`` that concern a path: its own, and those of its controller."""
        versions = self._latest.get(device, [])
        controllers = [path.controller for path in versions]
        own = np.isin(fabric["device"], [path.device for path in versions])
        heads = [path.head_device for path in versions if path.head_device is not None]
        # A row that names the head, or nothing, belongs to all namespaces of its controller.
        general = (fabric["device"] < 0) | np.isin(fabric["device"], heads)
        of_controller = np.isin(fabric["controller"], controllers)
        named = fabric["controller"] < 0
        result: NDArray[np.bool_] = (own & (of_controller | named)) | (general & of_controller)
        return result


def _outages(
    fabric: Frame, rows: NDArray[np.bool_], served_ns: Ints
) -> tuple[tuple[int, int | None], ...]:
    """From each loss until the path is told to be usable, or is used.

    Where the target tells no states of its paths nothing says that one is usable again.
    """
    time, kind = fabric["time_ns"][rows], fabric["kind"][rows]
    live = np.sort(np.concatenate([time[kind == FabricKind.PATH_LIVE], served_ns]))
    found: list[tuple[int, int | None]] = []
    for lost in np.sort(time[kind == FabricKind.PATH_LOST]).tolist():
        if found and (found[-1][1] is None or lost <= found[-1][1]):
            continue  # told again
        after = int(np.searchsorted(live, lost, side="right"))
        found.append((lost, int(live[after]) if after < len(live) else None))
    return tuple(found)


def _events(fabric: Frame, rows: NDArray[np.bool_]) -> PathEvents:
    kind, value = fabric["kind"][rows], fabric["value"][rows]

    def count(wanted: FabricKind) -> int:
        return int((kind == wanted).sum())

    return PathEvents(
        failovers=count(FabricKind.FAILOVER),
        path_losses=count(FabricKind.PATH_LOST),
        retransmits=count(FabricKind.RETRANSMIT),
        receive_gaps=count(FabricKind.RECEIVE_GAP),
        congestion_events=int(((kind == FabricKind.CONGESTION_STATE) & (value >= CWR)).sum()),
        reconnects=count(FabricKind.RECONNECT),
        timeouts=count(FabricKind.COMMAND_TIMEOUT),
        send_waits=count(FabricKind.SEND_SPACE),
    )
