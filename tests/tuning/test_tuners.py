"""What the tuners propose, and when they ask for a measurement or keep silent."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvprobe import cli, content
from kvprobe.engines import engines
from kvprobe.findings import late_prefetch, readahead_waste
from kvprobe.model import (
    DeviceFacts,
    EngineFacts,
    EngineSetting,
    Evidence,
    Facts,
    Finding,
    Interval,
    Proposal,
    ServiceCell,
)
from kvprobe.prediction import predict_restore, sweep_command
from tests.findings import ledgers
from tests.tuning.restores import FLAT, UNIT, US, exact, made

KNOBS = ("unit_bytes", "bytes_in_flight", "prefetch_horizon")


def finding(slug: str, *evidence: Evidence) -> Finding:
    return Finding(slug, "warning", 0.9, "x", evidence, "")


def proposals(name: str, facts: Facts, *found: Finding) -> list[Proposal]:
    return content.tuners()[name].propose(found, facts)


def one(name: str, facts: Facts, *found: Finding) -> Proposal:
    (proposal,) = proposals(name, facts, *found)
    return proposal


def spoken_by(adapter: str, engine: EngineFacts, facts: Facts) -> Facts:
    translate = engines()[adapter].translate

    def words(knob: str) -> Callable[[int], EngineSetting]:
        return lambda value: translate(knob, value, engine)

    return replace(facts, engine=engine, settings={knob: words(knob) for knob in KNOBS})


def workload(facts: Facts) -> Facts:
    engine = facts.engine
    assert engine is not None
    return spoken_by("jsonl", replace(engine, name="kvprobe-workload", unit_tokens=64), facts)


# ---------------------------------------------------------------- queue_depth

KNEE = [
    exact(UNIT, d, took * US) for d, took in ((1, 100), (2, 100), (4, 104), (8, 200), (16, 400))
]
"""A device that is full from depth 4 on."""
SERIAL = finding("serial_restore")


def test_depth_ends_at_the_knee() -> None:
    facts = workload(made(KNEE, reads_in_flight=1))
    proposal = one("queue_depth", facts, SERIAL)
    assert (proposal.knob, proposal.current, proposal.proposed) == (
        "bytes_in_flight",
        UNIT,
        4 * UNIT,
    )
    then = predict_restore(facts, reads_in_flight=4)
    assert then is not None and proposal.effect is not None
    assert proposal.effect.mid == pytest.approx(then.mid / (1600 * US) - 1)
    assert proposal.effect.low < proposal.effect.mid < proposal.effect.high < 0
    assert proposal.apply.startswith("--reads-in-flight 4 ")
    assert proposal.undo.startswith("--reads-in-flight 1 ")
    assert proposal.needs is None and proposal.give_up and proposal.risk


def test_a_full_device_gets_no_proposal() -> None:
    full = [exact(UNIT, d, d * 100 * US) for d in (1, 2, 4, 8, 16)]
    assert proposals("queue_depth", made(full), SERIAL) == []


def test_depth_that_was_not_measured_is_asked_for() -> None:
    facts = replace(made([exact(UNIT, 1, 100 * US)]), device=DEVICE)
    proposal = one("queue_depth", facts, SERIAL)
    assert proposal.effect is None and proposal.proposed is None and not proposal.apply
    assert proposal.needs == "kvprobe sweep /kv --direct --sizes 64k,256k --depths 1,2,4,8,16"


def test_an_engine_without_the_knob_is_told_so() -> None:
    facts = made(KNEE)
    assert facts.engine is not None
    proposal = one(
        "queue_depth", spoken_by("vllm", replace(facts.engine, name="vllm"), facts), SERIAL
    )
    assert "one after another" in proposal.apply and not proposal.live


# ---------------------------------------------------------------- block_size

SMALL = finding("small_blocks")
LONG = [exact(k * UNIT, 1, (100 + 10 * k) * US) for k in (1, 2, 4, 8)]
"""100 us a read and 10 us each 64 KiB more."""


def long_restores(cells: Sequence[ServiceCell] = LONG, **changes: object) -> Facts:
    """160 reads a restore, so that half of a larger unit is a small part of it."""
    facts = workload(made(list(cells), read_ns=110 * US))
    assert facts.restore is not None
    sample = replace(facts.restore, n=11, ttft_ns=facts.restore.ttft_ns)
    assert sample.ops // sample.n == 146
    return replace(facts, restore=sample, **changes)  # type: ignore[arg-type]


def test_the_unit_grows_while_it_pays() -> None:
    """Per restore of 147 units: 110, 60, 35, 22.5 us each; 8 is the best measured, none near."""
    proposal = one("block_size", long_restores(), SMALL)
    assert (proposal.knob, proposal.current, proposal.proposed) == ("unit_bytes", UNIT, 8 * UNIT)
    assert proposal.effect is not None
    assert proposal.effect.mid == pytest.approx(22.5 / 110 - 1, rel=0.01)
    assert proposal.apply.startswith("--unit-tokens 512 ")
    assert proposal.undo.startswith("--unit-tokens 64 ")


def test_the_price_of_lost_prefixes_is_weighed() -> None:
    """Half a unit of 512 tokens at 30 us each costs more than the reads it saves."""
    dear = long_restores(recompute_ns_per_token=30_000.0)
    proposal = one("block_size", dear, SMALL)
    # cost in us: 2: 60 * 147 + 32 * 30; 4: 35 * 147 + 96 * 30; 8: 22.5 * 147 + 224 * 30
    assert proposal.proposed == 4 * UNIT
    assert "2.88 ms of prefill" in proposal.risk
    assert proposals("block_size", long_restores(recompute_ns_per_token=1e6), SMALL) == []


def test_half_a_unit_stays_a_small_part_of_a_restore() -> None:
    """16 units a restore: a unit of 2 is 1/16 lost, one of 4 would be 1/8."""
    proposal = one("block_size", workload(made(LONG, read_ns=110 * US)), SMALL)
    assert proposal.proposed == 2 * UNIT


def test_aligned_units_are_preferred() -> None:
    odd = UNIT + 512  # eight of them make whole pages, four do not
    cells = [exact(k * odd, 1, 100 * US) for k in (1, 2, 4, 8, 16)]
    facts = made(cells)
    assert facts.engine is not None and facts.restore is not None
    sample = replace(facts.restore, n=11, bytes=facts.restore.ops * odd)
    facts = replace(facts, engine=replace(facts.engine, unit_bytes=odd), restore=sample)
    cells = [c for c in cells if c.size_bytes != 16 * odd]
    assert one("block_size", replace(facts, surface=tuple(cells)), SMALL).proposed == 8 * odd
    device = replace(DEVICE, logical_block_bytes=512)
    cells = [c for c in cells if c.size_bytes <= 4 * odd]
    small_blocks = replace(facts, surface=tuple(cells), device=device)
    assert one("block_size", small_blocks, SMALL).proposed == 4 * odd
    assert one("block_size", replace(facts, surface=tuple(cells)), SMALL).needs


def test_units_that_were_not_measured_are_asked_for() -> None:
    proposal = one("block_size", long_restores(LONG[:1]), SMALL)
    assert proposal.effect is None and proposal.proposed is None
    assert proposal.needs == sweep_command(long_restores(LONG[:1]))


def test_where_no_larger_unit_makes_sense_nothing_is_said() -> None:
    facts = made(LONG, read_ns=110 * US)
    assert facts.restore is not None
    few = replace(facts.restore, n=facts.restore.ops // 4)
    assert proposals("block_size", replace(facts, restore=few), SMALL) == []


# ---------------------------------------------------------------- prefetch

DEVICE = DeviceFacts(8 << 20, "nvme7n1", "nvme pcie", read_ahead_bytes=1 << 20, mounts=("/kv",))


def test_an_earlier_start() -> None:
    """The effect comes from the finding's own evidence."""
    (late,) = late_prefetch.DETECTOR.detect(ledgers.late_prefetch())
    proposal = one("prefetch", workload(made(FLAT)), late)
    assert proposal.knob == "prefetch_horizon" and proposal.proposed == 1
    assert proposal.effect is not None and proposal.effect.metric == "ttft_ns"
    effect = (proposal.effect.low, proposal.effect.mid, proposal.effect.high)
    assert effect == pytest.approx((-1 / 2, -1 / 3, -1 / 6))
    assert proposal.apply.startswith("--prefetch")


