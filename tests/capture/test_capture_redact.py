"""Redaction: nothing that names the host is left, and every join still works."""

import zipfile
from collections import Counter
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvprobe.capture.part import part_of
from kvprobe.capture.reader import open_capture
from kvprobe.capture.recorder import Recorder, pack, pack_abandoned
from kvprobe.capture.redact import Redactor, redact
from kvprobe.errors import KvprobeError
from kvprobe.sources import Batch, TableRows
from tests.capture.fake_source import START_NS, chunk_paths, lookup_rows, manifest, request_dicts

SECRETS = ["secret", "192.0.2.77", "req-", "abcde0000", "Llama", "/mnt", "other", "enx0123456789ab"]


@pytest.fixture(scope="module")
def redacted(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("redacted") / "redacted.kvcap"
    redact(whole, out)
    return out


def spoken(path: Path) -> str:
    """Every byte of a capture, and every value of its tables, as one text."""
    parts = [path.read_bytes().decode("latin-1")]
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            parts.append(data.decode("latin-1"))
            if name.endswith(".parquet"):
                parts.append(repr(pq.read_table(BytesIO(data)).to_pydict()))
                parts.append(repr(pq.read_metadata(BytesIO(data)).to_dict()))
    return "\n".join(parts)


def test_no_name_is_left(whole: Path, redacted: Path) -> None:
    before, after = spoken(whole), spoken(redacted)
    for secret in SECRETS:
        assert secret in before, f"{secret} was never there: the test proves nothing"
        assert secret not in after


def test_joins_and_keys_survive(whole: Path, redacted: Path) -> None:
    with open_capture(whole) as old, open_capture(redacted) as new:
        assert new.manifest.redacted and not old.manifest.redacted
        for table in ("block", "ops"):
            for column, values in old.frame(table).items():
                assert values.tolist() == new.frame(table)[column].tolist()
        a, b = old.frame("lookups"), new.frame("lookups")
        assert a["kv_temporary"].tolist() == b["kv_temporary"].tolist()
        assert a["inode"].tolist() == b["inode"].tolist()
        joined = [
            [(r, p) for p, key in enumerate(f["kv_key"]) for r, k in enumerate(keys) if k == key]
            for f, keys in ((a, old.frame("keys")["key"]), (b, new.frame("keys")["key"]))
        ]
        assert joined[0] == joined[1] and len(joined[0]) == 11
        requests = new.frame("requests")["id"].tolist()
        assert [requests.index(r) for r in new.frame("keys")["request_id"]] == list(range(11))


def test_equal_paths_stay_equal_and_different_ones_different(whole: Path, redacted: Path) -> None:
    with open_capture(whole) as old, open_capture(redacted) as new:
        a, b = old.frame("lookups")["path"].tolist(), new.frame("lookups")["path"].tolist()
        root, kept_root = old.manifest.filters.root, new.manifest.filters.root
    assert len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b))
    assert Counter(p.count("/") for p in a) == Counter(p.count("/") for p in b)
    assert [p.endswith(".tmp") for p in a] == [p.endswith(".tmp") for p in b]
    assert [p.endswith(".bin") for p in a] == [p.endswith(".bin") for p in b]
    assert root == "/mnt/secretdir" and kept_root is not None
    assert b[0].startswith("/" + kept_root.split("/")[1] + "/"), "one folder, one hash"


def test_two_files_cannot_be_compared(whole: Path, tmp_path: Path) -> None:
    names = []
    for name in ("one", "two"):
        redact(whole, tmp_path / name)
        with open_capture(tmp_path / name) as capture:
            names.append(set(capture.frame("requests")["id"]))
    assert not names[0] & names[1]


def test_redacting_again_keeps_the_keys(redacted: Path, tmp_path: Path) -> None:
    redact(redacted, tmp_path / "again")
    with open_capture(tmp_path / "again") as capture:
        keys = capture.frame("lookups")["kv_key"]
        assert len(set(keys) - {None}) == 51
    with pytest.raises(KvprobeError, match="exists"):
        redact(redacted, tmp_path / "again")


def test_a_recording_can_be_redacted_while_it_is_packed(tmp_path: Path) -> None:
    out = tmp_path / "a.kvcap"
    recorder = Recorder(out)
    tables: dict[str, TableRows] = {
        "lookups": lookup_rows(chunk_paths(5)),
        "requests": request_dicts(3),
    }
    recorder.add(Batch(START_NS, tables))
    recorder.roll(manifest(), START_NS)
    recorder.leave()
    pack(part_of(out), out, redactor=Redactor())
    text = spoken(out)
    assert not [secret for secret in SECRETS if secret in text]
    with open_capture(out) as capture:
        assert capture.frame("lookups")["kv_temporary"].tolist() == [1, 0, 0, 1, 0]
        assert len(set(capture.frame("lookups")["kv_key"])) == 5


def test_a_folder_that_asks_for_it_is_redacted_without_being_told(tmp_path: Path) -> None:
    out = tmp_path / "a.kvcap"
    recorder = Recorder(out)
    recorder.add(Batch(START_NS, {"lookups": lookup_rows(chunk_paths(5))}))
    recorder.roll(replace(manifest(), redact_when_packed=True), START_NS)
    recorder.leave()
    assert part_of(out).stat().st_mode & 0o777 == 0o700
    facts = pack_abandoned(part_of(out), out)
    assert facts.redacted and not facts.redact_when_packed
    text = spoken(out)
    assert not [secret for secret in SECRETS if secret in text]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("volume 10.1.2.3:4420 is slow", "10.1.2.3"),
        ("peer fe80::1ff:fe23:4567:890a gone", "fe80"),
        ("port 00:25:96:ff:fe:12 down", "00:25"),
        ("cannot read /home/alice/kv/x.bin: gone", "alice"),
        ("Node7.example is old", "Node7"),
    ],
)
def test_sentences(text: str, hidden: str) -> None:
    assert hidden in text
    assert hidden not in Redactor().prose(text, "Node7.example")


def test_sentences_keep_what_explains() -> None:
    text = (
        "no /sys/kernel/debug/tracing on kernel 6.1.0: ops::read 12:30 at 3.5 GB/s and/or nvme0n1"
    )
    assert Redactor().prose(text, "node7") == text


@pytest.mark.parametrize(
    "name", ["nvme0n1", "nvme0n1p3", "sda", "dm-3", "eth0", "cpu12", "md127", ""]
)
def test_names_that_the_kernel_gives_are_kept(name: str) -> None:
    assert Redactor().subject(name) == name


def test_labels_of_an_engines_counters() -> None:
    redactor = Redactor()
    said = redactor.labels("engine=0,model_name=/srv/secret,tier=1:fs")
    assert said is not None
    assert said.startswith("engine=0,model_name=") and said.endswith("tier=1:fs")
    assert "secret" not in said and "srv" not in said
    assert [redactor.labels(kept) for kept in ("GPU", "", "nvme0n1", None)] == [
        "GPU", "", "nvme0n1", None
    ]  # fmt: skip
    assert redactor.labels("volume-of-alice") != "volume-of-alice"


@pytest.mark.parametrize("name", ["enx0123456789ab", "vg-customer", "payroll.db", "node-17-berlin"])
def test_names_that_people_give_are_hidden(name: str) -> None:
    assert Redactor().subject(name) != name
