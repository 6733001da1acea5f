"""Connections of the fabric lose segments, and the commands under way just then take longer.

A command that takes long is more likely to be under way at any moment, so that comparing commands
at an event with all others would always find a tail. So the question is put the other way round:
of the slow commands, how many met an event, and how many would have met one if the events had been
at other times? The same events are shifted round the window for that (a circular shift test): the
same commands, the same bursts, but no connection between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.frames import select
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
MIN_SLOW = 10
"""Slow commands that there must be, and that must have met an event: a burst of five segments on a
busy host is no tail."""
SLOW = 2.0
"""Times the median latency from which a command is slow."""
MOST_SLOW = 10_000
"""Slow commands that the shifts look at; of more, each so many-th."""
EXPLAINED_SHARE = 0.1
"""Of the slow commands that met an event: a tail has several causes, this one is worth a look."""
CERTAIN_SHARE = 0.5
MORE_THAN_CHANCE = 2.0
SHIFTS = 99
CHANCE = 0.05
"""Share of the shifts that may show as much."""
MOSTLY = 0.8
"""Share of the events from which they are those of one path."""
HEAVY = 0.02
"""Losses a command from which a fabric is ill whatever the tail says: storage networks are built
to lose nothing, and where each command meets a loss none is left to compare with."""
MIN_HEAVY = 20

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
ALL_QUEUES, ADMIN = -1, 0
CONGESTION_HOOK = "tcp_cong_state_set"
LOSSES = (FabricKind.RETRANSMIT, FabricKind.RECEIVE_GAP)
"""A segment to the target was sent again, or one from the target was lost or overtaken."""


@dataclass(frozen=True)
class _Tail:
    """Share of the ``n`` slow commands that met an event, what chance gives, how often it does."""

    met: float
    expected: float
    chance: float
    n: int

    @property
    def is_explained(self) -> bool:
        """Whether events are behind the tail."""
        enough = round(self.met * self.n) >= MIN_SLOW and self.met >= EXPLAINED_SHARE
        more = self.met >= MORE_THAN_CHANCE * self.expected
        return enough and more and self.chance <= CHANCE


def _detect(ledger: Ledger) -> list[Finding]:
    rows = kv_commands(ledger, only_reads=False)
    if not rows or not ledger.fabric:
        return []
    known = (rows["start_ns"] >= 0) & (rows["done_ns"] >= rows["start_ns"])
    rows = select(rows, known)
    events = _events(ledger, rows)
    worst = _worst(ledger, rows, events)
    if worst is not None:
        # One path has nearly all of them: its commands are judged, and all figures are its own.
        rows = select(rows, rows["device"] == worst.facts.device)
        events = _events(ledger, rows)
    if len(events["time_ns"]) < MIN_EVENTS or len(rows["op"]) < MIN_COMMANDS:
        return []
    groups = _groups(rows, events)
    disturbed = _met(rows, groups)
    tail = _tail(rows, groups, ledger.window_ns)
    lost = int(np.isin(events["kind"], LOSSES).sum())
    heavy = lost >= max(MIN_HEAVY, HEAVY * len(rows["op"]))
    if not (heavy or (tail is not None and tail.is_explained)):
        return []
    subject = path_name(worst) if worst else storage_name(ledger)
    return [_finding(ledger, subject, rows, events, disturbed, tail)]


def _events(ledger: Ledger, rows: Frame) -> Frame:
    """Losses and congestion of the connections that carry these commands, within the window."""
    fabric, (low, high) = ledger.fabric, ledger.window_ns
    congested = (fabric["kind"] == FabricKind.CONGESTION_STATE) & (fabric["value"] >= CWR)
    own = np.isin(fabric["controller"], np.unique(rows["controller"][rows["controller"] >= 0]))
    wanted = own & (np.isin(fabric["kind"], LOSSES) | congested)
    wanted &= (fabric["time_ns"] >= low) & (fabric["time_ns"] <= high) & (fabric["queue"] != ADMIN)
    if not any(CONGESTION_HOOK in missing.what for missing in ledger.missing):
        wanted &= ~_probes(fabric, congested)
    return select(fabric, wanted)


def _probes(fabric: Frame, congested: Flags) -> Flags:
    """Segments that were sent again although none was lost, which says nothing of the fabric.

    When an answer is late the kernel sends the last segment once more (a tail loss probe). Where
    that made good a loss, or a timer ran out, congestion control leaves its open state; where it
    stays there the target was slow to answer. So a resend counts where its connection did so.
    """
    again = fabric["kind"] == FabricKind.RETRANSMIT
    connection = np.stack([fabric["controller"], fabric["queue"]], axis=1)
    ill = [tuple(pair) for pair in np.unique(connection[congested], axis=0).tolist()]
    known = np.array([tuple(pair) in ill for pair in connection[again].tolist()], bool)
    result: Flags = np.zeros(len(again), bool)
    result[np.flatnonzero(again)[~known]] = True
    return result


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


def _met(rows: Frame, groups: list[tuple[Flags, Ints]]) -> Flags:
    """Commands that were under way at an event of their connection."""
    met = np.zeros(len(rows["op"]), bool)
    for mine, times in groups:
        begin = np.searchsorted(times, rows["start_ns"][mine], side="left")
        end = np.searchsorted(times, rows["done_ns"][mine], side="right")
        met[np.flatnonzero(mine)[end > begin]] = True
    return met


def _tail(
    rows: Frame, groups: list[tuple[Flags, Ints]], window_ns: tuple[int, int]
) -> _Tail | None:
    """The circular shift test on the slow commands; None where there are too few."""
    took = rows["done_ns"] - rows["start_ns"]
    slow = np.flatnonzero(took > SLOW * np.median(took))
    if len(slow) < MIN_SLOW:
        return None
    slow = slow[:: 1 + len(slow) // MOST_SLOW]
    part = select(rows, slow)
    own = [(mine[slow], times) for mine, times in groups]
    met = float(_met(part, own).mean())
    low, high = window_ns
    random = np.random.default_rng(len(took))
    by_chance = []
    for shift in random.integers(1, max(2, high - low), SHIFTS).tolist():
        moved = [(mine, np.sort(low + (times - low + shift) % (high - low))) for mine, times in own]
        by_chance.append(float(_met(part, moved).mean()))
    as_many = sum(share >= met for share in by_chance)
    return _Tail(met, float(np.mean(by_chance)), (1 + as_many) / (1 + SHIFTS), len(slow))


def _finding(
    ledger: Ledger,
    subject: str,
    rows: Frame,
    events: Frame,
    disturbed: Flags,
    tail: _Tail | None,
) -> Finding:
    took = (rows["done_ns"] - rows["start_ns"]).astype(float)
    n = len(events["time_ns"])
    again, gaps = (int((events["kind"] == kind).sum()) for kind in LOSSES)
    evidence = [
        Evidence("segments sent again", again, "", n),
        Evidence("gaps in what arrived from the target", gaps, "", n),
        Evidence("congestion events: CWR, recovery, loss", n - again - gaps, "", n),
        Evidence("losses for each command", (again + gaps) / len(took), "", len(took)),
        Evidence("commands under way at such an event", int(disturbed.sum()), "", len(took)),
    ]
    for when, part in (("at such an event", took[disturbed]), ("otherwise", took[~disturbed])):
        if len(part) >= MIN_COMMANDS:
            mid, p99 = np.quantile(part, [0.5, 0.99]).tolist()
            evidence.append(Evidence(f"latency {when}, median", mid, "ns", len(part)))
            evidence.append(Evidence(f"latency {when}, p99", p99, "ns", len(part)))
    if tail is not None:
        evidence += [
            Evidence("share of the slow commands that met an event", tail.met, "share", tail.n),
            Evidence("share that would, were they apart", tail.expected, "share", SHIFTS),
        ]
    explained = tail is not None and tail.is_explained
    met = tail.met if explained and tail else EXPLAINED_SHARE
    return Finding(
        slug="fabric_congestion",
        # Losses that no slow command met cost nothing yet.
        severity=severity(_cost(ledger, took, disturbed)) if explained or tail is None else "info",
        confidence=confidence(n, met, EXPLAINED_SHARE, CERTAIN_SHARE),
        subject=subject,
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


def _worst(ledger: Ledger, rows: Frame, events: Frame) -> DeviceAccount | None:
    """The path with most of the events; None where they are spread evenly, or there is none."""
    counts = [
        (int(np.isin(events["controller"], np.unique(rows["controller"][own])).sum()), device)
        for device in ledger.kv_devices
        if device.path and (own := rows["device"] == device.facts.device).any()
    ]
    most, worst = max(counts, key=lambda found: found[0], default=(0, None))
    return worst if most and most >= MOSTLY * len(events["time_ns"]) else None


DETECTOR = Detector("fabric_congestion", "the fabric loses segments and commands wait", _detect)
