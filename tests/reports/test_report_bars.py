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


@given(VALUES, WIDTHS)
def test_pooling_keeps_the_highest(values: list[float | None], width: int) -> None:
    found = bars.pooled(values, width)
    assert len(found) == min(len(values), width)
    known = [value for value in values if value is not None]
    assert [v for v in found if v is not None and v == max(known)] or not known
    assert bars.pooled([1, None, 5, 2, None, None], 3) == [1, 5, None]


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
