"""What every engine adapter keeps to, whoever wrote it: one suite over all files of the folder."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprobe import engines
from kvprobe.adapter import Engine, LogLine, News, Process, RequestNews, RunningEngine, Sample, Span
from kvprobe.clock import Moment
from kvprobe.model import EngineFacts, EngineSetting
from kvprobe.schema import REQUESTS
from kvprobe.signals.merge import MOST_ID_CHARS, RequestMerger
from kvprobe.signals.messages import NOT_UNDERSTOOD
from kvprobe.signals.metrics import _STRANGE

DATA = Path(__file__).parents[1] / "data"
README = Path(engines.__file__).with_name("README.md")
KNOWN = engines.engines()
NAMES = sorted(KNOWN)
KNOBS = ("unit_bytes", "bytes_in_flight", "prefetch_horizon")
TOTALS = {
    "read_bytes", "chunk_hits", "prompt_tokens", "device_hit_tokens", "host_hit_tokens",
    "offload_hit_tokens",
}  # fmt: skip
KINDS = {"log", "journal", "files", "metrics", "otlp", "kv-events"}
COLUMNS = {column.name for column in REQUESTS.columns}
NOT_A_REQUEST = {"jsonl"}
"""Its requests are read by ``kvprobe.signals.events``; settings are those of whom it speaks for."""
WRITTEN = Moment(1_764_610_621_000_000_000, 1_764_610_621_000_999_999)
MOST = 2**63


def samples_of(name: str) -> list[tuple[str, str]]:
    """Kind and text of the recorded log lines of an engine."""
    path = DATA / "engines" / name / "lines.txt"
    if not path.exists():
        return []
    rows = [row.split("\t", 1) for row in path.read_text(encoding="utf-8").splitlines()]
    return [(kind, line) for kind, line in rows]


LINES = [(name, kind, line) for name in NAMES for kind, line in samples_of(name)]
KINDS_OF_LINES = [(name, kind) for name in NAMES for kind in KNOWN[name].log_lines]


def moment(wall_ns: int) -> Moment:
    return Moment(wall_ns - 50, wall_ns + 50)


def hits(line: str, kinds: tuple[LogLine, ...]) -> list[str]:
    return [kind.name for kind in kinds if kind.mark in line and kind.pattern.search(line)]


def check_news(news: News | None) -> None:
    """Whether a table can hold what a reader made of a message."""
    if news is None:
        return
    if isinstance(news, EngineFacts):
        assert news.name in KNOWN
        sizes = (news.unit_tokens, news.unit_bytes, news.bytes_per_token, news.reads_in_flight)
        assert all(n is None or (type(n) is int and 0 < n < MOST) for n in sizes)
        return
    assert isinstance(news, RequestNews)
    assert type(news.id) is str and news.id
    assert set(news.times) | set(news.tokens) | set(news.units) <= COLUMNS
    counts = (*news.tokens.values(), *news.units.values(), news.of_units)
    assert all(type(count) is int and count >= 0 for count in counts)
    assert all(type(key) is str and key for key in news.keys)
    for when in news.times.values():
        assert type(when) is Moment and when.earliest_ns <= when.latest_ns
        assert all(type(end) is int for end in when)
    merger = RequestMerger()
    merger.take(news, 1, last_word=True)
    rows, _ = merger.release(2, everything=True, unit_tokens=16)
    assert len(rows) == (len(news.id) <= MOST_ID_CHARS)
    for row, column in product(rows, REQUESTS.columns):
        value = row[column.name]
        assert value == row["id"] or (type(value) is int and -MOST <= value < MOST), column.name


# ---------------------------------------------------------------- what a file exports


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_is_named_like_its_file_and_told_in_a_line(name: str) -> None:
    engine = KNOWN[name]
    assert engine.name == name
    assert 0 < len(engine.summary) <= 80 and "\n" not in engine.summary
    assert not engine.summary.endswith(".")
    assert re.fullmatch(r"[a-z0-9]+", name)


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_is_in_the_table_of_its_folder(name: str) -> None:
    rows = re.findall(r"^\| `(\w+)\.py` \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows.count(name) == 1
    assert set(rows) == set(NAMES), "a row of a file that is not there"


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", NAMES)
@given(path=st.text(max_size=300) | st.text(alphabet="/.@_-0123456789abcdefgkrtbin", max_size=300))
def test_recognising_is_pure_and_strict(name: str, path: str) -> None:
    recognise = KNOWN[name].recognise
    found = recognise(path)
    assert recognise(path) == found
    assert found is None, "text that nobody made a KV file of"


def parts() -> list[str]:
    """Folders and names of all engines' files."""
    rows = [
        line.rsplit(" ", 2)[0]
        for file in sorted((DATA / "engine_paths").glob("*.txt"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    return sorted({part for row in rows for part in row.split("/") if part})


PARTS = parts()
FILE_ENGINES = [engine for engine in KNOWN.values() if engine.describes_files]


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=8), st.booleans())
@settings(max_examples=300)
def test_a_path_made_of_all_engines_parts_has_one_owner(words: list[str], absolute: bool) -> None:
    path = "/" * absolute + "/".join(words)
    claims = {e.name: kv for e in FILE_ENGINES if (kv := e.recognise(path)) is not None}
    assert len(claims) <= 1
    assert all(kv.key and "/" not in kv.key for kv in claims.values())
    owner = engines.owner(path)
    assert (dict([owner]) if owner else {}) == claims


@pytest.mark.parametrize("name", NAMES)
def test_a_long_path_is_decided_at_once(name: str) -> None:
    begun = time.process_time()
    for part in PARTS:
        assert KNOWN[name].recognise(f"/{part}" * 200 + "/" + "0" * 5000 + "!") is None
    assert time.process_time() - begun < 0.005 * len(PARTS) + 0.2


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_tells_nothing(name: str, tmp_path: Path) -> None:
    facts = KNOWN[name].facts
    (tmp_path / "config.json").write_text("[1, 2")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/config.json").write_text('{"kv_cache_groups": 7}')
    for root in (tmp_path, tmp_path / "inner", tmp_path / "none", Path("/proc/self/mem")):
        assert facts is None or facts(str(root)) is None


# ---------------------------------------------------------------- log lines


def test_there_are_lines_to_look_at() -> None:
    assert len(LINES) >= 19
    assert {name for name, _, _ in LINES} == {name for name in NAMES if KNOWN[name].log_lines}


@pytest.mark.parametrize(("name", "kind"), KINDS_OF_LINES, ids=lambda v: getattr(v, "name", v))
def test_each_kind_of_line_has_a_sample(name: str, kind: LogLine) -> None:
    found = [line for sample, line in samples_of(name) if sample == kind.name]
    assert found, f"tests/data/engines/{name}/lines.txt has no {kind.name!r}"
    assert kind.mark and all(kind.mark in line for line in found)
    kinds = [each.name for each in KNOWN[name].log_lines]
    assert kinds.count(kind.name) == 1


@pytest.mark.parametrize(("name", "kind", "line"), LINES, ids=lambda value: value[:40])
def test_a_line_is_of_one_kind_and_of_one_engine(name: str, kind: str, line: str) -> None:
    assert hits(line, KNOWN[name].log_lines) == [kind]
    assert [n for n in NAMES if hits(line, KNOWN[n].log_lines)] == [name]
    (one,) = (each for each in KNOWN[name].log_lines if each.name == kind)
    match = one.pattern.search(line)
    assert match is not None
    for when in (WRITTEN, None):
        check_news(one.read(match, when))


@pytest.mark.parametrize(("name", "kind", "line"), LINES, ids=lambda value: value[:40])
def test_a_line_in_a_prompt_or_behind_words_is_read_by_mark_only(
    name: str, kind: str, line: str
) -> None:
    """Nothing but the mark makes a line worth a look: half of a line is none."""
    (one,) = (each for each in KNOWN[name].log_lines if each.name == kind)
    assert not one.pattern.search(one.mark)
    assert not one.pattern.search(line.replace(one.mark, "", 1))


@pytest.mark.parametrize(("name", "kind", "line"), LINES, ids=lambda value: value[:40])
@given(number=st.sampled_from(["", "-1", "0", "9" * 30, "1e999", "nan", "x", "\u0663"]))
def test_odd_numbers_in_a_line_raise_nothing_else(
    name: str, kind: str, line: str, number: str
) -> None:
    (one,) = (each for each in KNOWN[name].log_lines if each.name == kind)
    for digits in re.finditer(r"\d+(?:\.\d+)?", line):
        odd = line[: digits.start()] + number + line[digits.end() :]
        match = one.pattern.search(odd)
        if match is not None:
            try:
                check_news(one.read(match, WRITTEN))
            except NOT_UNDERSTOOD:
                continue


@pytest.mark.parametrize(("name", "kind", "line"), LINES, ids=lambda value: value[:40])
def test_a_long_line_is_decided_at_once(name: str, kind: str, line: str) -> None:
    (one,) = (each for each in KNOWN[name].log_lines if each.name == kind)
    start, _, end = line.partition(one.mark)
    for text in (
        one.mark * (200_000 // len(one.mark)),
        start + one.mark + "a" * 200_000,
        start + one.mark + "1" * 200_000 + " " + end,
        start + one.mark + "a 1, " * 40_000,
        (start + one.mark) * (200_000 // len(start + one.mark)),
    ):
        begun = time.process_time()
        one.pattern.search(text)
        assert time.process_time() - begun < 1.0


# ---------------------------------------------------------------- objects, spans, pages


def messages_of(name: str, what: str) -> list[dict[str, Any]]:
    """Whole objects or spans of an engine, all of which are understood."""
    path = DATA / "engines" / name / "messages.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))[what]
    return found


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, 1e19, 9.3e9, 0.5]),
    st.text(max_size=20),
    st.sampled_from(["a", "a-0123abcd", "x" * 600, "12", "-3", "9" * 5000, "0x1f", "1e9", "nan"]),
)
ODD_JSON = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def changed(draw: Callable[[Any], Any], values: st.SearchStrategy[Any], whole: Any) -> Any:
    """A copy of ``whole`` with up to three of its values missing or replaced, at any depth."""
    whole = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 3))):
        place = whole
        while True:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else [0]))
            inner = place[key] if isinstance(place, dict) or place else None
            if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
                break
            place = inner
        if isinstance(place, dict) and len(place) > 1 and draw(st.integers(0, 5)) == 0:
            del place[key]
        elif place:
            place[key] = draw(values)
    return whole


