import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvprobe import registry, reports
from kvprobe.reports.json import render
from tests.reports.schema_check import errors

Document = dict[str, Any]
SCHEMA: dict[str, Any] = json.loads(
    (Path(reports.__file__).parent / "document.schema.json").read_text(encoding="utf-8")
)


def test_reports_are_found_by_their_files() -> None:
    found = registry.load("kvprobe.reports", "REPORT", reports.Report)
    assert {name: report.name for name, report in found.items()} == {"json": "json", "text": "text"}


def test_the_document_comes_out_as_it_went_in(sample: Document) -> None:
    text = render(sample, width=80, unheard_of=True)
    assert json.loads(text) == sample
    assert list(json.loads(text)) == list(sample)
    assert text.endswith("}\n")


def test_what_json_has_no_word_for_is_null() -> None:
    found = render({"a": math.nan, "b": [math.inf, 1.5], "c": (1, None), "d": -math.inf})
    assert json.loads(found) == {"a": None, "b": [None, 1.5], "c": [1, None], "d": None}


def test_the_sample_follows_the_schema(sample: Document) -> None:
    assert list(errors(sample, SCHEMA, SCHEMA)) == []


def test_a_built_document_follows_the_schema(built: Document) -> None:
    assert list(errors(built, SCHEMA, SCHEMA)) == []
    assert len(built["requests"]) == 211


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), 2),
        (("requests", 0, "verdict"), "won"),
        (("requests", 0, "spans", "restore_ns"), 1.5),
        (("findings", 0, "slug"), "Serial Restore"),
        (("findings", 0, "confidence"), 1.01),
        (("losses", "block", "lost"), -1),
        (("capture", "complete"), 1),
        (("devices", 0, "surface", 0, "source"), "guess"),
    ],
)
def test_the_schema_refuses(sample: Document, path: tuple[Any, ...], value: object) -> None:
    node: Any = sample
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    assert len(list(errors(sample, SCHEMA, SCHEMA))) == 1


def test_the_schema_misses_nothing_that_it_requires(sample: Document) -> None:
    del sample["requests"][3]["gain_ns"]
    assert list(errors(sample, SCHEMA, SCHEMA)) == [".requests[3].gain_ns: missing"]


def test_sums_that_the_contract_promises(built: Document) -> None:
    split = [row for row in built["requests"] if row["spans"]]
    assert len(split) == 211
    for row in split:
        assert sum(row["spans"].values()) == row["ttft_ns"]
        if row["restore"]:
            parts = ("device_ns", "block_queue_ns", "software_ns", "idle_ns")
            assert sum(row["restore"][part] for part in parts) == row["spans"]["restore_ns"]
