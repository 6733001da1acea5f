"""A larger unit of storage, where the fixed cost of each read dominates."""

from collections.abc import Sequence

from kvprobe.api import (
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


def propose(findings: Sequence[Finding], facts: Facts) -> list[Proposal]:
    """The smallest unit within a tenth of the best measured cost, a power of two of the present.

    Cost is the predicted restore and the prefill of the tokens that a larger unit no longer
    matches, where the price of a token is known. Without it the bound on the lost share rules.
    """
    finding = next((f for f in findings if f.slug in TUNER.answers), None)
    if finding is None or facts.restore is None or facts.restore.n <= 0 or facts.restore.ops <= 0:
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


TUNER = Tuner("block_size", ("small_blocks",), propose)
