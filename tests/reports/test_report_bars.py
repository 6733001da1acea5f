import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvprobe import bars

VALUES = st.lists(st.one_of(st.none(), st.floats(0, 1e15)), min_size=1, max_size=9)
WIDTHS = st.integers(1, 200)


@given(VALUES, WIDTHS)
def test_cells_fill_the_width_in_proportion(values: list[float | None], width: int) -> None:
    found = bars.cells(values, width)
    total = sum(value or 0 for value in values)
    assert sum(found) == (width if total > 0 else 0)
    positive = [index for index, value in enumerate(values) if value]
    for index, value in enumerate(values):
        if not value:
            assert found[index] == 0
        elif len(positive) <= width:
            assert found[index] >= 1
            # One cell for a tiny part is taken from larger ones; never more than there are parts.
            assert abs(found[index] - value / total * width) <= len(positive)


@given(VALUES, WIDTHS)
def test_waterfall_lines_follow_one_another(values: list[float | None], width: int) -> None:
    lines = bars.waterfall(values, width)
    assert all(len(line) == width for line in lines)
    filled = [index for line in lines for index, mark in enumerate(line) if mark != " "]
    assert filled == list(range(len(filled)))


def test_stacked_parts_have_their_own_shade() -> None:
    assert bars.stacked([4, 2, 1, 1], 8) == ["████", "▓▓", "▒", "░"]
    assert bars.stacked([0, None], 8) == ["", ""]


def test_sparkline() -> None:
    assert bars.sparkline([0, 7, None, 3.5], 6) == "  ▁█ ▅"
    assert bars.sparkline([1, 2, 3, 4], 2) == "▆█"
    assert bars.sparkline([], 3) == "   "
    assert bars.sparkline([0, 0], 2) == "▁▁"


def test_cells_of_an_axis_are_equal_times() -> None:
    spans = [(10.0, 12.0), (12.0, 13.0), (13.0, 14.0), (18.0, 20.0)]
    assert bars.on_axis(spans, [2, 7, 3, 5], 10, 20, 10) == [
        2, 2, 7, 3, None, None, None, None, 5, 5
    ]  # fmt: skip
    assert bars.on_axis(spans, [2, 7, 3, 5], 10, 20, 2) == [7, 5]
    assert bars.on_axis(spans, [2, None, 3, 5], 10, 20, 5) == [2, 3, None, None, 5]
    assert bars.on_axis([(None, 3.0)], [7], 10, 20, 3) == [None] * 3
    assert bars.on_axis(spans, [2, 7, 3, 5], 10, 10, 3) == [None] * 3


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=50), st.integers(1, 70))
def test_an_axis_loses_no_peak_and_has_no_gap(lengths: list[float], width: int) -> None:
    ends = np.cumsum(lengths)
    # Each begins where the one before ends: end less length rounds, and would leave gaps.
    spans = list(zip([0.0, *ends[:-1].tolist()], ends.tolist(), strict=True))
    values = list(range(1, len(spans) + 1))
    shown = bars.on_axis(spans, values, 0, float(ends[-1]), width)
    assert len(shown) == width and None not in shown
    assert max(v for v in shown if v is not None) == len(spans)


def test_shortened_keeps_both_ends() -> None:
    assert bars.shortened("chatcmpl-7f3a", 9) == "chat…7f3a"
    assert bars.shortened("short", 9) == "short"
    assert all(len(bars.shortened("abcdefghij", width)) == width for width in range(2, 11))


@given(st.text())
def test_ascii_keeps_places(text: str) -> None:
    plain = bars.to_ascii(text)
    assert plain.isascii()
    assert len(plain) == len(text)


def test_ascii_keeps_shades_apart() -> None:
    assert len(set(bars.to_ascii(bars.SHADES))) == len(bars.SHADES)
