"""Prefills as windows of time: who ran when, groups of like size, and what bound each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.gpu.bound import judge
from kvprobe.correlator.gpu.ledger import Bound, PrefillGroup, Shares
from kvprobe.correlator.gpu.stretches import (
    Floats,
    Ints,
    Stretches,
    Windows,
    means_by_kind,
    scaled,
    stretches,
    within,
)
from kvprobe.correlator.intervals import covered_below, intersection, step_function, union
from kvprobe.correlator.ledger import Account
from kvprobe.model import Frame, Interval

USEFUL = 0.2
"""Width of a share's interval above which a group takes in its neighbours."""
FOLLOWS = 0.2
"""By how much of the time a GPU is busier during prefills if it does them."""
BUSY = 0.8
MIN_SAMPLES = 8


@dataclass(frozen=True)
class Prefills:
    """The prefills with known times and sizes; ``account`` is the place among the accounts."""

    account: Ints
    start_ns: Ints
    end_ns: Ints
    new: Ints
    context: Ints

    def __len__(self) -> int:
        return len(self.account)

    @property
    def windows(self) -> Windows:
        """When at least one ran."""
        return union(self.start_ns, self.end_ns)

    def ran_before(self, mine: NDArray[np.bool_], at: Ints) -> Floats:
        """How long those of ``mine`` ran before each of ``at``, in ns.

        An instant with several prefills is divided evenly between them.
        """
        if not len(self):
            return np.zeros(len(at))
        low, high, weight, count = step_function(self.start_ns, self.end_ns, mine.astype(float))
        part = np.divide(weight, count, out=np.zeros_like(weight), where=count > 0)
        edges = np.append(low, high[-1:])
        ran = np.concatenate([[0.0], np.cumsum((high - low) * part)])
        before: Floats = np.interp(at, edges, ran)
        return before


def prefills(accounts: Sequence[Account]) -> Prefills:
    """Those of the requests that tell when they began, how long they took, and of what size."""
    found = [
        (
            place,
            a.prefill_start_ns,
            a.prefill_start_ns + a.spans.prefill_ns,
            a.computed_tokens,
            max(a.prompt_tokens - a.computed_tokens, 0),
        )
        for place, a in enumerate(accounts)
        if a.spans and a.spans.prefill_ns > 0 and a.prefill_start_ns is not None
        if a.computed_tokens and a.prompt_tokens
    ]
    return Prefills(*np.array(found, np.int64).reshape(-1, 5).T)


def follows(rows: Frame, ran: Prefills) -> bool | None:
    """Whether one GPU works more, or its tensor cores do, while prefills run; None: untold.

    Each sample is compared with the one before, as the load of a whole node rises and falls
    together.
    """
    activity = stretches(rows, "graphics_activity_share")
    more = [_more(samples, ran) for samples in (activity, stretches(rows, "tensor_activity_share"))]
    known = [each for each in more if each is not None]
    if any(each.low > FOLLOWS for each in known):
        return True
    if not known or not len(activity) or any(each.high >= FOLLOWS for each in known):
        return None
    # One that is busy all the time may do the prefills or another's work.
    return None if np.average(activity.value, weights=activity.length_ns) > BUSY else False


def _more(samples: Stretches, ran: Prefills) -> Interval | None:
    """By how much the value is higher while prefills run."""
    if len(samples) < MIN_SAMPLES:
        return None
    part = samples.overlap_ns(ran.windows) / samples.length_ns
    steps = Stretches(samples.start_ns[1:], samples.end_ns[1:], np.diff(samples.value))
    found = means_by_kind(steps, np.diff(part)[:, None], signed=True)
    return found[0] if found else None


def groups(
    rows: Frame, ran: Prefills, restoring: Windows, pcie_bytes_per_s: float | None
) -> tuple[tuple[PrefillGroup, NDArray[np.bool_]], ...]:
    """Prefills of like size, with which of ``ran`` are in each, smallest first.

    Begins with a group for each doubling of the computed tokens, and puts neighbours together
    until each has some samples and useful intervals, or one group is left. Prefills that mostly ran
    while nothing was sampled are in none.

    Args:
        rows: the samples of one GPU.
        ran: the prefills.
        restoring: when a restore was in flight.
        pcie_bytes_per_s: the most that the link can carry one way.
    """
    samples = {name: stretches(rows, column) for name, column in _COLUMNS}
    if not len(ran) or not len(samples["active"]):
        return ()
    size = np.log2(ran.new).astype(np.int64)
    sampled = _is_sampled(ran, samples["active"])
    members = [(size == each) & sampled for each in np.unique(size[sampled])]
    if not members:
        return ()
    while True:
        told = _told(samples, ran, members, restoring, pcie_bytes_per_s)
        widths = [
            _width(each) if _sampled(samples["active"], ran, mine) >= MIN_SAMPLES else np.inf
            for each, mine in zip(told, members, strict=True)
        ]
        worst = int(np.argmax(widths))
        if widths[worst] <= USEFUL or len(members) == 1:
            break
        near = [place for place in (worst - 1, worst + 1) if 0 <= place < len(members)]
        other = min(near, key=lambda place: int(members[place].sum()))
        members[other] = members[other] | members[worst]
        del members[worst]
    return tuple(
        (_group(ran, mine, shares, samples["active"]), mine)
        for mine, shares in zip(members, told, strict=True)
    )


