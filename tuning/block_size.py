"""A larger unit where the fixed cost of each read dominates; larger commands where it is cut."""

import math
from collections.abc import Sequence

from kvprobe.api import (
    Effect,
    Facts,
    Finding,
    Proposal,
    Tuner,
    duration,
    in_words,
    lost_prefix_ns,
    predict_restore,
    restore_effect,
    setting,
    share,
    size,
    smallest_near_best,
    sweep_command,
)

MAX_LOST_SHARE = 0.1
"""A prefix ends inside a unit, half a unit is lost on average: at most this share of a restore."""
WORTH_IT = -0.05
"""Predicted change of the restore that is worth storing everything again."""
ALIGNMENT_BYTES = 4096
"""Direct I/O wants whole device blocks; where sysfs says nothing, this many bytes."""
KNOB = "unit_bytes"


LIMIT = "the limit that does it: max_sectors_kb of "
"""Evidence of split_requests that names the setting, followed by the disk."""
PIECES = "commands a read, mean"
USUAL_LIMIT_BYTES = 1280 << 10
"""The kernel's default up to 6.16: a size that drives and targets are used to."""


def propose(findings: Sequence[Finding], facts: Facts) -> list[Proposal]:
    """A larger unit for small ones, a larger limit for reads that a setting cuts."""
    proposals: list[Proposal] = []
    for finding in findings:
        if finding.slug == "split_requests":
            proposals += _larger_limit(finding, facts)
        elif finding.slug == "small_blocks":
            proposals += _larger_unit(finding, facts)
    return proposals


def _larger_unit(finding: Finding, facts: Facts) -> list[Proposal]:
    """The smallest unit within a tenth of the best measured cost, a power of two of the present.

    Cost is the predicted restore and the prefill of the tokens that a larger unit no longer
    matches, where the price of a token is known. Without it the bound on the lost share rules.
    """
    if facts.restore is None or facts.restore.n <= 0 or facts.restore.ops <= 0:
        return []
    candidates = _candidates(facts)
    costs = {
        unit: then.mid + lost_prefix_ns(facts, unit)
        for unit in candidates
        if (then := predict_restore(facts, unit_bytes=unit)) is not None
    }
    unit = smallest_near_best(costs)
    if unit is None:
        return [_measure(finding, facts)] if candidates else []
    effect = restore_effect(facts, unit_bytes=unit)
    now, restore = _unit_now(facts), facts.restore
    saved_ns = restore.restore_ns / restore.n - costs[unit]
    if effect is None or effect.mid > WORTH_IT or saved_ns <= 0:
        return []  # measured, and not worth it
    lost = f"on average {size((unit - now) / 2)} of a prefix are no longer found"
    if lost_ns := lost_prefix_ns(facts, unit):
        lost += f" and cost {duration(lost_ns)} of prefill"
    return [
        Proposal(
            slug=TUNER.name,
            finding=finding.slug,
            knob=KNOB,
            target=_target(facts),
            current=now,
            proposed=unit,
            unit="B",
            reason=f"{restore.ops / restore.n:.0f} reads of {size(restore.bytes / restore.ops)} "
            f"make a restore of {duration(restore.restore_ns / restore.n)}; the measured rates "
            f"give {duration(costs[unit] - lost_ns)} with units of {size(unit)}",
            effect=effect,
            risk=lost + "; what is stored in the present unit is not found again",
            live=(said := setting(facts, KNOB, unit)) is not None and said.live,
            apply=in_words(said, KNOB, unit),
            undo=in_words(setting(facts, KNOB, now), KNOB, now),
            give_up="the exposed restore falls by less than "
            f"{share(max(-effect.high, -WORTH_IT))}, or the share of tokens found in storage "
            "falls, in an A B B A run",
        )
    ]


def _larger_limit(finding: Finding, facts: Facts) -> list[Proposal]:
    """The limit of the disk that cuts, up to the kernel's usual one; commands fall by counting."""
    named = next((e for e in finding.evidence if e.metric.startswith(LIMIT)), None)
    pieces = next((e.value for e in finding.evidence if e.metric == PIECES), None)
    if named is None or not named.value or not pieces:
        return []
    disk, now = named.metric.removeprefix(LIMIT), round(named.value)
    wanted = min(max(now, USUAL_LIMIT_BYTES), math.ceil(pieces) * now) >> 10 << 10
    if wanted <= now:
        return []
    file = f"/sys/block/{disk}/queue/max_sectors_kb"
    change = max(now / wanted, 1 / pieces) - 1
    return [
        Proposal(
            slug=TUNER.name,
            finding=finding.slug,
            knob="max_sectors_kb",
            target=disk,
            current=now,
            proposed=wanted,
            unit="B",
            reason=f"a read is {pieces:.0f} commands of {size(now)}; the disk's setting cuts it",
            effect=Effect("commands_a_read", change, change, 0.0),
            risk="other readers of the device wait behind longer commands; the write fails above "
            "max_hw_sectors_kb, and under native multipath the other disks of the path have "
            "limits of their own",
            live=True,
            apply=f"echo {wanted >> 10} > {file}",
            undo=f"echo {now >> 10} > {file}",
            give_up="commands a read do not fall, or restores take longer, in an A B B A run",
        )
    ]


def _unit_now(facts: Facts) -> int:
    assert facts.restore is not None
    known = facts.engine.unit_bytes if facts.engine else None
    return known or round(facts.restore.bytes / facts.restore.ops)


def _candidates(facts: Facts) -> list[int]:
    """Larger units whose half is a small part of a restore; aligned ones where any is."""
    assert facts.restore is not None
    now = _unit_now(facts)
    largest = 2 * MAX_LOST_SHARE * facts.restore.bytes / facts.restore.n
    units = []
    unit = 2 * now
    while unit <= largest:
        units.append(unit)
        unit *= 2
    block = (facts.device.logical_block_bytes if facts.device else None) or ALIGNMENT_BYTES
    return [unit for unit in units if unit % block == 0] or units


def _target(facts: Facts) -> str:
    return facts.engine.name if facts.engine else "engine"


def _measure(finding: Finding, facts: Facts) -> Proposal:
    return Proposal(
        slug=TUNER.name,
        finding=finding.slug,
        knob=KNOB,
        target=_target(facts),
        current=_unit_now(facts),
        proposed=None,
        unit="B",
        reason="how much faster this device reads larger units was not measured",
        needs=sweep_command(facts),
    )


TUNER = Tuner("block_size", ("small_blocks", "split_requests"), propose)
