"""Each detector fires on its case, and on no other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe import findings
from kvprobe.correlator.ledger import Account, Ledger, ReadAhead, Restore
from kvprobe.findings._storage import at_stake
from kvprobe.findings._weigh import Restored, regret_sum, severity
from kvprobe.model import EngineFacts, Interval, ServiceCell, Verdict
from tests.findings import fabrics, gpu_direct, gpus, ledgers
from tests.findings.ledgers import MIB, MS, account, cell, device, ledger, reads, restore

Case = Callable[..., Ledger]
ILL = (*ledgers.ILL, *fabrics.ILL, *gpus.ILL, *gpu_direct.ILL)


def slugs(made: Ledger) -> set[str]:
    return {finding.slug for finding in findings.detect_all(made)}


def value(made: Ledger, slug: str, metric: str) -> float:
    found = {f.slug: f for f in findings.detect_all(made)}[slug]
    evidence = {e.metric: e for e in found.evidence}[metric]
    assert evidence.value is not None
    return evidence.value


def test_every_detector_has_a_case() -> None:
    assert sorted(findings.detectors()) == sorted(case.__name__ for case in ILL)
    assert all(slug == d.slug for slug, d in findings.detectors().items())


@pytest.mark.parametrize(
    "case", (*ledgers.HEALTHY, *fabrics.HEALTHY, *gpus.HEALTHY, *gpu_direct.HEALTHY)
)
def test_a_healthy_run_yields_nothing(case: Case) -> None:
    assert findings.detect_all(case()) == []


@pytest.mark.parametrize("case", ILL)
def test_cross_table(case: Case) -> None:
    """The diagonal and nothing beside it."""
    assert slugs(case()) == {case.__name__}


@pytest.mark.parametrize("case", ILL)
def test_too_few_samples_say_nothing(case: Case) -> None:
    assert findings.detect_all(case(1)) == []
    assert findings.detect_all(case(0)) == []


@pytest.mark.parametrize("case", ILL)
def test_what_a_finding_carries(case: Case) -> None:
    (few,) = findings.detect_all(case(13))
    (many,) = findings.detect_all(case(211))
    assert 0 < few.confidence < many.confidence < 1
    for finding in (few, many):
        assert re.search(r"vllm|nvme\d|GPU \d", finding.subject)
        assert finding.would_disprove
        assert all(e.n > 0 and e.metric for e in finding.evidence)
        assert all(e.value is None or math.isfinite(e.value) for e in finding.evidence)


def test_gravest_first() -> None:
    asked = 41 * 8 * MIB
    some_waste = ReadAhead(asked, asked * 4 // 3, asked // 3, 41 * 8, 0, 0)
    made = replace(ledgers.late_prefetch(), read_ahead=some_waste)
    assert [(f.slug, f.severity) for f in findings.detect_all(made)] == [
        ("late_prefetch", "critical"),
        ("readahead_waste", "info"),
    ]
    assert findings.SEVERITIES.index("info") < findings.SEVERITIES.index("warning")


@pytest.mark.parametrize(
    ("share", "word"),
    [(None, "warning"), (0.049, "info"), (0.05, "warning"), (0.25, "critical")],
)
def test_severity_follows_the_time_at_stake(share: float | None, word: str) -> None:
    assert severity(share) == word


# ---------------------------------------------------------------- serial_restore


def test_serial_reads_of_many_requests_that_fill_the_device_are_no_finding() -> None:
    busy = replace(ledgers.serial_restore(), devices=(device(9.0, 0.1),))
    assert "serial_restore" not in slugs(busy)


@pytest.mark.parametrize(
    ("depth", "rate", "fires"), [(4, 1.05e9, False), (4, 3e9, True), (1, 3e9, False)]
)
def test_a_measured_rate_at_more_depth_decides(depth: int, rate: float, fires: bool) -> None:
    """A cell at the depth of now says nothing about more depth."""
    surface = (cell(MIB, 1, 1e9), cell(MIB, depth, rate))
    made = replace(
        ledgers.serial_restore(),
        devices=(replace(device(9.0, 0.1), surface=surface),),
        ops=reads([MIB] * 53, lambda size: MS),
    )
    assert ("serial_restore" in slugs(made)) is fires
    if fires:
        assert value(made, "serial_restore", "measured rate at more depth over now") == 3.0


def test_serial_without_a_witness_is_less_sure() -> None:
    seen = ledgers.serial_restore()
    (with_device,) = findings.detect_all(seen)
    (without,) = findings.detect_all(replace(seen, devices=()))
    assert without.confidence == pytest.approx(with_device.confidence / 2, abs=1e-3)


@pytest.mark.parametrize("case", ILL)
def test_requests_that_were_cut_off_put_nothing_at_stake(case: Case) -> None:
    """Of two requests in three the first token was not seen, only the restore: a long one."""
    ledger = case()
    kept = replace(ledger, accounts=tuple(cut_off(a, i % 3 > 0) for i, a in enumerate(
        ledger.accounts)))  # fmt: skip
    for finding in findings.detect_all(kept):
        for evidence in finding.evidence:
            if "time to first token" in evidence.metric and evidence.value is not None:
                assert evidence.value <= 1, (finding.slug, evidence)
                assert evidence.n <= sum(a.ttft_ns is not None for a in kept.accounts)


def test_time_to_first_token_at_stake_is_of_requests_that_had_one() -> None:
    requests = [Restored(cut_off(a, i % 3 > 0), a.restore)
                for i, a in enumerate(ledgers.serial_restore().accounts) if a.restore]  # fmt: skip
    whole = [r for r in requests if r.account.ttft_ns]
    assert 0 < len(whole) < len(requests)
    assert at_stake(requests, 0.5) == at_stake(whole, 0.5)


def cut_off(account: Account, really: bool) -> Account:
    return replace(account, ttft_ns=None) if really else account


def test_confidence_follows_the_stated_rule() -> None:
    (found,) = findings.detect_all(ledgers.serial_restore(31))
    assert found.confidence == round(31 / 39, 3)  # every byte serial: the margin is full


def test_few_serial_bytes_beside_large_units_are_no_finding() -> None:
    large = [account(i, restore(reads=1, unit=64 * MIB, depth=1.0)) for i in range(41)]
    serial = [account(41 + i, restore(reads=16, depth=1.0)) for i in range(41)]
    assert "serial_restore" not in slugs(ledger(large + serial))


@pytest.mark.parametrize(("commands", "fires"), [(0, False), (2, True)])
def test_restores_that_memory_served_are_not_serial(commands: int, fires: bool) -> None:
    """One restore in five came from the device, four reads at a time or one."""
    cached = replace(restore(reads=16, depth=1.0), commands=commands)
    hot = [account(i, cached) for i in range(41)]
    cold = [account(41 + i, restore(reads=16, depth=4.0)) for i in range(11)]
    assert ("serial_restore" in slugs(ledger(hot + cold))) is fires


def test_without_block_rows_nothing_is_taken_for_memory() -> None:
    unseen = replace(restore(reads=16, depth=1.0), commands=0)
    assert "serial_restore" in slugs(ledger([account(i, unseen) for i in range(41)]))


# ---------------------------------------------------------------- small_blocks


@pytest.mark.parametrize(("alpha_ns", "fires"), [(500_000, True), (20_000, False)])
def test_reads_of_several_sizes_give_the_line(alpha_ns: int, fires: bool) -> None:
    """Time = alpha + bytes / (1 GB/s) at 64 KiB: share alpha / (alpha + 65.536 us)."""
    done = restore(reads=64, unit=65536, depth=4.0)
    sizes = [16384, 65536, 262144] * 37
    made = ledger(
        [account(i, done) for i in range(41)], ops=reads(sizes, lambda size: alpha_ns + size)
    )
    assert ("small_blocks" in slugs(made)) is fires
    if fires:
        metric = "share of a read that is fixed cost, from reads of several sizes"
        assert value(made, "small_blocks", metric) == pytest.approx(
            alpha_ns / (alpha_ns + 65536), rel=1e-6
        )


def test_measured_cells_of_several_sizes_give_the_line() -> None:
    def rate(size: int) -> float:
        return size / (300e-6 + size / 1e9)

    surface = tuple(cell(size, 1, rate(size)) for size in (16384, 65536, 262144, MIB))
    made = ledger(
        [account(i, restore(reads=64, unit=65536)) for i in range(41)],
        devices=(replace(device(), surface=surface),),
    )
    metric = "share of a read that is fixed cost, from measured rates of several sizes"
    assert value(made, "small_blocks", metric) == pytest.approx(300e-6 / (300e-6 + 65536e-9))


def test_copying_many_bytes_is_no_fixed_cost() -> None:
    """16 MiB a read in 8 ms of software: that is a copy, not a cost of asking."""
    done = restore(reads=8, unit=16 * MIB, device=MS, software=8 * 7 * MS, idle=0)
    assert slugs(ledger([account(i, done) for i in range(41)])) == set()


# ---------------------------------------------------------------- late_prefetch


def test_reads_that_began_before_scheduling_are_not_late() -> None:
    made = ledgers.late_prefetch()
    early = tuple(replace(a, first_read_ns=(a.first_read_ns or 0) - 1) for a in made.accounts)
    assert slugs(replace(made, accounts=early)) == set()


def test_storage_that_was_busy_explains_the_wait() -> None:
    made = ledgers.late_prefetch()
    busy = tuple(replace(a, device_before_read_ns=10 * MS) for a in made.accounts)
    assert slugs(replace(made, accounts=busy)) == set()


def test_what_an_earlier_start_saves() -> None:
    """Queue 30 ms, restore 10 ms, prefill 20 ms.

    Hidden: the restore, 10 of 60 ms. Expected: the queue falls by the restore's third of the time
    in service to 20 ms, so before prefill 20 of 40 ms are left. At most: all of the queue.
    """
    what = "share of time to first token an earlier start saves, "
    apart = ledgers.late_prefetch()
    assert value(apart, "late_prefetch", what + "at least") == pytest.approx(1 / 6)
    assert value(apart, "late_prefetch", what + "expected") == pytest.approx(1 / 3)
    assert value(apart, "late_prefetch", what + "at most") == pytest.approx(1 / 2)
    crowd = ledger([account(i // 2, restore(), queued=30 * MS) for i in range(82)])
    assert value(crowd, "late_prefetch", what + "at least") == pytest.approx(1 / 12)


def test_a_wait_shorter_than_the_restore_hides_as_much_as_it_is() -> None:
    what = "share of time to first token an earlier start saves, "
    made = ledger([account(i, restore(), queued=6 * MS) for i in range(41)])
    for word in ("at least", "expected", "at most"):
        assert value(made, "late_prefetch", what + word) == pytest.approx(6 / 36)


# ---------------------------------------------------------------- restore_loses, recompute_loses


def test_regret_is_summed_with_its_interval() -> None:
    made = ledgers.restore_loses(41)  # 14 of 41 lost 15 ms each
    assert value(made, "restore_loses", "restores that lost") == 14
    assert value(made, "restore_loses", "time lost by them, sum") == 14 * 15 * MS
    low = value(made, "restore_loses", "time lost by them, low end")
    high = value(made, "restore_loses", "time lost by them, high end")
    # A binomial count of 14 +- 1.645 * 3.04, and 3 ms of spread in each gain.
    spread = 1.645 * math.hypot(15 * math.sqrt(41 * (14 / 41) * (27 / 41)), 3.04 * 14**0.5)
    assert low == pytest.approx((14 * 15 - spread) * MS, rel=0.1)
    assert high == pytest.approx((14 * 15 + spread) * MS, rel=0.1)


def test_uncertain_gains_widen_the_sum() -> None:
    """Fifty equal losses of 10 +- 3.29 (sigma 2): 500 +- 1.645 * 2 * sqrt(50)."""
    total = regret_sum([Interval(-10, -13.29, -6.71, 9)] * 50, [True] * 50, 50)
    assert total.mid == 500
    assert total.high - total.low == pytest.approx(2 * 1.645 * 2 * 50**0.5, rel=0.08)


def test_a_loss_that_nobody_would_notice_is_no_finding() -> None:
    tiny = Interval(-1000.0, -1100.0, -900.0, 41)
    made = ledger(
        [account(i, restore(), gain=tiny, verdict=Verdict.RESTORE_LOST) for i in range(41)]
    )
    assert slugs(made) == set()


def test_undecided_restores_count_as_judged() -> None:
    unsure = Interval(1.0 * MS, -2.0 * MS, 4.0 * MS, 41)
    lost = [
        account(i, restore(), gain=ledgers.LOST, verdict=Verdict.RESTORE_LOST) for i in range(4)
    ]
    rest = [account(4 + i, restore(), gain=unsure) for i in range(97)]
    assert slugs(ledger(lost + rest[:20])) == {"restore_loses"}
    assert slugs(ledger(lost + rest)) == set()


# ---------------------------------------------------------------- the page cache


def test_read_ahead_that_was_used_is_no_mask() -> None:
    """Half of the reads find what read-ahead brought: the device did deliver it."""
    asked = 41 * 8 * MIB
    ahead = ReadAhead(asked, asked, 0, 328, 164, asked // 2)
    assert slugs(ledgers.healthy(read_ahead=ahead)) == set()


# ---------------------------------------------------------------- robustness

maybe_ns = st.none() | st.integers(-(2**40), 2**50)
count = st.integers(0, 2**40)
intervals_ = st.builds(
    Interval,
    st.floats(-1e12, 1e12),
    st.floats(-1e12, 1e12),
    st.floats(-1e12, 1e12),
    st.integers(0, 99),
)
restores = st.builds(
    Restore,
    bytes=count,
    ops=st.integers(0, 99),
    commands=count,
    exposed_ns=count,
    hidden_ns=count,
    device_ns=count,
    block_queue_ns=count,
    software_ns=count,
    idle_ns=count,
    effective_depth=st.none() | st.floats(0, 1e3),
)
accounts = st.builds(
    Account,
    id=st.just("r"),
    arrival_ns=st.integers(-1, 2**50),
    ttft_ns=st.none() | count,
    prompt_tokens=st.none() | count,
    device_hit_tokens=st.none() | count,
    storage_hit_tokens=st.none() | count,
    computed_tokens=st.none() | count,
    stored_tokens=st.none() | count,
    spans=st.none(),
    restore=st.none() | restores,
    recompute_ns=st.none(),
    restore_estimate_ns=st.none(),
    verdict=st.sampled_from(Verdict),
    gain_ns=st.none() | intervals_,
    attribution=st.just({}),
    first_read_ns=maybe_ns,
    scheduled_ns=maybe_ns,
    prefill_start_ns=maybe_ns,
    device_before_read_ns=maybe_ns,
)
aheads = st.none() | st.builds(
    ReadAhead, count, count, count, st.integers(0, 99), st.integers(0, 99), count
)
cells = st.lists(
    st.builds(cell, st.sampled_from([0, 4096, 65536, MIB]), st.integers(0, 9), st.floats(0, 1e12)),
    max_size=9,
)


@given(
    st.lists(accounts, max_size=40),
    aheads,
    cells,
    st.none() | st.floats(0, 99),
    st.none() | st.floats(0, 1),
    st.booleans(),
)
def test_no_ledger_makes_a_detector_fail(
    listed: list[Account],
    ahead: ReadAhead | None,
    surface: list[ServiceCell],
    depth: float | None,
    zero: float | None,
    named: bool,
) -> None:
    made = ledger(
        listed,
        read_ahead=ahead,
        engine=EngineFacts("vllm") if named else None,
        devices=(replace(device(depth, zero), surface=tuple(surface)),) if named else (),
        ops=reads([4096, MIB] * len(listed), lambda size: size),
    )
    for finding in findings.detect_all(made):
        assert 0 <= finding.confidence <= 1
        assert all(e.value is None or math.isfinite(e.value) for e in finding.evidence)
