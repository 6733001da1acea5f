"""GPU samples against requests, on a node whose truth is known tick by tick."""

from dataclasses import replace

import numpy as np
import pytest

from kvprobe.arithmetic import ModelArithmetic
from kvprobe.correlator.gpu.analysis import with_gpus
from kvprobe.correlator.gpu.bound import judge
from kvprobe.correlator.gpu.ledger import Bound, GpuAccount, Shares
from kvprobe.correlator.ledger import Ledger
from kvprobe.model import EngineFacts, Interval
from tests.correlator.gpu_node import FACTS, SMALL, Node, holds, sampling

MS = 1_000_000


def seen(node: Node, **more: object) -> tuple[Ledger, GpuAccount]:
    ledger = with_gpus(node.ledger(**more), node.frame(), sampling())  # type: ignore[arg-type]
    return ledger, ledger.gpus[0]


def served(seed: int, requests: int, restore_ms: float, gap_ms: float, **more: object) -> Node:
    """Requests one after another, with pauses; every third restores nothing."""
    node = Node(requests * (restore_ms * 1.5 + gap_ms + 90) / 1e3 + 1, seed)
    at = 3.0
    for number in range(requests):
        restore = 0.0 if number % 3 == 2 else restore_ms * node.random.uniform(0.5, 1.5)
        at = node.request(at, restore, **more) + node.random.exponential(gap_ms)  # type: ignore[arg-type]
    return node


# ---------------------------------------------------------------- starvation


