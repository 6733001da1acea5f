import copy
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe import digest, units
from kvprobe.errors import KvprobeError
from kvprobe.reports.text import render
from tests.reports.make_sample_report import document

Document = dict[str, Any]
GOLDEN = Path(__file__).parents[1] / "data" / "sample_report.txt"
"""Rewrite with: kvprobe's text report of the sample at width 100 (see ``golden_text``)."""


def golden_text(sample: Document) -> str:
    return render(sample, source="sample.kvcap", width=100)


def test_the_report_of_the_sample_is_the_golden_one(sample: Document) -> None:
    assert golden_text(sample) == GOLDEN.read_text(encoding="utf-8")


def test_the_rate_table_has_powers_of_two(sample: Document) -> None:
    cell = sample["devices"][0]["surface"][0]
    sample["devices"][0]["surface"] = [cell | {"depth": depth} for depth in range(1, 20)]
    table = render(sample, width=120).partition("request size")[2].splitlines()[2:]
    assert [line.split()[2] for line in table[: table.index("")]] == ["1", "2", "4", "8", "16"]


def test_words_about_paths_are_of_paths(sample: Document) -> None:
    path = next(d for d in sample["devices"] if d.get("path"))
    path["path"]["io_queues"] = 1
    assert "1 I/O queue of " in render(sample, width=200)
    whole = render(sample, width=200).count("of the bytes of all paths")
    path["path"] = None
    assert render(sample, width=200).count("of the bytes of all paths") == whole - 1


def test_courses_of_all_devices_have_one_axis(sample: Document) -> None:
    """The second device was there in the third quarter of the window only."""
    first, second = sample["devices"][:2]
    sample["capture"]["duration_ns"] = 60 * 10**9
    start = sample["capture"]["start_ns"]
    many = [
        point | {"start_ns": start + i * 10**9, "end_ns": start + (i + 1) * 10**9}
        for i, point in enumerate(first["timeline"])
    ]
    first["timeline"], second["timeline"] = many, many[30:45]
    text = render(sample, width=120)
    lines = [line for line in text.splitlines() if line.startswith(" read rate in time")]
    courses = [line[20:80] for line in lines]
    assert " " not in courses[0]
    assert courses[1][:30] == " " * 30 and courses[1][45:] == " " * 15
    assert " " not in courses[1][30:45]


@pytest.mark.parametrize("width", [80, 83, 97, 100, 120, 139, 160, 200])
@pytest.mark.parametrize("summary", [False, True])
def test_no_line_is_wider_than_the_page(sample: Document, width: int, summary: bool) -> None:
    sample["requests"] = sample["requests"][::7]
    text = render(sample, width=width, summary=summary, requests="all")
    assert max(map(len, text.splitlines())) <= width
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize("width", [80, 95, 96, 105, 106, 116, 131, 132, 142, 150, 162, 200])
def test_no_figure_is_cut(sample: Document, width: int) -> None:
    sample["requests"] = sample["requests"][::3]
    text = render(sample, width=width, requests="all")
    cut = [line for line in text.splitlines() if "…" in line and "chatc…" not in line]
    assert cut == []


def test_numbers_shown_are_those_of_the_document(sample: Document) -> None:
    text = render(sample, width=200, requests="all")
    for row in sample["requests"]:
        line = next(line for line in text.splitlines() if line.lstrip().startswith(row["id"][:4]))
        if row["id"].startswith("req-"):
            line = next(li for li in text.splitlines() if li.lstrip().startswith(row["id"]))
        assert units.duration(row["ttft_ns"]) in line
        assert units.count(row["tokens"]["prompt"]) in line
        if row["restore"]:
            assert units.duration(row["restore"]["exposed_ns"]) in line
            assert units.size(row["restore"]["bytes"]) in line
        if row["gain_ns"] is not None:
            assert units.duration(abs(row["gain_ns"])) in line
    lost = [row for row in sample["requests"] if row["verdict"] == "restore_lost"]
    total = units.duration(-sum(row["gain_ns"] for row in lost))
    assert f"{len(lost)} restores lost {total} in total" in " ".join(text.split())
    won = sum(row["verdict"] == "restore_won" for row in sample["requests"])
    assert f"paid off for {won} of 194 requests that restored" in " ".join(text.split())


