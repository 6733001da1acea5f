"""More reads in flight where storage has too little to do, fewer or more room where too much."""

from collections.abc import Sequence

from kvprobe.api import (
    Effect,
    Evidence,
    Facts,
    Finding,
    NvmePath,
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

COSTS_NOTHING = 0.05
"""Part of the measured rate that fewer reads in flight may cost."""
SAME = 1.25
"""Depths and sizes of cells this near to those of the capture speak for it."""
MAX_QUEUE_SIZE = 1024
"""What a fabrics connection may ask for; the target may grant less."""

# The evidence of the findings that proposals are made from.
FULL_SIZE = "commands that a queue holds"
IO_QUEUES = "I/O queues of each controller"
PROCESSORS = "processors of the host"


def propose(findings: Sequence[Finding], facts: Facts) -> list[Proposal]:
    """What the findings call for; more reads in flight are proposed once."""
    proposals: list[Proposal] = []
    for finding in findings:
        if finding.slug == "queue_saturated":
            fewer = _fewer_reads(finding, facts)
            proposals += fewer or _larger_queue(finding, facts)
            if not fewer and _figure(finding.evidence, IO_QUEUES) == 1:
                proposals += _more_queues(finding, facts)
        elif finding.slug == "queue_imbalance":
            proposals += _both_paths(finding, facts)
        elif _is_one_queue(finding):
            proposals += _more_queues(finding, facts)
    shallow = next((f for f in findings if f.slug in MORE and not _is_one_queue(f)), None)
    return proposals + (_more_reads(shallow, facts) if shallow else [])


def _more_reads(finding: Finding, facts: Facts) -> list[Proposal]:
    """The smallest number of reads in flight within a tenth of the best that was measured.

    In bytes, because what a device needs is bytes: with another unit the number changes.
    """
    if facts.restore is None or facts.restore.n <= 0 or facts.restore.ops <= 0:
        return []
    costs = {
        depth: then.mid
        for depth in DEPTHS
        if depth > round(facts.restore.effective_depth)
        and (then := predict_restore(facts, reads_in_flight=depth)) is not None
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


def _fewer_reads(finding: Finding, facts: Facts) -> list[Proposal]:
    """The fewest reads in flight at which the measured rate is shown to be what it is now."""
    if facts.restore is None or facts.restore.n <= 0 or facts.restore.ops <= 0:
        return []
    unit, now = _unit_bytes(facts), _reads_now(facts)
    enough = [
        (depth, effect)
        for depth in DEPTHS
        if depth < now and (effect := _shorter_reads(facts, depth, now)) is not None
    ]
    if not enough:
        return []
    depth, effect = enough[0]
    said = setting(facts, KNOB, depth * unit)
    return [
        Proposal(
            slug=TUNER.name,
            finding=finding.slug,
            knob=KNOB,
            target=_target(facts),
            current=now * unit,
            proposed=depth * unit,
            unit="B",
            reason=f"queues are full with {now} reads of a request in flight, and the measured "
            f"rate is the same with {depth}: a restore takes as long, but a read waits less, and "
            "so does all else that uses the queues",
            effect=effect,
            risk="a restore is slower where storage is quicker than it was while measured",
            live=said is not None and said.live,
            apply=in_words(said, KNOB, depth * unit),
            undo=in_words(setting(facts, KNOB, now * unit), KNOB, now * unit),
            give_up=f"the exposed restore grows by more than {share(COSTS_NOTHING)} in an A B B A "
            "run",
        )
    ]


def _shorter_reads(facts: Facts, depth: int, now: int) -> Effect | None:
    """Change of the time of a read at the same rate; None where the rate may not stay.

    The rate stays where the low end of the cell at the lower depth is not below the highest
    measured on the way to the present one. A read then takes depth over rate (Little's law).
    """
    assert facts.restore is not None
    at_once = max(1.0, facts.restore.restoring_at_once or 1.0)
    wanted, present = depth * at_once, now * at_once
    size, direct = facts.restore.bytes / facts.restore.ops, facts.engine and facts.engine.direct
    for source in ("sweep", "capture"):
        cells = [
            cell
            for cell in facts.surface
            if cell.source == source
            and cell.bytes_per_s > 0
            and (direct is None or cell.direct == direct)
            and size / SAME <= cell.size_bytes <= size * SAME
        ]
        fewer = max((c for c in cells if c.depth <= wanted), key=lambda c: c.depth, default=None)
        here = min(cells, key=lambda c: abs(c.depth - present), default=None)
        if fewer is None or here is None or not present / SAME <= here.depth <= present * SAME:
            continue
        best = max(c.bytes_per_s for c in cells if fewer.depth <= c.depth <= here.depth)
        if fewer.low_bytes_per_s < (1 - COSTS_NOTHING) * best:
            return None
        low, mid, high = (
            depth / now * here.bytes_per_s / rate - 1
            for rate in (fewer.high_bytes_per_s, fewer.bytes_per_s, fewer.low_bytes_per_s)
        )
        return Effect("time_of_a_read_ns", low, mid, high)
    return None


def _larger_queue(finding: Finding, facts: Facts) -> list[Proposal]:
    """Twice the queue size at the next connect; what it gives was not measured."""
    held = _figure(finding.evidence, FULL_SIZE)
    fabrics = [path for path in facts.paths if path.transport in ("tcp", "rdma")]
    if held is None or not fabrics or held >= MAX_QUEUE_SIZE:
        return []
    if any(path.queue_size is not None and held < path.queue_size for path in fabrics):
        return []  # something else is full: the disk's own limit is lower
    # What fits is less than what was asked for, by one or two: the setting must be known.
    entries = {facts.queue_entries.get(path.controller) for path in fabrics}
    now = entries.pop() if len(entries) == 1 else None
    wanted = min(2 * now if now else 1 << round(2 * held - 1).bit_length(), MAX_QUEUE_SIZE)
    if now is not None and wanted <= now:
        return []
    return [
        _reconnect(
            finding,
            fabrics,
            "queue_size",
            f"--queue-size={wanted}",
            (now, wanted),
            f"queues that hold {held:.0f} commands are full while restores wait",
            "more latency and no more rate where the target is the limit; the target may grant "
            "less",
        )
    ]


def _more_queues(finding: Finding, facts: Facts) -> list[Proposal]:
    processors = _figure(finding.evidence, PROCESSORS)
    fabrics = [path for path in facts.paths if path.transport in ("tcp", "rdma")]
    if processors is None or not fabrics:
        return []
    return [
        _reconnect(
            finding,
            fabrics,
            "io_queues",
            f"--nr-io-queues={processors:.0f}",
            (1, round(processors)),
            f"one I/O queue carries what {processors:.0f} processors ask for",
            "more connections at the target, which may grant fewer",
        )
    ]


def _reconnect(
    finding: Finding,
    paths: Sequence[NvmePath],
    knob: str,
    option: str,
    values: tuple[int | None, int],
    reason: str,
    risk: str,
) -> Proposal:
    """A change that takes effect when a controller connects."""
    now, wanted = values
    name = option.partition("=")[0]
    undo = f"the same with {name}={now}"
    if now is None:
        undo = f"note sqsize of /sys/class/nvme/nvmeN plus 1 before; then the same with {name}=that"
    return Proposal(
        slug=TUNER.name,
        finding=finding.slug,
        knob=knob,
        target=", ".join(f"nvme{path.controller}" for path in paths),
        current=now,
        proposed=wanted,
        unit="",
        reason=reason,
        risk=f"{risk}; I/O stops while the only path reconnects, so one path at a time",
        apply=f"nvme disconnect and nvme connect with {option}, one path at a time",
        undo=undo,
        give_up=f"the exposed restore falls by less than {share(-WORTH_IT)} in an A B B A run",
    )


def _both_paths(finding: Finding, facts: Facts) -> list[Proposal]:
    """Another policy of native multipath, where the present one uses one path of several."""
    policies = {path.iopolicy for path in facts.paths}
    # The head of subsystem 3 is nvme3n1.
    number = facts.paths[0].head.removeprefix("nvme").partition("n")[0] if facts.paths else ""
    if len(facts.paths) < 2 or policies != {"numa"} or not number.isdecimal():
        return []
    file = f"/sys/class/nvme-subsystem/nvme-subsys{number}/iopolicy"
    return [
        Proposal(
            slug=TUNER.name,
            finding=finding.slug,
            knob="iopolicy",
            target=facts.paths[0].head,
            current="numa",
            proposed="round-robin",
            unit="",
            reason=f"numa uses one of {len(facts.paths)} paths on each node; the others stand by",
            risk="round-robin ignores how loaded a path is: of paths of unlike speed the slow one "
            "decides (from kernel 6.11 on queue-depth does not); arrays have a policy they want",
            live=True,
            apply=f"echo round-robin > {file}",
            undo=f"echo numa > {file}",
            give_up=f"the exposed restore falls by less than {share(-WORTH_IT)} in an A B B A run",
        )
    ]


def _is_one_queue(finding: Finding) -> bool:
    one = _figure(finding.evidence, IO_QUEUES) == 1
    return finding.slug == "queue_starved" and one and finding.subject.endswith("one I/O queue")


def _figure(evidence: Sequence[Evidence], metric: str) -> float | None:
    return next((each.value for each in evidence if each.metric == metric), None)


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


MORE = ("serial_restore", "queue_starved")
TUNER = Tuner("queue_depth", (*MORE, "queue_saturated", "queue_imbalance"), propose)
