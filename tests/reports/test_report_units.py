import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ns"),
        (1, "1 ns"),
        (999, "999 ns"),
        (999.6, "1.00 µs"),
        (999_600, "1.00 ms"),
        (1_234_567, "1.23 ms"),
        (59_949_999_999, "59.9 s"),
        (119e9, "119 s"),
        (150e9, "2.50 min"),
        (7_200e9, "2.00 h"),
        (-1_500_000, "-1.50 ms"),
        (None, "unknown"),
        (math.nan, "unknown"),
    ],
)
def test_duration(value: float | None, text: str) -> None:
    assert units.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (2_097_152, "2.00 MiB"), (None, "unknown")],
)
def test_size(value: int | None, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.0001, "<0.1 %"),
        (0.9999, ">99.9 %"),
        (0.412, "41.2 %"),
        (None, "unknown"),
    ],
)
def test_share_keeps_small_apart_from_nothing(value: float | None, text: str) -> None:
    assert units.share(value) == text


def test_interval_is_in_the_unit_of_its_middle() -> None:
    assert units.interval(1_240_000, 980_000, 1_610_000, units.duration) == "1.24 ms (0.980–1.61)"  # noqa: RUF001
    assert units.interval(-0.64, -0.71, -0.52, units.share) == "-64.0 % (-71.0 to -52.0)"
    assert units.interval(5, None, 6, units.count) == "5 (interval unknown)"
    assert units.interval(None, 1, 2, units.count) == "unknown"


def test_quantity_follows_the_unit() -> None:
    assert units.quantity(3_000_000, "ns") == "3.00 ms"
    assert units.quantity(4096, "B") == "4.00 KiB"
    assert units.quantity(0.5, "share") == "50.0 %"
    assert units.quantity(7, "requests") == "7 requests"
    assert units.quantity(1.113, "") == "1.11"
    assert units.quantity(None, "requests") == "unknown"


FACTORS = {
    "ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9, "h": 3600e9,
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip


@given(st.integers(min_value=1, max_value=10**17))
def test_shown_figures_are_right_to_three_digits(value: int) -> None:
    for show in (units.duration, units.size):
        figure, unit = show(value).split(" ")
        assert float(figure.replace(",", "")) * FACTORS[unit] == pytest.approx(value, rel=0.00501)