def test_filters_are_named_only_where_one_is_set(sample: Document) -> None:
    nothing: dict[str, Any] = {
        "tgids": [],
        "device": None,
        "root": None,
        "min_latency_ns": 0,
        "keep_one_in": 1,
    }
    for filters in (None, {}, nothing):
        sample["capture"]["filters"] = filters
        assert "filters" not in render(sample, summary=True)
    device = sample["devices"][0]
    device["facts"] = {"device": 7 << 20 | 3}
    sample["capture"]["filters"] = {
        "tgids": [123, 131],
        "device": 7 << 20 | 3,
        "root": "/mnt/kv",
        "min_latency_ns": 211_000,
        "keep_one_in": 11,
    }
    assert (
        f"filters root /mnt/kv; processes 123, 131; device {device['name']}; "
        "one block row in 11 kept; faster than 211 µs left out own cost"
    ) in " ".join(render(sample, summary=True).split())
    sample["capture"]["filters"] = {**nothing, "device": 259 << 20 | 5}
    assert "filters   device 259:5\n" in render(sample, summary=True)


def test_open_has_an_interval_and_unknown_has_none(sample: Document) -> None:
    for row in sample["requests"]:
        row.update(verdict="unknown", gain_ns=None, gain_low_ns=None, gain_high_ns=None)
    text = " ".join(render(sample).split())
    assert "Whether restoring paid off is unknown for all 194 requests that restored;" in text
    assert "paid off for" not in text and "are open" not in text and "restore open" not in text
    restored = [row for row in sample["requests"] if row["restore"]]
    for row in restored[:7]:
        row.update(gain_ns=3_000_000, gain_low_ns=-11_000_000, gain_high_ns=17_000_000)
    text = " ".join(render(sample, requests="all").split())
    assert "paid off for 0 of 194 requests that restored; 7 are open; 187 are unknown;" in text
    assert text.count("open 3.00 ms") == 7


def test_restores_with_an_unknown_part_have_no_bar_and_no_share(sample: Document) -> None:
    restored = [row for row in sample["requests"] if row["restore"]]
    known = sum(row["restore"]["idle_ns"] for row in restored[13:])
    parts = ("device_ns", "block_queue_ns", "software_ns", "idle_ns")
    whole = sum(row["restore"][key] for row in restored[13:] for key in parts)
    for row in restored[:13]:
        row["restore"].update(device_ns=None, block_queue_ns=None, software_ns=None)
    text = render(sample)
    assert f"{units.share(known / whole)}" in next(li for li in text.splitlines() if "░ idle" in li)
    assert "13 more restores are not in it" in text
    story = render(sample, requests=restored[0]["id"])
    own = story.partition("Its restore")[2].splitlines()
    assert own[1].split()[:2] == ["device", "unknown"]
    for row in restored:
        row["restore"]["device_ns"] = None
    assert "Unknown: none of 194 restores has all of its parts." in render(sample)


def test_the_first_characters_of_an_id_or_its_cut_form_name_it(sample: Document) -> None:
    first, second = sample["requests"][:2]
    first["id"], second["id"] = "5a82e0c1d7b91b322", "5a82e0c1d7b91c101"
    first["ttft_ns"], second["ttft_ns"] = 10**12, 10**12 - 10**9
    shown = render(sample, requests="all")
    cut = next(word for word in shown.split() if word.startswith("5a82"))
    assert cut != first["id"]
    for name in ("5a82e0c1d7b91b", cut, cut.replace("…", "..."), "5a82…1b322"):
        assert f"Request  {first['id']}" in render(sample, requests=name), name
    with pytest.raises(KvprobeError) as caught:
        render(sample, requests="5a82e")
    assert "2 requests" in caught.value.message and "first characters" in (caught.value.hint or "")
    sample["requests"][2]["id"] = "x-5a82e0c1d7b91b"
    assert f"Request  {first['id']}" in render(sample, requests="5a82e0c1d7b91b")


def test_each_estimate_has_its_interval_and_n(sample: Document) -> None:
    text = " ".join(render(sample, width=120).split())
    assert "break-even at 1,240 tokens (1,020\N{EN DASH}1,610 at 90 %)" in text
    assert "restore time: -64.0 % (-71.0 to -52.0), 90 % interval" in text
    for finding in sample["findings"]:
        for evidence in finding["evidence"]:
            value = units.quantity(evidence["value"], evidence["unit"])
            assert f"{evidence['metric']}: {value} (n={units.count(evidence['n'])})" in text


def test_losses_and_a_cut_come_first(sample: Document) -> None:
    sample["capture"]["complete"] = False
    first, second = render(sample, width=120).splitlines()[:2]
    assert first.startswith("INCOMPLETE")
    assert second.startswith("LOSSES")
    assert "lookups: 127 lost (0.2 %), 6,101 thinned on purpose (9.1 %) of 67,235 rows" in second


