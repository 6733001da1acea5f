"""Connections of the fabric lose segments, and the commands under way just then take longer.

A command that takes long is more likely to be under way at any moment, so that comparing commands
at an event with all others would always find a tail. The comparison is with the same events
shifted round the window by other times (a circular shift test): same commands, same number of
moments, same bursts, but no connection between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator import intervals
from kvprobe.correlator.ledger import DeviceAccount, Ledger
from kvprobe.correlator.paths import CWR
from kvprobe.findings import Detector
from kvprobe.findings._storage import (
    MIN_COMMANDS,
    at_stake,
    device_share,
    kv_commands,
    path_name,
    restoring,
    storage_name,
)
from kvprobe.findings._weigh import confidence, severity
from kvprobe.model import Evidence, Finding, Frame
from kvprobe.schema import FabricKind

MIN_EVENTS = 5
"""A stray retransmission or two happens on any network, without anybody noticing."""
LONGER = 1.5
"""Mean latency of commands under way at an event over that at shifted times."""
CERTAIN_LONGER = 4.0
SHIFTS = 99
CHANCE = 0.05
"""Share of the shifts that may show as much."""
HEAVY = 0.01
"""Retransmissions a command from which no undisturbed commands are left to compare with: with
several commands on a connection each of them meets some."""
DISTURBED_SHARE = 0.5

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
ALL_QUEUES, ADMIN = -1, 0


@dataclass(frozen=True)
class _Compared:
    """Latency at the events over that at shifted times, and the share of shifts that show it."""

    ratio: float
    chance: float


def _detect(ledger: Ledger) -> list[Finding]:
    rows = kv_commands(ledger, only_reads=False)
    if not rows or not ledger.fabric:
        return []
    known = (rows["start_ns"] >= 0) & (rows["done_ns"] >= rows["start_ns"])
    rows = {name: column[known] for name, column in rows.items()}
    events = _events(ledger, rows)
    if len(events["time_ns"]) < MIN_EVENTS or len(rows["op"]) < MIN_COMMANDS:
        return []
    disturbed = _disturbed(rows, events)
    compared = _compare(rows, events, ledger.window_ns)
    retransmits = int((events["kind"] == FabricKind.RETRANSMIT).sum())
    heavy = retransmits >= HEAVY * len(rows["op"]) and disturbed.mean() >= DISTURBED_SHARE
    clear = compared is not None and compared.ratio >= LONGER and compared.chance <= CHANCE
    if not (clear or heavy):
        return []
    return [_finding(ledger, rows, events, disturbed, compared if clear else None)]


def _events(ledger: Ledger, rows: Frame) -> Frame:
    """Losses and congestion of the connections that carry these commands, within the window."""
    fabric, (low, high) = ledger.fabric, ledger.window_ns
    congested = (fabric["kind"] == FabricKind.CONGESTION_STATE) & (fabric["value"] >= CWR)
    own = np.isin(fabric["controller"], np.unique(rows["controller"][rows["controller"] >= 0]))
    wanted = own & ((fabric["kind"] == FabricKind.RETRANSMIT) | congested)
    wanted &= (fabric["time_ns"] >= low) & (fabric["time_ns"] <= high) & (fabric["queue"] != ADMIN)
    return {name: column[wanted] for name, column in fabric.items()}


def _groups(rows: Frame, events: Frame) -> list[tuple[Flags, Ints]]:
    """Commands and event times of each connection; an event of no queue is of all of them."""
    pairs = np.unique(np.stack([events["controller"], events["queue"]], axis=1), axis=0)
    found = []
    for controller, queue in pairs.tolist():
        mine = rows["controller"] == controller
        if queue != ALL_QUEUES:
            mine &= rows["queue"] == queue
        of_it = (events["controller"] == controller) & (events["queue"] == queue)
        found.append((mine, np.sort(events["time_ns"][of_it])))
    return found


def _disturbed(rows: Frame, events: Frame) -> Flags:
    """Commands that were under way at an event of their connection."""
    disturbed = np.zeros(len(rows["op"]), bool)
    for mine, times in _groups(rows, events):
        begin = np.searchsorted(times, rows["start_ns"][mine], side="left")
        end = np.searchsorted(times, rows["done_ns"][mine], side="right")
        disturbed[np.flatnonzero(mine)[end > begin]] = True
    return disturbed


def _compare(rows: Frame, events: Frame, window_ns: tuple[int, int]) -> _Compared | None:
    """The circular shift test; None where no command was under way at any event."""
    low, high = window_ns
    span = high - low
    shifts = np.concatenate([[0], span * np.arange(1, SHIFTS + 1) // (SHIFTS + 1)])
    latency, count = np.zeros(len(shifts)), np.zeros(len(shifts))
    for mine, times in _groups(rows, events):
        if not mine.any():
            continue
        start, done = rows["start_ns"][mine], rows["done_ns"][mine]
        begin, end, summed, level = intervals.step_function(start, done, (done - start).astype(float))
        if not len(begin):
            continue
        moments = low + (times[None, :] - low + shifts[:, None]) % span
        place = np.maximum(np.searchsorted(begin, moments, side="right") - 1, 0)
        inside = (begin[place] <= moments) & (moments <= end[place])
        latency += np.where(inside, summed[place], 0.0).sum(axis=1)
        count += np.where(inside, level[place], 0).sum(axis=1)
    used = count > 0
    if not used[0] or used.sum() < SHIFTS / 2:
        return None
    means = latency[used] / count[used]
    others = means[1:]
    usual = float(np.median(others))
    if usual <= 0:
        return None
    chance = (1 + int((others >= means[0]).sum())) / (1 + len(others))
    return _Compared(float(means[0]) / usual, chance)


def _finding(
    ledger: Ledger, rows: Frame, events: Frame, disturbed: Flags, compared: _Compared | None
) -> Finding:
    took = (rows["done_ns"] - rows["start_ns"]).astype(float)
    n = len(events["time_ns"])
    retransmits = int((events["kind"] == FabricKind.RETRANSMIT).sum())
    evidence = [
        Evidence("segments sent again", retransmits, "", n),
        Evidence("congestion events: CWR, recovery, loss", n - retransmits, "", n),
        Evidence("segments sent again, for each command", retransmits / len(took), "", len(took)),
        Evidence("commands under way at such an event", int(disturbed.sum()), "", len(took)),
    ]
    for name, part in (("at such an event", took[disturbed]), ("otherwise", took[~disturbed])):
        if len(part) >= MIN_COMMANDS:
            p99 = float(np.quantile(part, 0.99))
            evidence.append(Evidence(f"latency {name}, median", float(np.median(part)), "ns", len(part)))
            evidence.append(Evidence(f"latency {name}, p99", p99, "ns", len(part)))
    if compared is not None:
        evidence.append(Evidence("latency at events over that at shifted times", compared.ratio, "x", n))
        evidence.append(Evidence("share of shifts that show as much", compared.chance, "share", SHIFTS))
    sure = confidence(n, compared.ratio if compared else LONGER, LONGER, CERTAIN_LONGER)
    return Finding(
        slug="fabric_congestion",
        severity=severity(_cost(ledger, took, disturbed)),
        confidence=sure,
        subject=_subject(ledger, events),
        evidence=tuple(evidence),
        would_disprove="commands that take as long while no segment is sent again",
    )


def _cost(ledger: Ledger, took: NDArray[np.float64], disturbed: Flags) -> float | None:
    """What disturbed commands took beyond the median of the others, of the time to first token."""
    device = device_share(requests := restoring(ledger))
    if device is None or disturbed.all() or took.sum() <= 0:
        return None
    usual = float(np.median(took[~disturbed]))
    extra = float(np.maximum(took[disturbed] - usual, 0).sum())
    return at_stake(requests, device * extra / float(took.sum()))


def _subject(ledger: Ledger, events: Frame) -> str:
    """The path with most of the events, or the disk where they are spread evenly."""
    counts = {
        controller: int((events["controller"] == controller).sum())
        for controller in np.unique(events["controller"]).tolist()
    }
    worst = max(counts, key=lambda controller: counts[controller])
    if counts[worst] < 0.8 * sum(counts.values()):
        return storage_name(ledger)
    found: DeviceAccount | None = next(
        (
            device
            for device in ledger.kv_devices
            if any(queue.controller == worst for queue in device.queues)
        ),
        None,
    )
    return path_name(found) if found else storage_name(ledger)


DETECTOR = Detector("fabric_congestion", "the fabric loses segments and commands wait", _detect)
