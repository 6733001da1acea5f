from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe import digest

Document = dict[str, Any]


def test_pick_survives_whatever_is_missing() -> None:
    node = {"a": {"b": None, "c": [1]}, "d": True}
    assert digest.pick(node, "a", "c") == [1]
    assert digest.pick(node, "a", "b", "c") is None
    assert digest.pick(None, "a") is None
    assert digest.number(node, "d") is None
    assert digest.rows(node, "a", "c") == []
    assert digest.label(node, "a") is None


def test_labels_carry_no_terminal_escapes() -> None:
    evil = {"id": "a\x1b[31mb\nc\u202ed"}
    assert digest.label(evil, "id") == "a\ufffd[31mb\ufffdc\ufffdd"


@given(st.lists(st.integers(0, 1000), min_size=1), st.floats(0.01, 1))
def test_quantile_is_a_value_that_share_stays_at_or_below(values: list[int], share: float) -> None:
    found = digest.quantile(values, share)
    assert found in values
    at_or_below = sum(value <= found for value in values)
    below = sum(value < found for value in values)
    assert at_or_below >= share * len(values) - 1e-9
    assert below < share * len(values) + 1e-9


def test_parts_of_the_sample(sample: Document) -> None:
    rows = sample["requests"]
    found = {part.key: part for part in digest.parts(rows, "spans", digest.SPANS)}
    split = [row for row in rows if row["spans"]]
    assert len(split) == 210
    assert sum(part.total for part in found.values()) == sum(row["ttft_ns"] for row in split)
    restore = sorted(row["spans"]["restore_ns"] for row in split)
    assert found["restore_ns"].total == sum(restore)
    assert found["restore_ns"].median == restore[104]
    assert sum(part.share or 0 for part in found.values()) == pytest.approx(1)


def test_verdicts_and_regret_of_the_sample(sample: Document) -> None:
    counts = digest.verdicts(sample)
    assert counts == Counter(row["verdict"] for row in sample["requests"])
    assert sum(counts.values()) == 211
    for row in sample["requests"]:
        lost = row["verdict"] in ("restore_lost", "recompute_lost")
        assert digest.regret_ns(row) == (-row["gain_ns"] if lost else None)


def test_losses_name_only_tables_that_are_not_whole(sample: Document) -> None:
    assert digest.losses(sample) == [("lookups", 61_007, 127, 6_101)]


def test_attribution_class_is_that_of_most_bytes() -> None:
    assert digest.attribution_class({"attribution": {"thread": 0.625, "shared": 0.375}}) == "thread"
    assert digest.attribution_class({"attribution": {"thread": 0.0}}) is None
    assert digest.attribution_class({}) is None


def test_worst_severity(sample: Document) -> None:
    assert digest.worst_severity(sample) == digest.SEVERITIES.index("critical")
    assert digest.worst_severity({"findings": []}) == -1