def test_no_losses_are_said_in_their_place(sample: Document) -> None:
    sample["losses"]["lookups"] |= {"lost": 0, "thinned": 0}
    text = render(sample)
    assert text.startswith("capture")
    assert "losses    none lost, none thinned" in text


def test_worst_requests_come_first(sample: Document) -> None:
    text = render(sample, requests="7")
    regret = {row["id"]: digest.regret_ns(row) or 0 for row in sample["requests"]}
    worst = sorted(regret, key=lambda name: -regret[name])[:7]
    assert re.findall(r"^ (req-\d+) ", text, re.MULTILINE) == worst


def test_one_request(sample: Document) -> None:
    text = render(sample, requests="req-0150")
    row = sample["requests"][150]
    assert "Request  req-0150" in text
    for key, name, _ in digest.SPANS:
        assert re.search(rf"^ {name} +{re.escape(units.duration(row['spans'][key]))} ", text, re.M)


def test_an_id_may_be_a_number_or_a_part(sample: Document) -> None:
    sample["requests"][5]["id"] = "7"
    assert "Request  7" in render(sample, requests="id:7")
    assert "Request  chatcmpl-7f3a9be2" in render(sample, requests="7f3a9be2")


@pytest.mark.parametrize("wanted", ["nobody", "req-", "-99", ""])
def test_no_such_request(sample: Document, wanted: str) -> None:
    with pytest.raises(KvprobeError) as error:
        render(sample, requests=wanted)
    assert "--requests all" in error.value.hint


def test_summary_is_one_screen(sample: Document) -> None:
    text = render(sample, source="sample.kvcap", width=100, summary=True)
    assert len(text.splitlines()) <= 40
    assert "kvprobe report sample.kvcap" in text
    assert "serial_restore" in text
    assert "bytes_in_flight: 2.00 MiB → 16.0 MiB" in text


def test_plain_without_colour_and_ascii_on_request(sample: Document) -> None:
    assert "\x1b" not in render(sample)
    assert "\x1b[" in render(sample, color=True)
    assert render(sample, ascii_only=True, width=200).isascii()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", render(sample, color=True))
    assert [line.rstrip() for line in plain.splitlines()] == render(sample).splitlines()


def test_names_from_a_strangers_capture_cannot_speak_to_the_terminal(sample: Document) -> None:
    for row in sample["requests"]:
        row["id"] = f"\x1b]0;owned\x07{row['id']}"
    sample["capture"]["host"] = "a\r\x1b[2Jb"
    sample["findings"][0]["subject"] = "x\x9b31m"
    text = render(sample, source="\x1b[31mfile", requests="all", width=200)
    assert not set(text) & {"\x1b", "\r", "\x07", "\x9b"}


def test_the_engine_restored_but_no_read_was_seen(sample: Document) -> None:
    for row in sample["requests"]:
        row["restore"] = None
    text = " ".join(render(sample).split())
    assert "194 requests restored, says the engine, but none of their reads was seen" in text


def test_a_built_document(built: Document) -> None:
    text = render(built, width=160, requests="all")
    assert len(re.findall(r"^ r\d+ ", text, re.MULTILINE)) == 211
    assert "Where restore time went" in text


WHOLE = document()


def leaves(node: Any) -> list[tuple[Any, Any]]:
    """Every place of a document, as (container, key)."""
    found: list[tuple[Any, Any]] = []
    items: Any = node.items() if isinstance(node, dict) else enumerate(node)
    for key, item in items:
        found.append((node, key))
        if isinstance(item, dict | list):
            found.extend(leaves(item))
    return found


@given(st.integers(0, 2**32), st.floats(0, 1), st.sampled_from(["10", "all", "0"]))
def test_nulls_anywhere_never_raise(seed: int, share: float, requests: str) -> None:
    rng = random.Random(seed)
    broken = copy.deepcopy(WHOLE | {"requests": WHOLE["requests"][::19]})
    for container, key in leaves(broken):
        if rng.random() < share * 0.3:
            container[key] = None
    for summary in (False, True):
        text = render(broken, width=80, requests=requests, summary=summary, source="f")
        assert max(map(len, text.splitlines())) <= 80
        assert "None" not in text
        assert "nan" not in text


@pytest.mark.parametrize("empty", [{}, {"requests": [], "capture": {}}, {"requests": None}])
def test_an_empty_document(empty: Document) -> None:
    assert "No request was seen in this window." in render(empty)
    assert "INCOMPLETE" in render(empty, summary=True)