FILES = [name for name in NAMES if KNOWN[name].json_files]
SPANS = [name for name in NAMES if KNOWN[name].read_span]
PAGES = [name for name in NAMES if KNOWN[name].metrics]
hostile = settings(max_examples=100, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", FILES)
def test_files_are_understood(name: str) -> None:
    for message in messages_of(name, "objects"):
        found = [news for files in KNOWN[name].json_files for news in files.read(message, moment)]
        assert any(isinstance(news, RequestNews) and news.times for news in found)
        for news in found:
            check_news(news)
    assert len({files.names.pattern for files in KNOWN[name].json_files}) == len(
        KNOWN[name].json_files
    )


@pytest.mark.parametrize("name", FILES)
@hostile
@given(data=st.data())
def test_json_of_strangers(name: str, data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(messages_of(name, "objects")))
    message = changed(data.draw, ODD_JSON, message)
    for files in KNOWN[name].json_files:
        try:
            found = files.read(message, moment)
        except NOT_UNDERSTOOD:
            continue
        for news in found:
            check_news(news)


@pytest.mark.parametrize("name", SPANS)
def test_spans_are_understood_by_their_engine_only(name: str) -> None:
    for said in messages_of(name, "spans"):
        span = Span(said["name"], said["start"], said["start"] + 1009, said["attributes"])
        readers = {n: KNOWN[n].read_span for n in SPANS}
        found = {n: read(span, moment) for n, read in readers.items() if read}
        assert [n for n, news in found.items() if news is not None] == [name]
        check_news(found[name])


@pytest.mark.parametrize("name", SPANS)
@hostile
@given(data=st.data())
def test_spans_of_strangers(name: str, data: st.DataObject) -> None:
    said = data.draw(st.sampled_from(messages_of(name, "spans")))
    # Protobuf keeps integers to 64 bits.
    attributes = changed(data.draw, ODD.filter(lambda v: v is None or fits(v)), said["attributes"])
    start_ns = data.draw(st.sampled_from([0, said["start"], 2**62]))
    check_span(name, Span(said["name"], start_ns, start_ns + 1009, attributes))


@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize(
    "odd", [-1, -0.5, 2**63 - 1, 1e300, math.nan, math.inf, -math.inf, "", "x"]
)
def test_spans_with_one_odd_value(name: str, odd: object) -> None:
    for said in messages_of(name, "spans"):
        for key in said["attributes"]:
            attributes = {**said["attributes"], key: odd}
            start_ns = said["start"]
            check_span(name, Span(said["name"], start_ns, start_ns + 1009, attributes))


def check_span(name: str, span: Span) -> None:
    """What it says can be kept, and nothing of a request is before its span."""
    read = KNOWN[name].read_span
    assert read is not None
    try:
        news = read(span, moment)
    except NOT_UNDERSTOOD:
        return
    check_news(news)
    if isinstance(news, RequestNews):
        first_ns = moment(span.start_wall_ns).earliest_ns
        assert all(when.earliest_ns >= first_ns for when in news.times.values())


def fits(value: object) -> bool:
    return not isinstance(value, int) or -MOST <= value < MOST


@pytest.mark.parametrize("name", PAGES)
@hostile
@given(data=st.data())
def test_pages_of_strangers(name: str, data: st.DataObject) -> None:
    metrics = KNOWN[name].metrics
    assert metrics is not None
    if metrics.facts is None:
        return
    text = ODD.map(str)
    said = sorted(set(texts_in(metrics.facts.__code__)))
    labels = st.fixed_dictionaries({}, optional=dict.fromkeys(said, text))
    samples = [
        Sample(data.draw(st.sampled_from(said)), data.draw(labels), data.draw(st.floats()))
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    try:
        check_news(metrics.facts(samples))
    except _STRANGE:
        return


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("odd", ["", "0", "-3", "0.5", str(MOST), "9" * 19, "9" * 5000, "nan"])
def test_pages_with_one_odd_value(name: str, odd: str) -> None:
    metrics = KNOWN[name].metrics
    if metrics is None or metrics.facts is None:
        return
    said = sorted(set(texts_in(metrics.facts.__code__)))
    for word in said:
        try:
            check_news(metrics.facts([Sample(word, dict.fromkeys(said, odd), 1.0)]))
        except _STRANGE:
            continue


def texts_in(code: CodeType) -> Iterator[str]:
    """What a function compares with: the hostile must know what it is asked for."""
    waiting: list[Any] = list(code.co_consts)
    while waiting:
        const = waiting.pop()
        if isinstance(const, str):
            yield const
        elif isinstance(const, tuple | frozenset):
            waiting += const
        elif isinstance(const, CodeType):
            waiting += const.co_consts


@pytest.mark.parametrize("name", PAGES)
def test_counters_have_names_that_kvprobe_knows(name: str) -> None:
    metrics = KNOWN[name].metrics
    assert metrics is not None
    assert metrics.keep.match("python_gc_objects_collected_total") is None
    names = [total.name for total in metrics.totals]
    assert set(names) <= TOTALS and len(set(names)) == len(names)
    for total in metrics.totals:
        assert metrics.keep.match(total.metric), "a total that is not kept"
        assert all(re.compile(pattern) for pattern in total.labels.values())
    others = (KNOWN[n].metrics for n in PAGES if n != name)
    assert not any(o.keep.match(t.metric) for o in others if o for t in metrics.totals)


# ---------------------------------------------------------------- settings


FACTS = [
    EngineFacts("x"),
    EngineFacts("x", unit_tokens=16, unit_bytes=2 << 20, bytes_per_token=131072),
    EngineFacts("x", unit_bytes=2 << 20, reads_in_flight=7, prefetch=True),
    EngineFacts("x", bytes_per_token=70272),
]


@pytest.mark.parametrize("name", [n for n in NAMES if n not in NOT_A_REQUEST])
@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("value", [0, 1, 524287, 1 << 40])
def test_every_knob_has_a_name_or_a_reason(name: str, knob: str, value: int) -> None:
    for facts in FACTS:
        setting = KNOWN[name].translate(knob, value, facts)
        assert isinstance(setting, EngineSetting)
        assert setting.how and not setting.how.endswith((" ", ";"))
        assert re.search(r"\b\d+\.\d+|restart", setting.how), "no version, and no word of a restart"
        if setting.name is None:
            assert setting.value is None and not setting.live
        elif setting.value is not None and setting.value.lstrip("-").isdecimal():
            assert 0 < int(setting.value) <= 1 << 40


@pytest.mark.parametrize("name", NAMES)
def test_a_knob_that_nobody_knows(name: str) -> None:
    setting = KNOWN[name].translate("colour", 7, EngineFacts(name, unit_bytes=7))
    assert (setting.name, setting.value, setting.live) == (None, None, False)
    assert setting.how


@pytest.mark.parametrize("name", [n for n in NAMES if n not in NOT_A_REQUEST])
def test_own_events_have_the_words_of_the_engine_they_name(name: str) -> None:
    for knob in KNOBS:
        facts = EngineFacts(name, unit_bytes=2 << 20, unit_tokens=16)
        own = KNOWN["jsonl"].translate(knob, 8 << 20, facts)
        assert own == KNOWN[name].translate(knob, 8 << 20, facts)


# ---------------------------------------------------------------- processes


def cases() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for name in NAMES:
        path = DATA / "engines" / name / "argv.json"
        if path.exists():
            found += [(name, case) for case in json.loads(path.read_text(encoding="utf-8"))]
    return found


CASES = cases()
ENVIRONMENT = {name: value for _, case in CASES for name, value in case["environment"].items()}
UNRELATED = [
    ("bash", ["bash"]),
    ("bash", ["bash", "-c", "vllm serve org/model"]),
    ("python3", ["python3"]),
    ("python3", ["python3", "-m", "http.server", "8000"]),
    ("python3", ["/usr/bin/python3", "-m", "pytest", "vllm", "serve", "lmcache", "server"]),
    ("python3", ["/usr/bin/python3", "-c", "import vllm, sglang, lmcache"]),
    ("postgres", ["postgres: writer process "]),
    ("postgres", ["/usr/lib/postgresql/15/bin/postgres", "-D", "/srv/kv", "--port=8000"]),
    ("sudo", ["sudo", "vllm", "serve", "org/model"]),
    ("sudo", ["sudo", "sglang", "serve", "--model-path", "org/model"]),
    ("sudo", ["sudo", "lmcache", "server"]),
    ("docker", ["docker", "run", "lmcache/vllm", "lmcache", "server", "mooncake_client"]),
    ("vim", ["vim", "vllm", "serve"]),
    ("vim", ["vim", "vllm.log"]),
    ("grep", ["grep", "vllm"]),
    ("bash", ["/bin/bash", "/srv/bin/vllm", "serve", "org/model"]),
    ("node", ["node", "/srv/sglang/serve.js", "sglang", "serve"]),
    ("nginx", ["nginx: master process nginx -g daemon off;"]),
    ("tail", ["tail", "-f", "/srv/logs/vllm.log"]),
    ("x", [""]),
    ("x", ["", "serve"]),
    ("x", []),
]


def process_of(case: Mapping[str, Any]) -> Process:
    return Process(
        17,
        1,
        case["name"],
        tuple(case["arguments"]),
        case["environment"],
        case["folder"],
        case["log"],
    )


def check_running(name: str, found: RunningEngine) -> None:
    assert (found.engine, found.pid) == (name, 17)
    assert found.shape and "\n" not in found.shape
    assert all(root.startswith("/") and root == str(Path(root)) for root in found.roots)
    assert len(set(found.roots)) == len(found.roots)
    assert {place.kind for place in found.signals} <= KINDS
    assert all(place.target and "\n" not in place.target for place in found.signals)
    assert len(set(found.signals)) == len(found.signals)
    assert all(text and "\n" not in text and not text.endswith(".") for text in found.advice)
    if found.facts is not None:
        check_news(found.facts)
        assert found.facts.name == name
        assert found.facts.root is None or found.facts.root in found.roots


def test_every_engine_that_can_be_found_has_command_lines() -> None:
    can = {name for name in NAMES if KNOWN[name].detect}
    assert {name for name, _ in CASES} == can == set(NAMES) - NOT_A_REQUEST


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_command_line_tells_folders_signals_and_advice(name: str, case: dict[str, Any]) -> None:
    detect = KNOWN[name].detect
    assert detect is not None
    found = detect(process_of(case))
    assert found is not None
    check_running(name, found)
    assert list(found.roots) == case["roots"]
    assert sorted(map(str, found.signals)) == sorted(case["signals"])
    assert len(found.advice) == len(case["advice"])
    for text, option in zip(found.advice, case["advice"], strict=True):
        assert option in text
    assert bool(found.roots) == (found.facts is not None and found.facts.root is not None)


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_requests_of_what_runs_are_told_by_somebody(name: str, case: dict[str, Any]) -> None:
    """Each signal that an engine names can be read, by its adapter or another one."""
    detect = KNOWN[name].detect
    assert detect is not None and (found := detect(process_of(case))) is not None
    readers = {
        "log": any(engine.log_lines for engine in KNOWN.values()),
        "files": bool(KNOWN[name].json_files),
        "metrics": KNOWN[name].metrics is not None,
        "otlp": KNOWN[name].read_span is not None,
        "kv-events": KNOWN[name].publishes_kv_events,
    }
    assert all(readers[place.kind] for place in found.signals)


@pytest.mark.parametrize("name", [n for n in NAMES if KNOWN[n].detect])
@pytest.mark.parametrize(
    ("comm", "arguments"), UNRELATED, ids=lambda v: v if isinstance(v, str) else " ".join(v)[:40]
)
def test_other_programs_are_no_engine(name: str, comm: str, arguments: list[str]) -> None:
    detect = KNOWN[name].detect
    assert detect is not None
    assert detect(Process(17, 1, comm, tuple(arguments), {"PATH": "/bin"}, "/srv")) is None
    if not arguments[:1] or "python" not in arguments[0]:  # any Python may hold a client
        assert detect(Process(17, 1, comm, tuple(arguments), ENVIRONMENT, "/srv")) is None


WORDS = sorted({word for _, case in CASES for word in case["arguments"]})


@pytest.mark.parametrize("name", [n for n in NAMES if KNOWN[n].detect])
@given(data=st.data())
@settings(max_examples=150)
def test_options_of_strangers(name: str, data: st.DataObject) -> None:
    """Real words in any order, cut, with odd values: a plain answer or what ``running`` expects."""
    _, case = data.draw(st.sampled_from([c for c in CASES if c[0] == name]))
    words = list(case["arguments"])
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(words)))
        word = data.draw(st.sampled_from(WORDS) | st.text(max_size=9))
        words[place : place + data.draw(st.integers(0, 2))] = [word]
    odd = st.sampled_from(sorted(set(ENVIRONMENT.values()))) | st.text(max_size=9)
    environment = {
        variable: data.draw(odd)
        for variable in data.draw(st.sets(st.sampled_from(sorted(ENVIRONMENT)), max_size=4))
    }
    odd_case = {**case, "arguments": words, "environment": {**case["environment"], **environment}}
    detect = KNOWN[name].detect
    assert detect is not None
    try:
        found = detect(process_of(odd_case))
    except (ValueError, LookupError, TypeError, OSError):
        return
    if found is not None:
        assert found.engine == name and found.shape
        assert all(root.startswith("/") for root in found.roots)
        assert {place.kind for place in found.signals} <= KINDS


def test_the_engine_type_has_what_this_suite_looks_at() -> None:
    """A new field of an adapter is to be looked at here."""
    assert set(Engine.__dataclass_fields__) == {
        "name", "summary", "recognise", "translate", "facts", "detect", "log_lines", "read_span",
        "metrics", "json_files", "describes_files", "publishes_kv_events",
    }  # fmt: skip
