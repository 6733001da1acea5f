"""More reads of one request in flight, where its restores are serial."""

from collections.abc import Sequence

from kvprobe.api import (
    Facts,
    Finding,
    Proposal,
    Tuner,
    duration,
    in_words,
    predict_restore,
    restore_effect,
    setting,
    share,
    size,
    smallest_near_best,
    sweep_command,
)

DEPTHS = (2, 4, 8, 16, 32, 64)
WORTH_IT = -0.05
"""Predicted change of the restore that is worth a restart of the engine."""
KNOB = "bytes_in_flight"


def propose(findings: Sequence[Finding], facts: Facts) -> list[Proposal]:
    """The smallest number of reads in flight within a tenth of the best that was measured.

    In bytes, because what a device needs is bytes: with another unit the number changes.
    """
    finding = next((f for f in findings if f.slug in TUNER.answers), None)
    if finding is None or facts.restore is None or facts.restore.n <= 0 or facts.restore.ops <= 0:
        return []
    costs = {
        depth: then.mid
        for depth in DEPTHS
        if (then := predict_restore(facts, reads_in_flight=depth)) is not None
    }
    depth = smallest_near_best(costs)
    if depth is None:
        return [_measure(finding, facts)]
    effect = restore_effect(facts, reads_in_flight=depth)
    if effect is None or effect.mid > WORTH_IT:
        return []  # measured, and not worth it: the device gains nothing by more reads
    unit, now = _unit_bytes(facts), _reads_now(facts)
    restore_ns = facts.restore.restore_ns / facts.restore.n
    deepest = " (the deepest measured)" if depth == max(costs) else ""
    return [
        Proposal(
            slug=TUNER.name,
            finding=finding.slug,
            knob=KNOB,
            target=_target(facts),
            current=now * unit,
            proposed=depth * unit,
            unit="B",
            reason=f"a restore has {facts.restore.effective_depth:.1f} reads open at once; with "
            f"{depth}{deepest} the measured rates give {duration(costs[depth])} "
            f"instead of {duration(restore_ns)}",
            effect=effect,
            risk=f"{size(depth * unit)} of memory for reads of each restoring request; other "
            "readers of the device wait longer",
            live=(said := setting(facts, KNOB, depth * unit)) is not None and said.live,
            apply=in_words(said, KNOB, depth * unit),
            undo=in_words(setting(facts, KNOB, now * unit), KNOB, now * unit),
            give_up="the exposed restore falls by less than "
            f"{share(max(-effect.high, -WORTH_IT))} in an A B B A run",
        )
    ]


def _unit_bytes(facts: Facts) -> int:
    assert facts.restore is not None
    known = facts.engine.unit_bytes if facts.engine else None
    return known or round(facts.restore.bytes / facts.restore.ops)


def _reads_now(facts: Facts) -> int:
    assert facts.restore is not None
    known = facts.engine.reads_in_flight if facts.engine else None
    return known or max(1, round(facts.restore.effective_depth))


def _target(facts: Facts) -> str:
    return facts.engine.name if facts.engine else "engine"


def _measure(finding: Finding, facts: Facts) -> Proposal:
    return Proposal(
        slug=TUNER.name,
        finding=finding.slug,
        knob=KNOB,
        target=_target(facts),
        current=_reads_now(facts) * _unit_bytes(facts),
        proposed=None,
        unit="B",
        reason="how much faster this device reads with more in flight was not measured",
        needs=sweep_command(facts),
    )


TUNER = Tuner("queue_depth", ("serial_restore",), propose)