def _is_sampled(ran: Prefills, samples: Stretches) -> NDArray[np.bool_]:
    """Which prefills were sampled for most of their time."""
    windows = (samples.start_ns, samples.end_ns)
    covered = covered_below(*windows, ran.end_ns) - covered_below(*windows, ran.start_ns)
    most: NDArray[np.bool_] = 2 * covered > ran.end_ns - ran.start_ns
    return most


_COLUMNS = (
    ("active", "graphics_activity_share"),
    ("hbm", "dram_bandwidth_share"),
    ("compute", "tensor_activity_share"),
    ("pcie", "pcie_rx_bytes_per_s"),
)


def _told(
    samples: dict[str, Stretches],
    ran: Prefills,
    members: list[NDArray[np.bool_]],
    restoring: Windows,
    pcie_bytes_per_s: float | None,
) -> list[Shares]:
    found: dict[str, tuple[Interval, ...] | None] = {}
    for name, each in samples.items():
        found[name] = means_by_kind(each, _parts(each, ran, members)) if len(each) else None
    if not pcie_bytes_per_s:
        found["pcie"] = None
    shares = []
    for place, mine in enumerate(members):
        one = {name: told[place] for name, told in found.items() if told is not None}
        if pcie_bytes_per_s and "pcie" in one:
            one["pcie"] = scaled(one["pcie"], 1 / pcie_bytes_per_s)
        if "active" in one:
            one["starved"] = _starved(one["active"], _restoring_share(ran, mine, restoring))
        shares.append(Shares(**{name: within(share) for name, share in one.items()}))
    return shares


def _parts(samples: Stretches, ran: Prefills, members: list[NDArray[np.bool_]]) -> Floats:
    """Of each sample the share of each group, and last that without a prefill."""
    length = samples.length_ns
    shares = [
        (ran.ran_before(mine, samples.end_ns) - ran.ran_before(mine, samples.start_ns)) / length
        for mine in members
    ]
    return np.stack([*shares, 1 - np.sum(shares, axis=0)], axis=1)


def _restoring_share(ran: Prefills, mine: NDArray[np.bool_], restoring: Windows) -> float:
    """Of the time of these prefills, how much had a restore in flight (of another request)."""
    windows = union(ran.start_ns[mine], ran.end_ns[mine])
    together = intersection(*windows, *restoring)
    return float((together[1] - together[0]).sum() / (windows[1] - windows[0]).sum())


def _starved(active: Interval, restoring: float) -> Interval:
    """Idle while restoring: the two shares meet in at least their sum less one."""
    return Interval(
        (1 - min(active.mid, 1)) * restoring,
        max(0.0, 1 - active.high + restoring - 1),
        min(1 - min(active.low, 1), restoring),
        active.n,
    )


def _sampled(active: Stretches, ran: Prefills, mine: NDArray[np.bool_]) -> int:
    """How many samples meet these prefills."""
    return int((active.overlap_ns(union(ran.start_ns[mine], ran.end_ns[mine])) > 0).sum())


def _width(shares: Shares) -> float:
    known = (shares.active, shares.hbm, shares.compute, shares.pcie)
    return max((each.high - each.low for each in known if each), default=np.inf)


def _group(
    ran: Prefills, mine: NDArray[np.bool_], shares: Shares, active: Stretches
) -> PrefillGroup:
    bound, why = judge(shares)
    samples = _sampled(active, ran, mine)
    if samples < MIN_SAMPLES:
        bound, why = Bound.UNKNOWN, f"{samples} samples met them: {MIN_SAMPLES} are needed"
    elif bound is not Bound.UNKNOWN and _width(shares) > USEFUL:
        bound, why = Bound.UNKNOWN, f"too few samples ({samples}) to tell"
    last = ran.end_ns.max(keepdims=True)
    return PrefillGroup(
        tokens_low=int(ran.new[mine].min()),
        tokens_high=int(ran.new[mine].max()),
        prefills=int(mine.sum()),
        prefill_ns=round(float(ran.ran_before(mine, last)[0])),
        samples=samples,
        shares=shares,
        bound=bound,
        why=why,
        roofline_ns=None,
        moved_ratio=None,
    )
