"""Predicted restores: figures worked out by hand, no extrapolation, and a simulation as judge."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.model import Proposal, ServiceCell
from kvprobe.prediction import (
    predict_restore,
    predict_ttft,
    restore_effect,
    settings_after,
    smallest_near_best,
)
from kvprobe.surface import Surface
from tests.tuning import simulation
from tests.tuning.restores import FLAT, READS, UNIT, US, N, exact, made

SPREAD = math.exp(math.sqrt(1 / N))


# ---------------------------------------------------------------- by hand


def test_more_reads_in_flight() -> None:
    """16 reads, 8 at once: two rounds of 100 us; a last round cut short costs 7/16 of one."""
    found = predict_restore(made(FLAT), reads_in_flight=8)
    assert found is not None
    assert found.mid == pytest.approx(200 * US + 7 / 16 / 2 * 100 * US)
    assert found.low == pytest.approx(200 * US / SPREAD)
    assert found.high == pytest.approx((200 + 7 / 16 * 100) * US * SPREAD)
    assert found.n == N and found.level == 0.9


def test_a_larger_unit() -> None:
    """Four reads of 256 KiB, 130 us each and 50 us pause: 720 us."""
    cells = [exact(UNIT, 1, 100 * US), exact(4 * UNIT, 1, 130 * US)]
    found = predict_restore(made(cells, pause_ns=50 * US), unit_bytes=4 * UNIT)
    assert found is not None
    assert found.mid == pytest.approx(4 * 180 * US)
    assert found.low == pytest.approx(4 * 180 * US / SPREAD)
    # Copying 64 KiB at 2 GiB/s, 30.5 us of the pause, would be four times that.
    copying = UNIT / 2**31 * 1e9
    assert found.high == pytest.approx(4 * (180 * US + 3 * copying) * SPREAD)


@pytest.mark.parametrize(("direct", "mid_us"), [(True, 4 * 121), (False, 4 * (4 * 30 + 91))])
def test_software_around_a_read_is_paid_once_a_read(direct: bool, mid_us: float) -> None:
    """30 of 100 us are software, so k = 0.7. Buffered, all 30 may be copying of 64 KiB."""
    cells = [exact(UNIT, 1, 100 * US), exact(4 * UNIT, 1, 130 * US)]
    facts = made([replace(cell, direct=direct) for cell in cells], software_ns=30 * US)
    assert facts.engine is not None
    facts = replace(facts, engine=replace(facts.engine, direct=direct))
    found = predict_restore(facts, unit_bytes=4 * UNIT)
    assert found is not None and found.mid == pytest.approx(mid_us * US)


def test_both_changes() -> None:
    cells = [exact(s, d, 100 * US * s / UNIT) for s in (UNIT, 4 * UNIT) for d in (1, 2, 4)]
    found = predict_restore(made(cells), 4 * UNIT, 4)
    assert found is not None
    assert found.mid == pytest.approx(400 * US * (1 + 3 / 8 / 2))


def test_a_saturated_device_gains_nothing() -> None:
    """Twice the depth, twice the time of a read."""
    cells = [exact(UNIT, depth, depth * 100 * US) for depth in (1, 2, 4, 8)]
    found = predict_restore(made(cells), reads_in_flight=8)
    assert found is not None
    assert found.low == pytest.approx(1600 * US / SPREAD)


def test_pauses_keep_the_device_from_being_full() -> None:
    """L = 100 x, x = 1 + 3 L / (Z + L), Z = 100: L = 100 (1 + sqrt 5) / 2 + 100 = ..."""
    cells = [exact(UNIT, depth, depth * 100 * US) for depth in (1, 2, 4)]
    found = predict_restore(made(cells, pause_ns=100 * US), reads_in_flight=4)
    # l = 1 + 3 l / (1 + l)  =>  l^2 - 3 l - 1 = 0, in units of 100 us
    read = (3 + math.sqrt(13)) / 2
    assert found is not None
    assert found.mid == pytest.approx(
        16 * (read + 1) / 4 * 100 * US * (1 + 3 / 8 / 2 / 4), rel=1e-3
    )


def test_what_the_capture_saw_calibrates_the_cells() -> None:
    """Reads took 120 us where the sweep took 100: so they will; the low end doubts it."""
    found = predict_restore(made(FLAT, read_ns=120 * US), reads_in_flight=2)
    assert found is not None
    assert found.mid == pytest.approx(8 * 120 * US + 120 * US / 8)
    assert found.low == pytest.approx(8 * 100 * US / SPREAD)


def test_requests_that_restore_at_once_share_the_device() -> None:
    """Three at once on a saturated device; shorter restores meet less often."""
    cells = [exact(UNIT, d, d * 100 * US) for d in (1, 2, 4, 8, 16, 32)]
    facts = made(cells, read_ns=300 * US, at_once=3.0)
    found = predict_restore(facts, reads_in_flight=4)
    # restore = 16 x / 4 with x = 4 c and c = 1 + 2 restore / 48, in units of 100 us:
    # restore = 16 (1 + restore / 24) => restore = 48: the device is full, nothing is gained
    assert found is not None
    assert found.low == pytest.approx(48 * 100 * US / SPREAD, rel=1e-3)


def test_shorter_restores_meet_less_often() -> None:
    """Units of four times the size take twice as long: 4 reads of 2 c, c = 1 + 2 restore / 48."""
    cells = [
        exact(s, d, d * took * US) for s, took in ((UNIT, 100), (4 * UNIT, 200)) for d in (1, 2, 4)
    ]
    found = predict_restore(made(cells, read_ns=300 * US, at_once=3.0), unit_bytes=4 * UNIT)
    # restore = 8 + restore / 3
    assert found is not None and found.mid == pytest.approx(12 * 100 * US, rel=1e-4)


def test_a_restore_has_no_more_reads_in_flight_than_reads() -> None:
    cells = [*FLAT, exact(UNIT, 16, 100 * US)]
    assert predict_restore(made(cells), reads_in_flight=64) == predict_restore(
        made(cells), reads_in_flight=16
    )


def test_one_thread_of_software_bounds_what_depth_can_gain() -> None:
    """80 of 100 us of each read are software: 16 of them on one thread take 1.28 ms."""
    found = predict_restore(made(FLAT, software_ns=80 * US), reads_in_flight=8)
    assert found is not None
    assert found.high == pytest.approx(16 * 80 * US * SPREAD)


def test_the_present_setting_is_what_was_measured() -> None:
    facts = made(FLAT, pause_ns=30 * US, reads_in_flight=2)
    for found in (predict_restore(facts), predict_restore(facts, UNIT, 2)):
        assert found is not None and found.mid == 16 * 130 * US
    effect = restore_effect(facts)
    assert effect is not None and effect.mid == 0 and effect.low < 0 < effect.high


def test_noise_of_the_cells_widens_the_interval() -> None:
    noisy = [
        replace(c, low_bytes_per_s=c.bytes_per_s / 1.2, high_bytes_per_s=c.bytes_per_s * 1.2)
        for c in FLAT
    ]
    found = predict_restore(made(noisy), reads_in_flight=8)
    assert found is not None
    expected = math.exp(math.sqrt(1 / N + 2 * math.log(1.2) ** 2))
    assert found.low == pytest.approx(200 * US / expected)


def test_a_unit_read_in_pieces_keeps_its_pieces() -> None:
    """Units of 1 MiB read 64 KiB at a time: a larger unit changes no read."""
    facts = made(FLAT)
    assert facts.engine is not None
    pieces = replace(facts, engine=replace(facts.engine, unit_bytes=16 * UNIT))
    found = predict_restore(pieces, unit_bytes=64 * UNIT)
    assert found is not None and found.mid == 1600 * US


def test_a_read_that_requests_share_is_still_a_whole_unit() -> None:
    """Counted for each of them, the mean read looks smaller than the unit."""
    facts = made(FLAT)
    assert facts.restore is not None
    shared = replace(facts, restore=replace(facts.restore, ops=facts.restore.ops * 8 // 7))
    found, plain = (predict_restore(f, reads_in_flight=8) for f in (shared, facts))
    assert found is not None and plain is not None and found.mid == pytest.approx(plain.mid)


def test_time_to_first_token() -> None:
    """20 ms besides the restore; 192 more tokens of unit lose 96 tokens of 10 us each."""
    cells = [exact(UNIT, 1, 100 * US), exact(4 * UNIT, 1, 130 * US)]
    facts = replace(made(cells), recompute_ns_per_token=10_000.0)
    restore, ttft = predict_restore(facts, 4 * UNIT), predict_ttft(facts, 4 * UNIT)
    assert restore is not None and ttft is not None
    assert ttft.mid - restore.mid == pytest.approx(20_000 * US + 96 * 10 * US)
    assert ttft.low - restore.low == pytest.approx(20_000 * US)
    assert ttft.high - restore.high == pytest.approx(20_000 * US + 192 * 10 * US)


def test_a_sweep_is_preferred_to_what_the_capture_saw() -> None:
    seen = [exact(UNIT, 8, 400 * US, "capture")]
    assert predict_restore(made(FLAT + seen), reads_in_flight=8) == predict_restore(
        made(FLAT), reads_in_flight=8
    )
    only_one = [exact(UNIT, 1, 100 * US)]
    assert predict_restore(made(only_one + seen), reads_in_flight=8) is not None
    assert predict_restore(made(only_one), reads_in_flight=8) is None


def test_a_sweep_is_not_mixed_with_what_the_capture_saw() -> None:
    bent = [*FLAT, exact(UNIT, 3, 900 * US, "capture")]
    assert predict_restore(made(bent), reads_in_flight=3) == predict_restore(
        made(FLAT), reads_in_flight=3
    )


def test_buffered_cells_say_nothing_about_direct_reads() -> None:
    buffered = [replace(cell, direct=False) for cell in FLAT]
    assert predict_restore(made(buffered), reads_in_flight=8) is None


def test_nothing_restored_predicts_nothing() -> None:
    facts = made(FLAT)
    assert predict_restore(replace(facts, restore=None), reads_in_flight=8) is None
    assert predict_ttft(replace(facts, restore=None)) is None


def test_settings_after_proposals() -> None:
    def proposal(knob: str, value: int | None, needs: str | None = None) -> Proposal:
        return Proposal("t", "f", knob, "x", None, value, "B", "", needs=needs)

    facts = made(FLAT)
    assert settings_after(facts, []) == (None, None)
    both = [proposal("unit_bytes", 4 * UNIT), proposal("bytes_in_flight", 8 * UNIT)]
    assert settings_after(facts, both) == (4 * UNIT, 8)
    assert settings_after(facts, [proposal("unit_bytes", None, "kvprobe sweep DIR")]) == (
        None,
        None,
    )


def test_smallest_near_best() -> None:
    assert smallest_near_best({}) is None
    assert smallest_near_best({2: 120.0, 4: 109.0, 8: 100.0}) == 4


# ---------------------------------------------------------------- nothing is extrapolated


def test_between_cells_times_are_linear() -> None:
    surface = Surface([exact(s, d, 10 * US + s * d) for s in (4096, 65536) for d in (1, 8)])
    for size, depth in ((4096, 3), (20000, 1), (65536, 8)):
        found = surface.response(size, depth)
        assert found is not None and found.mid == pytest.approx(10 * US + size * depth)


cells_ = st.lists(
    st.tuples(
        st.sampled_from([4096, 16384, 65536, 65537, 262144]),
        st.integers(1, 32),
        st.floats(1e3, 1e9),
    ).map(lambda cell: exact(*cell)),
    max_size=12,
)


@given(cells_, st.floats(1024, 1e6), st.floats(1, 64))
def test_a_response_lies_inside_what_was_measured(
    cells: list[ServiceCell], size: float, depth: float
) -> None:
    found = Surface(cells).response(size, depth)
    if found is None:
        return
    sizes, depths = [c.size_bytes for c in cells], [c.depth for c in cells]
    assert min(sizes) / 1.1 <= size <= max(sizes) * 1.1
    assert min(depths) / 1.1 <= depth <= max(depths) * 1.1
    times = [c.depth * c.size_bytes / c.bytes_per_s * 1e9 for c in cells]
    assert min(times) * 0.999 <= found.mid <= max(times) * 1.001


@given(cells_, st.sampled_from([1, 2, 4, 8]), st.integers(1, 64), st.floats(1, 4))
def test_no_prediction_without_cells_on_both_sides(
    cells: list[ServiceCell], growth: int, depth: int, at_once: float
) -> None:
    facts = made(cells, at_once=at_once)
    found = predict_restore(facts, growth * UNIT, depth)
    if found is None or (growth, depth) == (1, 1):
        return
    assert 0 < found.low <= found.mid <= found.high < math.inf
    sizes = [c.size_bytes for c in cells]
    assert min(sizes) / 1.1 <= UNIT <= growth * UNIT <= max(sizes) * 1.1
    assert min(c.depth for c in cells) <= 1.1 * at_once
    if depth > 1 and growth < READS and at_once == 1:
        # Without pauses each read finds all others at the device.
        assert max(c.depth for c in cells) * 1.1 >= min(depth, READS / growth)


# ---------------------------------------------------------------- the simulation judges


def test_the_interval_holds_the_simulated_truth() -> None:
    """97 worlds, each run once badly set and once as predicted: 90 % intervals."""
    inside, widths, errors = 0, [], []
    worlds = 97
    for seed in range(worlds):
        bad, good = simulation.random_world(seed)
        seen = simulation.run(bad, seed)
        facts = simulation.facts(
            bad, seen, seed, [bad.read_bytes, 4 * bad.read_bytes], [1, 2, 4, 8, 16, 32]
        )
        found = predict_restore(facts, good.read_bytes, good.in_flight)
        assert found is not None
        truth = simulation.run(good, seed + 1_000_003).mean_ns
        inside += found.low <= truth <= found.high
        widths.append(found.high / found.low)
        errors.append(math.log(found.mid / truth))
    assert inside / worlds >= 0.85
    assert np.median(widths) < 1.7  # an interval that holds everything would say nothing
    assert abs(np.median(errors)) < 0.1