@pytest.mark.parametrize("seed", range(5))
def test_starved_time_is_the_time_of_restores_without_work(seed: int) -> None:
    node = served(seed, 101, restore_ms=37, gap_ms=23)
    found = seen(node)[1].starvation
    assert found is not None
    truth = node.starved_ns()
    assert truth > 2e9
    assert found.starved_ns == pytest.approx(truth, rel=0.05)
    assert found.low_ns <= truth <= found.high_ns * 1.001  # ticks round
    covered = node.covered
    assert found.idle_ns == pytest.approx(node.idle[covered].sum() * 1e5, rel=1e-6)
    assert found.restore_ns == pytest.approx(node.restoring[covered].sum() * 1e5, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_other_work_is_not_starvation(seed: int) -> None:
    node = served(seed, 101, restore_ms=61, gap_ms=13)
    for _ in range(211):
        node.other_work(node.random.uniform(0, node.seconds * 900), node.random.exponential(29))
    found = seen(node)[1].starvation
    assert found is not None
    truth = node.starved_ns()
    assert found.low_ns <= truth <= found.high_ns
    assert found.starved_ns == pytest.approx(truth, rel=0.10)


def test_a_restore_behind_other_prefills_starves_nobody() -> None:
    node = Node(20)
    for number in range(17):
        node.request(1000.0 * number + 5, 0.0, prefill_ms=990)
        node.request(1000.0 * number + 205, 313, prefill_ms=400, shares={})
    found = seen(node)[1].starvation
    assert found is not None
    assert found.restores == 17
    assert found.restore_ns == 17 * 313 * MS
    assert found.starved_ns < 0.01 * found.restore_ns


def test_without_restores_or_samples_nothing_is_claimed() -> None:
    node = served(1, 31, restore_ms=0.0, gap_ms=40)
    found = seen(node)[1].starvation
    assert found is not None
    assert (found.starved_ns, found.high_ns, found.restores) == (0, 0, 0)
    rows = node.frame()
    for column in ("graphics_activity_share", "tensor_activity_share"):
        rows[column][:] = np.nan
    blind = with_gpus(node.ledger(), rows, sampling()).gpus[0]
    assert (blind.starvation, blind.follows_prefills, blind.windows) == (None, None, ())
    rows = node.frame()
    rows["graphics_activity_share"][:] = np.nan
    rows["tensor_activity_share"][:] = 0.3
    assert with_gpus(node.ledger(), rows, sampling()).gpus[0].follows_prefills is None


# ---------------------------------------------------------------- prefills


def two_sizes(seed: int, requests: int, gap_ms: float) -> Node:
    """Long ones that the tensor cores bound, short ones that memory binds."""
    node = Node(requests * (gap_ms + 60) / 1e3 + 2, seed)
    at = 3.0
    for number in range(requests):
        if number % 2:
            at = node.request(at, prefill_ms=83, new=4099)
        else:
            at = node.request(at, prefill_ms=7, new=101, shares=SMALL)
        at += node.random.exponential(gap_ms)
    return node


@pytest.mark.parametrize("seed", range(5))
def test_prefills_shorter_than_a_sample_are_told_apart_by_size(seed: int) -> None:
    node = two_sizes(seed, 809, gap_ms=17)
    ledger, gpu = seen(node)
    small, big = gpu.prefills
    assert (small.tokens_low, small.tokens_high, small.prefills) == (101, 101, 405)
    assert (big.tokens_low, big.tokens_high, big.prefills) == (4099, 4099, 404)
    assert (small.bound, big.bound) == (Bound.HBM, Bound.COMPUTE)
    assert holds(small.shares.hbm, 0.8) and holds(small.shares.compute, 0.2)
    assert holds(big.shares.hbm, 0.3) and holds(big.shares.compute, 0.85)
    assert holds(big.shares.active, 1.0)
    assert big.prefill_ns == pytest.approx(404 * 83 * MS, rel=1e-6)
    bounds = [a.prefill.bound for a in ledger.accounts if a.prefill]
    assert (bounds.count(Bound.HBM), bounds.count(Bound.COMPUTE)) == (405, 404)


def test_too_few_to_tell_are_put_together_and_say_so() -> None:
    unknown = 0
    for seed in range(11):
        node = two_sizes(seed, 13, gap_ms=290)
        ticks = len(node.restoring)
        noise = node.random.uniform(0, 1, ticks // 12_500 + 1).repeat(12_500)[:ticks]
        node.bits["compute"] *= noise
        node.bits["hbm"] *= 1 - noise
        found = seen(node)[1].prefills
        assert sum(group.prefills for group in found) == 13
        for group in found:
            told = (group.shares.hbm, group.shares.compute)
            wide = max(each.high - each.low for each in told if each) > 0.2
            assert (group.bound is Bound.UNKNOWN) == bool(group.why)
            assert not wide or group.bound is Bound.UNKNOWN
            assert not wide or (group.tokens_low, group.tokens_high) == (101, 4099)
            unknown += wide
    assert unknown > 3
    few = two_sizes(3, 5, gap_ms=290)
    (group,) = seen(few)[1].prefills
    assert group.bound is Bound.UNKNOWN and 4 <= group.samples < 8
    assert group.why == f"{group.samples} samples met them: 8 are needed"


def test_prefills_at_the_same_time_share_it() -> None:
    node = Node(30)
    for number in range(29):
        node.request(1000.0 * number + 3, prefill_ms=600, new=4099)
        node.request(1000.0 * number + 3, prefill_ms=600, new=4097)
    (group,) = seen(node)[1].prefills
    assert group.prefills == 58
    assert group.prefill_ns == pytest.approx(29 * 600 * MS, rel=1e-6)
    assert group.bound is Bound.COMPUTE


def test_a_gpu_of_somebody_else_does_not_follow() -> None:
    node = two_sizes(2, 1009, gap_ms=37)
    other = Node(node.seconds, seed=9)
    for _ in range(2003):
        other.other_work(other.random.uniform(0, node.seconds * 950), 23)
    frames = [node.frame(), other.frame(gpu=1)]
    rows = {name: np.concatenate([frame[name] for frame in frames]) for name in frames[0]}
    ledger = with_gpus(node.ledger(), rows, sampling(FACTS, replace(FACTS, index=1)))
    assert [gpu.follows_prefills for gpu in ledger.gpus] == [True, False]
    assert ledger.gpus[0].prefills and not ledger.gpus[1].prefills


def test_replicas_that_take_turns_are_not_judged() -> None:
    node = two_sizes(2, 211, gap_ms=37)
    frames = [node.frame(), node.frame(gpu=1)]
    rows = {name: np.concatenate([frame[name] for frame in frames]) for name in frames[0]}
    both = sampling(FACTS, replace(FACTS, index=1))
    alone = with_gpus(node.ledger(), rows, both)
    assert all(not gpu.prefills for gpu in alone.gpus)
    assert all("of which replica one was is not told" in g.why_no_prefills for g in alone.gpus)
    assert all(a.prefill is None for a in alone.accounts)
    engine = EngineFacts("vllm", arithmetic=ModelArithmetic(1, 1, 1, 1, 1, devices=2))
    divided = with_gpus(node.ledger(engine), rows, both)
    assert all(len(gpu.prefills) == 2 for gpu in divided.gpus)


# ---------------------------------------------------------------- roofline


LLAMA_8B = ModelArithmetic(
    # 32 layers of 218,112,000 weights less norms; 4 x 32 heads x 128 x 32 layers; 4096 x 128256.
    linear_flops_per_token=13_958_643_712, attention_flops_per_pair=524_288,
    head_flops=1_050_673_152, weight_bytes=15_009_316_864, kv_bytes_per_token=131_072,
)  # fmt: skip


def test_roofline_by_hand() -> None:
    node = Node(40)
    for number in range(31):
        node.request(1000.0 * number + 3, prefill_ms=601, new=8192)
    engine = EngineFacts("vllm", arithmetic=LLAMA_8B)
    ledger, gpu = seen(node, engine=engine)
    prefill = ledger.accounts[7].prefill
    assert prefill is not None and prefill.least_ns is not None
    # 13.96e9 x 8192 + 524288 x 8192 x 8193 / 2 + 1.05e9 = 1.31945e14
    assert prefill.flops == pytest.approx(1.31945e14, rel=1e-5)
    assert prefill.limit == "compute"
    assert prefill.least_ns == pytest.approx(1.31945e14 / 989e12 * 1e9, rel=1e-5)
    assert prefill.share == pytest.approx(133.41 / 601, rel=1e-3)
    (group,) = gpu.prefills
    assert group.roofline_ns == pytest.approx(31 * prefill.least_ns, rel=1e-9)
    # 0.3 of 3.35 TB/s for 0.601 s, over 15.01 GB of weights and 8192 x 131072 B of KV cache.
    assert group.moved_ratio == pytest.approx(0.3 * 3.35e12 * 0.601 / 16.083e9, rel=0.02)
    modelled = replace(engine, prefill="modelled")
    unreal = seen(node, engine=modelled)[0].accounts[7].prefill
    assert unreal is not None and unreal.least_ns is None


def test_passes_read_weights_and_context_again() -> None:
    chunked = replace(LLAMA_8B, tokens_per_pass=512)
    once, many = LLAMA_8B.prefill_bytes(1300, 700), chunked.prefill_bytes(1300, 700)
    kv = 131_072
    assert once == 15_009_316_864 + kv * (700 + 1300)
    assert many == 3 * 15_009_316_864 + kv * (700 + (700 + 512) + (700 + 1024) + 1300)


def test_few_tokens_of_a_mixture_need_not_meet_all_experts() -> None:
    mixture = replace(LLAMA_8B, linear_flops_per_token=LLAMA_8B.linear_flops_per_token // 9)
    # One token is multiplied with 1.30e9 weights of 7.50e9: 5.78 times as many.
    assert mixture.prefill_bytes(28, 700) is None
    assert mixture.prefill_bytes(29, 700) == 15_009_316_864 + 131_072 * 729
    assert LLAMA_8B.prefill_bytes(1, 700) == 15_009_316_864 + 131_072 * 701


# ---------------------------------------------------------------- copies, windows, clocks


def test_copied_bytes_come_out_of_the_rates() -> None:
    node = Node(60)
    at = 3.0
    for _ in range(199):
        at = node.request(at, 97, prefill_ms=83, copy_bytes=1_500_000_007)
        at += node.random.exponential(61)
    node.bits["pcie"] += 2e8  # what comes over PCIe anyway
    _, gpu = seen(node)
    copy = gpu.restore_copy
    assert copy is not None
    background = 2e8 * copy.window_ns / 1e9
    assert copy.received_bytes == pytest.approx(node.copied + background, rel=0.05)
    assert copy.low_bytes < node.copied + background < copy.high_bytes
    assert copy.restored_bytes == 199 * 1_500_000_007 == node.copied
    assert copy.link_share == pytest.approx(1_500_000_007 / 0.097 / 64e9, rel=0.05)


def test_readings_of_a_moment_are_no_bytes() -> None:
    """Without GPM the PCIe counters cover 20 ms of a second: what came between was not seen."""
    node = Node(60)
    at = 3.0
    for _ in range(101):
        at = node.request(at, 97, prefill_ms=83, copy_bytes=1_500_000_007) + 61
    rows = node.frame()
    assert with_gpus(node.ledger(), rows, sampling()).gpus[0].restore_copy is not None
    rows["start_ns"] = rows["time_ns"] - 20 * MS
    assert with_gpus(node.ledger(), rows, sampling()).gpus[0].restore_copy is None


def test_an_idle_window_is_starved_where_most_of_its_idle_time_is() -> None:
    node = Node(40)
    for tenth in range(160):  # 0 to 16 s: restores of 37 ms in 63 ms without a kernel
        node.request(100.0 * tenth, 37, prefill_ms=37)
    for tenth in range(200, 360):  # 20 to 36 s: of 26 ms in 63 ms
        node.request(100.0 * tenth + 30, 26, prefill_ms=37)
    bounds = [window.bound for window in seen(node)[1].windows]
    assert set(bounds[1:15]) == {Bound.STARVED}
    assert set(bounds[21:35]) == {Bound.IDLE}


def test_prefills_that_nobody_sampled_are_in_no_group() -> None:
    node = Node(60)
    for second in range(59):
        node.request(1000.0 * second + 3, prefill_ms=600, new=4099)
    rows = node.frame()
    kept = rows["time_ns"] < 40_000 * MS
    rows = {name: column[kept] for name, column in rows.items()}
    ledger = with_gpus(node.ledger(), rows, sampling())
    (group,) = ledger.gpus[0].prefills
    assert group.prefills == 40
    bounds = [a.prefill.bound for a in ledger.accounts if a.prefill]
    assert bounds == [Bound.COMPUTE] * 40 + [Bound.UNKNOWN] * 19


def test_windows_count_what_held_the_gpu_up() -> None:
    node = Node(30)
    for second in range(7):  # 0 to 6: starved
        node.request(1000.0 * second, 960, prefill_ms=40)
    for second in range(7, 18):  # 7 to 17: arithmetic
        node.request(1000.0 * second, prefill_ms=1000)
    node.other_work(18_000, 5_000, share=0.9)  # 18 to 22: memory
    gpu = seen(node)[1]
    counts = {bound: sum(w.bound is bound for w in gpu.windows) for bound in Bound}
    assert sum(counts.values()) == len(gpu.windows) >= 29
    assert counts[Bound.STARVED] in (6, 7)
    assert counts[Bound.COMPUTE] in (10, 11)
    assert counts[Bound.HBM] in (4, 5)
    assert counts[Bound.IDLE] in (6, 7)


def test_a_window_that_is_half_idle_is_judged_by_its_work() -> None:
    node = Node(20)
    for tenth in range(200):
        node.request(100.0 * tenth, prefill_ms=70)
    bounds = [window.bound for window in seen(node)[1].windows]
    assert len(bounds) >= 18 and set(bounds) == {Bound.COMPUTE}


def test_held_back_clocks_and_what_they_cost() -> None:
    node = Node(60)
    at = 3.0
    held = np.zeros(len(node.restoring), bool)
    for number in range(211):
        slow = number >= 150
        begin = at
        at = node.request(at, prefill_ms=100, stretch=1.31 if slow else 1.0)
        at += 50
        held[round(begin * 10) : round(at * 10)] = slow
    node.bits = {name: bits[: len(held)] for name, bits in node.bits.items()}
    rows = node.with_clocks(node.frame(), held, (1.2e9, 1.98e9))
    coefficients = (0.0, 0.1 / 4096, 0.0)
    found = with_gpus(node.ledger(coefficients=coefficients), rows, sampling()).gpus[0].throttling
    assert found is not None
    assert found.slowdown == pytest.approx(1.31, rel=0.02)
    assert found.prefills_held + found.prefills_free == 211
    assert found.prefills_held == pytest.approx(61, abs=2)
    assert found.reasons == {"hw_thermal_slowdown": found.held}
    assert found.held / found.readings == pytest.approx(
        (held & node.prefilling).sum() / node.prefilling.sum(), abs=0.05
    )
    assert (found.clock_held_hz, found.clock_free_hz) == (1.2e9, 1.98e9)


# ---------------------------------------------------------------- the verdict alone


def share(low: float, high: float | None = None) -> Interval:
    high = low if high is None else high
    return Interval((low + high) / 2, low, high, 11)


@pytest.mark.parametrize(
    ("active", "hbm", "compute", "pcie", "starved", "bound"),
    [
        (1.0, 0.7, 0.3, 0.1, 0.0, Bound.HBM),
        (1.0, 0.3, 0.7, 0.1, 0.0, Bound.COMPUTE),
        (1.0, 0.3, 0.2, 0.9, 0.0, Bound.PCIE),
        (1.0, 0.3, 0.2, 0.1, 0.0, Bound.LATENCY),
        (0.2, 0.1, 0.1, 0.9, 0.7, Bound.STARVED),
        (0.2, 0.1, 0.1, 0.1, 0.1, Bound.IDLE),
        (1.0, 0.7, 0.7, 0.1, 0.0, Bound.UNKNOWN),
    ],
)
def test_verdicts(
    active: float, hbm: float, compute: float, pcie: float, starved: float, bound: Bound
) -> None:
    shares = Shares(*(share(each) for each in (active, hbm, compute, pcie, starved)))
    found, why = judge(shares)
    assert found is bound
    assert bool(why) == (bound is Bound.UNKNOWN)


def test_no_verdict_where_a_limit_is_not_counted_or_too_vague() -> None:
    legacy = Shares(active=share(1.0), pcie=share(0.9), starved=share(0.0))
    assert judge(legacy) == (
        Bound.UNKNOWN, "its memory bandwidth or its tensor cores are not counted",
    )  # fmt: skip
    vague = Shares(share(1.0), share(0.4, 0.8), share(0.1), share(0.1), share(0.0))
    assert judge(vague)[0] is Bound.UNKNOWN
    assert "40.0 % to 80.0 %" in judge(vague)[1]
    assert judge(Shares())[1] == "no samples of its activity"


# ---------------------------------------------------------------- damaged captures


def test_each_device_answers_for_its_own_nonsense_only() -> None:
    node, other = two_sizes(1, 41, gap_ms=30), two_sizes(1, 41, gap_ms=30)
    frames = [node.frame(), other.frame(gpu=1)]
    rows = {name: np.concatenate([frame[name] for frame in frames]) for name in frames[0]}
    wrong = np.flatnonzero(rows["gpu"] == 1)[:13]
    rows["dram_bandwidth_share"][wrong] = -7.0
    longer = np.flatnonzero(rows["gpu"] == 1)[20]
    rows["time_ns"][longer] += 900_000 * MS  # beyond the end of the recording
    found = with_gpus(node.ledger(), rows, sampling(FACTS, replace(FACTS, index=1))).gpus
    assert [gpu.senseless_values for gpu in found] == [0, 14]
    covered = found[1].metrics["graphics_activity_share"].covered_ns
    assert covered is not None and covered < node.seconds * 1e9


def test_facts_that_cannot_be_true_are_unknown_and_a_device_counts_once() -> None:
    facts = replace(FACTS, peak_bytes_per_s=-1.0, memory_bytes=0, pcie_bytes_per_s=float("nan"))
    node = two_sizes(1, 41, gap_ms=30)
    (gpu,) = with_gpus(node.ledger(), node.frame(), sampling(facts, facts)).gpus
    told = (gpu.facts.peak_bytes_per_s, gpu.facts.memory_bytes, gpu.facts.pcie_bytes_per_s)
    assert told == (None, None, None)
    assert gpu.dram_bytes_per_s is None


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_make_no_sense_are_no_crash_and_no_nonsense(seed: int) -> None:
    """Times in any order, shares beyond 1, infinities, other devices, requests out of place."""
    random = np.random.default_rng(seed)
    node = two_sizes(seed, int(random.integers(0, 60)), gap_ms=30)
    rows = node.frame()
    n = len(rows["gpu"])
    for name, column in rows.items():
        broken = random.random(n) < 0.2
        if column.dtype.kind == "f":
            wild = random.choice([np.nan, -3.0, 7.5, np.inf, 1e300], n)
        elif name.endswith("_ns"):
            wild = random.integers(-5, 2**62, n)
        else:
            wild = random.integers(-2, 3, n)
        column[broken] = wild[broken]
    order = random.permutation(n)
    rows = {name: column[order] for name, column in rows.items()}
    engine = EngineFacts("vllm", arithmetic=LLAMA_8B)
    ledger = with_gpus(node.ledger(engine, (0.0, 1e-5, 0.0)), rows, sampling())
    (gpu,) = ledger.gpus
    if gpu.starvation:
        found = gpu.starvation
        assert 0 <= found.low_ns <= found.starved_ns <= found.high_ns
        assert found.high_ns <= min(found.idle_ns, found.restore_ns) + 1
        assert found.covered_ns >= found.idle_ns >= 0
    shares = [*(g.shares for g in gpu.prefills), *(w.shares for w in gpu.windows)]
    known = [each for s in shares for each in vars(s).values() if each is not None]
    assert all(0 <= each.low <= each.mid <= each.high <= 1 for each in known)
