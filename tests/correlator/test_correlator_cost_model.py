"""Cost models against costs of known law: coefficients, coverage, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from kvprobe.correlator import cost_model
from kvprobe.correlator.cost_model import MIN_SAMPLES, REACH, CostModel

Floats = NDArray[np.float64]
PREFILL = (0.0031, 11.3e-6, 1.7e-9)
RESTORE = (0.00047, 1 / 2.3e9)


def prompts(n: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """New and context tokens over three orders of magnitude."""
    return rng.uniform(16, 8009, n).round(), rng.choice([0, 512, 4099, 30011], n).astype(float)


def law(terms: Floats, coefficients: tuple[float, ...]) -> Floats:
    return np.asarray(terms @ np.array(coefficients))


def test_terms_are_the_documented_formulas() -> None:
    assert cost_model.prefill_terms(7, 11).tolist() == [1, 7, 7 * (11 + 3.5)]
    assert cost_model.restore_terms(13).tolist() == [1, 13]


def test_clean_costs_give_their_coefficients() -> None:
    rng = np.random.default_rng(3)
    new, context = prompts(101, rng)
    terms = cost_model.prefill_terms(new, context)
    model = cost_model.fit(terms, law(terms, PREFILL), new)
    assert model is not None
    assert model.coefficients == pytest.approx(PREFILL, rel=1e-6)
    assert (model.low_ratio, model.high_ratio) == pytest.approx((1, 1), abs=1e-6)
    assert model.n == 101
    assert model.error == pytest.approx(0, abs=1e-6)
    size = rng.uniform(1e5, 1e8, 97)
    restore = cost_model.fit(
        cost_model.restore_terms(size), law(cost_model.restore_terms(size), RESTORE), size
    )
    assert restore is not None
    assert restore.coefficients == pytest.approx(RESTORE, rel=1e-6)


def noisy(clean: Floats, rng: np.random.Generator) -> Floats:
    """Scatter in proportion to size, more of it in long ones, and 5 % stalls of ten times."""
    scatter = rng.normal(1, 0.05 + 0.1 * clean / clean.max())
    return np.asarray(
        clean * np.maximum(scatter, 0.3) * np.where(rng.random(len(clean)) < 0.05, 10, 1)
    )


def test_stalls_and_scatter_do_not_bend_the_fit() -> None:
    rng = np.random.default_rng(5)
    size = rng.uniform(1e6, 1e8, 401)
    terms = cost_model.restore_terms(size)
    model = cost_model.fit(terms, noisy(law(terms, RESTORE), rng), size)
    assert model is not None
    assert model.coefficients[1] == pytest.approx(RESTORE[1], rel=0.05)


def test_scatter_does_not_pull_the_fit_down() -> None:
    rng = np.random.default_rng(11)
    size = rng.uniform(1e6, 1e8, 2003)
    terms = cost_model.restore_terms(size)
    model = cost_model.fit(terms, law(terms, RESTORE) * rng.normal(1, 0.2, 2003), size)
    assert model is not None
    assert model.coefficients[1] == pytest.approx(RESTORE[1], rel=0.02)


def coverage(n: int, seed: int) -> float:
    """Share of fresh samples inside the interval of a model fitted on ``n`` samples."""
    rng = np.random.default_rng(seed)
    new, context = prompts(n, rng)
    terms = cost_model.prefill_terms(new, context)
    model = cost_model.fit(terms, noisy(law(terms, PREFILL), rng), new)
    assert model is not None
    fresh = cost_model.prefill_terms(*prompts(400, rng))
    intervals = [model.interval_ns(model.seconds(row)) for row in fresh]
    took = noisy(law(fresh, PREFILL), rng) * 1e9
    return float(np.mean([i.low <= t <= i.high for i, t in zip(intervals, took, strict=True)]))


@pytest.mark.parametrize("n", [40, 200])
def test_the_interval_covers_ninety_percent_of_new_samples(n: int) -> None:
    shares = [coverage(n, seed) for seed in range(40)]
    assert 0.85 < np.mean(shares) < 0.95
    assert min(shares) > 0.7


def test_too_few_samples_give_no_model() -> None:
    size = np.linspace(1e5, 1e7, MIN_SAMPLES)
    terms = cost_model.restore_terms(size)
    took = law(terms, RESTORE)
    assert cost_model.fit(terms, took, size) is not None
    assert cost_model.fit(terms[1:], took[1:], size[1:]) is None
    took[3] = np.nan
    assert cost_model.fit(terms, took, size) is None


def test_times_that_are_no_times_are_left_out() -> None:
    size = np.linspace(1e5, 1e7, 53)
    terms = cost_model.restore_terms(size)
    took = law(terms, RESTORE)
    for place, bad in enumerate((np.nan, np.inf, 0.0, -1.0)):
        took[place] = bad
    terms[5] = np.nan
    terms[6, 1] = np.inf
    model = cost_model.fit(terms, took, size)
    assert model is not None
    assert model.n == 47
    assert model.coefficients == pytest.approx(RESTORE, rel=1e-6)


def test_one_size_only() -> None:
    size = np.full(31, 65536.0)
    model = cost_model.fit(cost_model.restore_terms(size), np.full(31, 0.0021), size)
    assert model is not None
    assert min(model.coefficients) >= 0
    assert model.seconds(cost_model.restore_terms(65536)) == pytest.approx(0.0021)
    assert model.sizes == (65536, 65536)


def test_sizes_that_are_all_zero() -> None:
    size = np.zeros(31)
    model = cost_model.fit(cost_model.restore_terms(size), np.full(31, 0.0021), size)
    assert model is not None
    assert model.coefficients == pytest.approx((0.0021, 0))


def test_predictions_reach_a_little_beyond_what_was_measured() -> None:
    model = CostModel((1.0, 1.0), 0.9, 1.1, (10.0, 100.0), 29, 0.01)
    assert model.reaches(0) and model.reaches(100 * REACH)
    assert not model.reaches(100 * REACH + 1)
    assert not model.reaches(-1)


times = arrays.arrays(float, st.integers(0, 60), elements=st.floats(-1, 1e6, width=32))


@given(times, st.integers(0, 10**6))
def test_any_costs_give_a_model_without_negative_parts_or_none(took: Floats, seed: int) -> None:
    new, context = prompts(len(took), np.random.default_rng(seed))
    model = cost_model.fit(cost_model.prefill_terms(new, context), took, new)
    if model is None:
        return
    assert model.n >= MIN_SAMPLES
    assert min(model.coefficients) >= 0
    assert np.isfinite([*model.coefficients, model.low_ratio, model.high_ratio, model.error]).all()
    assert 0 < model.low_ratio <= 1 <= model.high_ratio
    seconds = model.seconds(cost_model.prefill_terms(1009, 11))
    interval = model.interval_ns(seconds)
    assert interval.low <= interval.mid <= interval.high


def test_the_same_capture_gives_the_same_model() -> None:
    rng = np.random.default_rng(7)
    size = rng.uniform(1e5, 1e8, 61)
    terms = cost_model.restore_terms(size)
    took = noisy(law(terms, RESTORE), rng)
    assert cost_model.fit(terms, took, size) == cost_model.fit(terms, took, size)
