"""When the GPU's findings fire, how gravely, and on whose devices."""

from dataclasses import replace

import pytest

from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import detect_all
from tests.findings.gpus import FACTS, gpu, starvation, throttling
from tests.findings.ledgers import healthy


def found(made: Ledger) -> dict[str, str]:
    return {f"{f.slug} {f.subject}": f.severity for f in detect_all(made)}


@pytest.mark.parametrize(
    ("share", "severity"),
    [(0.049, None), (0.051, "info"), (0.16, "warning"), (0.41, "critical")],
)
def test_starved_time_decides_how_grave(share: float, severity: str | None) -> None:
    made = healthy(gpus=(gpu(starvation=starvation(41, share)),))
    assert found(made).get("gpu_starved_by_restore GPU 0") == severity


def test_a_device_that_may_serve_somebody_else_counts_only_where_it_is_the_only_one() -> None:
    unsure = gpu(starvation=starvation(41, 0.3), follows_prefills=None)
    assert found(healthy(gpus=(unsure,)))
    assert not found(healthy(gpus=(unsure, unsure)))


def test_gpus_that_share_a_model_are_one_finding_with_their_sum() -> None:
    half = replace(FACTS, index=5)
    made = healthy(
        gpus=(gpu(starvation=starvation(41, 0.3)), gpu(starvation=starvation(41, 0.1), facts=half))
    )
    (finding,) = detect_all(made)
    assert finding.subject == "GPU 0, 5"
    told = {e.metric: e.value for e in finding.evidence}
    assert told["share of time idle while a restore was in flight"] == pytest.approx(0.2)
    assert told["GPU time idle meanwhile, sum"] == pytest.approx(0.4 * 41e9)
    assert told["time with a restore in flight"] == pytest.approx(0.3 * 41e9)


@pytest.mark.parametrize(
    ("held", "hz", "slowdown", "severity"),
    [
        (0.19, 1.2e9, 1.5, None),  # seldom
        (0.9, 1.95e9, 1.02, None),  # costs nothing
        (0.9, 1.85e9, None, "info"),  # a lower clock, and nothing known of prefills
        (0.9, 1.4e9, None, "warning"),
        (0.9, 1.85e9, 1.2, "warning"),  # and prefills were slower
    ],
)
def test_held_back_clocks_matter_by_what_they_cost(
    held: float, hz: float, slowdown: float | None, severity: str | None
) -> None:
    made = healthy(gpus=(gpu(throttling=throttling(41, held, hz, slowdown)),))
    assert found(made).get("gpu_throttled GPU 0") == severity


def test_always_held_back_is_measured_against_the_highest_clock() -> None:
    always = throttling(41, 1.0, 1.2e9)
    made = healthy(gpus=(gpu(throttling=always.__class__(**always.__dict__ | {
        "clock_free_hz": None})),))  # fmt: skip
    (finding,) = detect_all(made)
    lost = {e.metric: e.value for e in finding.evidence}["share of the clock lost"]
    assert lost == pytest.approx(1 - 1.2 / 1.98)