def test_the_horizon_covers_a_restore() -> None:
    """A restore of 80 ms over 20 ms of service each: four predecessors."""
    (late,) = late_prefetch.DETECTOR.detect(ledgers.late_prefetch())
    slow = made(FLAT, read_ns=5_000 * US)
    assert one("prefetch", slow, late).proposed == 4
    waited = replace(slow, queue_ns_per_restore=Interval(10e6, 0, 20e6, 101))
    assert one("prefetch", waited, late).proposed == 8


def test_an_engine_that_prefetches_already_gets_no_proposal() -> None:
    (late,) = late_prefetch.DETECTOR.detect(ledgers.late_prefetch())
    facts = made(FLAT)
    assert facts.engine is not None
    on = replace(facts, engine=replace(facts.engine, prefetch=True))
    assert proposals("prefetch", on, late) == []


def test_the_window_holds_one_read() -> None:
    (waste,) = readahead_waste.DETECTOR.detect(ledgers.readahead_waste())
    facts = replace(made(FLAT), device=DEVICE)
    proposal = one("prefetch", facts, waste)
    assert (proposal.current, proposal.proposed) == (1 << 20, UNIT)
    assert proposal.apply == "echo 64 > /sys/block/nvme7n1/queue/read_ahead_kb"
    assert proposal.undo == "echo 1024 > /sys/block/nvme7n1/queue/read_ahead_kb"
    assert proposal.effect is not None
    assert proposal.effect.mid == pytest.approx(-0.5 * (1 - 64 / 1024))


@pytest.mark.parametrize(
    ("read", "window"), [(512, 16384), (16384, 16384), (16385, 32768), (100_000, 131072)]
)
def test_the_window_is_never_small(read: int, window: int) -> None:
    (waste,) = readahead_waste.DETECTOR.detect(ledgers.readahead_waste())
    facts = replace(made(FLAT), device=DEVICE)
    assert facts.restore is not None
    sized = replace(facts.restore, bytes=facts.restore.ops * read)
    assert one("prefetch", replace(facts, restore=sized), waste).proposed == window


def test_a_window_that_fits_is_left_alone() -> None:
    (waste,) = readahead_waste.DETECTOR.detect(ledgers.readahead_waste())
    small = replace(made(FLAT), device=replace(DEVICE, read_ahead_bytes=UNIT))
    assert proposals("prefetch", small, waste) == []


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", content.tuners())
def test_facts_with_holes_make_no_tuner_fail(name: str) -> None:
    tuner = content.tuners()[name]
    empty = Facts(engine=None, device=None, restore=None, surface=())
    restore = made(FLAT).restore
    assert restore is not None
    nothing = replace(restore, n=0, ops=0, bytes=0, restore_ns=0)
    found = [finding(slug) for slug in tuner.answers]
    for facts in (empty, replace(empty, restore=nothing), replace(empty, device=DEVICE)):
        assert tuner.propose(found, facts) == []
    assert tuner.propose([], made(FLAT)) == []
    for proposal in tuner.propose(found, replace(empty, restore=restore)):
        assert proposal.needs and proposal.effect is None


@pytest.mark.parametrize(
    "facts",
    [
        made([]),
        made(FLAT, at_once=3.2),
        replace(made(FLAT), restore=None, device=DEVICE),
        replace(made([]), engine=None),
    ],
)
def test_the_command_that_is_needed_is_one(facts: Facts) -> None:
    words = shlex.split(sweep_command(facts))
    assert words[0] == "kvprobe"
    chosen, options = cli.parse(words[1:])
    assert chosen.name == "sweep" and options.direct is True


def test_requests_that_meet_need_a_deeper_sweep() -> None:
    """Three restore at once, sixteen reads each: 48, so 64."""
    assert sweep_command(made(FLAT, at_once=3.0)).endswith("--depths 1,2,4,8,16,32,64")


def test_sizes_to_measure_are_whole_pages() -> None:
    """A unit of 1,124,352 B (16 tokens of a large MLA model) is no multiple of 4096."""
    facts = made(FLAT)
    assert facts.restore is not None
    odd = replace(facts.restore, bytes=facts.restore.ops * 1_124_352)
    assert " --sizes 1100k,4392k " in sweep_command(replace(facts, restore=odd))


def test_large_units_need_a_larger_file() -> None:
    facts = made(FLAT)
    assert facts.restore is not None
    large = replace(facts.restore, bytes=facts.restore.ops * 32 << 20)
    command = sweep_command(replace(facts, restore=large))
    assert " --sizes 32m " in command and command.endswith(" --max-bytes 2048m")
