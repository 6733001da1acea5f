"""NVMe paths and settings in captures: all that were seen, kept, hidden on request, replayed."""

import json
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvprobe.capture.manifest import Manifest
from kvprobe.capture.reader import open_capture
from kvprobe.capture.record import record
from kvprobe.capture.recorder import Recorder
from kvprobe.capture.redact import redact
from kvprobe.capture.typed_json import from_json, parse_json, to_json
from kvprobe.capture.window import Window
from kvprobe.model import DeviceFacts, NvmePath
from kvprobe.sources.live import LiveSource
from kvprobe.sources.replay import ReplaySource
from tests.capture.fake_source import DEVICE, FakeSession, manifest

NQN = "nqn.2014-08.com.example:nvme:kv-secret"
FIRST = NvmePath(
    device=DEVICE - 1,
    name="nvme0c0n1",
    head="nvme0n1",
    controller=0,
    transport="tcp",
    head_device=DEVICE,
    nqn=NQN,
    address="traddr=192.0.2.77,trsvcid=4420",
    nsid=1,
    namespace="7d0c1c5e-secret",
    state="live",
    ana_state="optimized",
    io_queues=2,
    queue_size=32,
    iopolicy="numa",
    numa_node=0,
)
AGAIN = replace(FIRST, name="nvme0c2n1", controller=2, device=DEVICE + 1)
KNOBS = [
    {
        "name": name,
        "family": "queue_depth",
        "subject": subject,
        "value": value,
        "unit": "",
        "source": source,
        "reachability": "live",
        "note": note,
    }
    for name, subject, value, source, note in (
        ("scheduler", "nvme0c0n1", "none", "/sys/block/nvme0c0n1/queue/scheduler", ""),
        ("queue_size", "nvme0", "32", "/sys/class/nvme/nvme0/sqsize", "tcp 192.0.2.77:4420"),
        ("io.max", "/secret.slice", "nvme0n1 rbps=7", "/sys/fs/cgroup/secret.slice/io.max", ""),
        ("stripe", "/mnt/secret", "not set", "/proc/self/mountinfo", "ext4"),
        ("wbt_lat_usec", "nvme0n1", None, "/sys/block/nvme0n1/queue/wbt_lat_usec", ""),
    )
]
SECRETS = ("secret", "192.0.2.77", NQN, "/mnt")


@dataclass
class FakeWatch:
    """The path comes back under another name at the third look."""

    looks: int = 0
    closely: list[bool] = field(default_factory=list)

    def look(self, closely: bool = False) -> None:
        self.looks += 1
        self.closely.append(closely)

    @property
    def paths(self) -> tuple[NvmePath, ...]:
        return (FIRST,) if self.looks < 3 else (FIRST, AGAIN)

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        return tuple(
            DeviceFacts(path.device, path.name, "nvme tcp", mounts=("/mnt/secret",))
            for path in self.paths
        )


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    out = tmp_path / "paths.kvcap"
    watch = FakeWatch()
    ticks = iter(range(10**9, 10**12, 10**9))
    source = LiveSource(
        FakeSession(7, total=35),
        watch=watch,
        opening={"knobs": KNOBS},
        clock=lambda: next(ticks),
    )
    asked = iter(range(4))
    recorder = Recorder(out)
    final = record(source, recorder, manifest(start_ns=10**9), lambda _: next(asked, None) is None)
    recorder.finish(replace(final, complete=True))
    assert watch.closely[-1] and not any(watch.closely[:-1]), "the last look is a close one"
    return out


def test_all_that_were_seen_are_in_the_file(recorded: Path) -> None:
    with open_capture(recorded) as capture:
        assert capture.manifest.nvme_paths == (FIRST, AGAIN)
        assert FIRST.key == AGAIN.key
        assert [d.name for d in capture.manifest.devices] == ["nvme0c0n1", "nvme0c2n1"]


def test_settings_are_stored_once(recorded: Path) -> None:
    with open_capture(recorded) as capture:
        frame = capture.frame("knobs")
        assert {name: values.tolist() for name, values in frame.items()} == {
            name: [row[name] for row in KNOBS] for name in KNOBS[0]
        }
        assert capture.manifest.losses["knobs"].rows == len(KNOBS)


def test_a_redacted_file_names_nobody(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "redacted.kvcap"
    facts = redact(recorded, out)
    assert {p.name for p in facts.nvme_paths} == {"nvme0c0n1", "nvme0c2n1"}
    with open_capture(recorded) as old, open_capture(out) as new:
        before = repr(old.manifest) + repr(old.frame("knobs"))
        after = repr(new.manifest) + repr(new.frame("knobs"))
        first, again = new.manifest.nvme_paths
        subjects = new.frame("knobs")["subject"].tolist()
        values = new.frame("knobs")["value"].tolist()
    for secret in SECRETS:
        assert secret in before, f"{secret} was never there: the test proves nothing"
        assert secret not in after
    assert first.key == again.key and None not in first.key, "the join survives"
    assert (first.transport, first.queue_size, first.ana_state) == ("tcp", 32, "optimized")
    assert [subjects[0], subjects[1], subjects[4]] == ["nvme0c0n1", "nvme0", "nvme0n1"]
    assert subjects[2].startswith("/") and subjects[3].startswith("/")
    assert values == ["none", "32", "nvme0n1 rbps=7", "not set", None]


def test_a_replay_has_them(recorded: Path) -> None:
    with open_capture(recorded) as capture:
        source = ReplaySource(capture)
        assert source.nvme_paths == (FIRST, AGAIN)
        assert len(source.poll().tables["knobs"]["name"]) == len(KNOBS)  # type: ignore[call-overload]


def test_a_live_window_has_them() -> None:
    ticks = iter(range(10**9, 10**12, 10**9))
    source = LiveSource(
        FakeSession(7),
        watch=FakeWatch(),
        opening={"knobs": KNOBS},
        clock=lambda: next(ticks),
    )
    window = Window(manifest(start_ns=10**9), seconds=2)
    for _ in range(7):
        window.add(source.poll(), source)
    assert window.manifest.nvme_paths == (FIRST, AGAIN)
    assert len(window.frame("knobs")["name"]) == len(KNOBS), "they come once and stay"


def test_a_capture_from_before_there_were_paths(recorded: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.kvcap"
    with zipfile.ZipFile(recorded) as source, zipfile.ZipFile(old, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "manifest.json":
                facts = json.loads(data)
                del facts["nvme_paths"], facts["losses"]["knobs"]
                data = json.dumps(facts).encode()
            if name != "knobs.parquet":
                target.writestr(zipfile.ZipInfo(name), data)
    with open_capture(old) as capture:
        assert capture.manifest.nvme_paths == ()
        assert len(capture.frame("knobs")["name"]) == 0
        assert len(capture.frame("block")["bytes"]) == 35


def test_facts_survive_json() -> None:
    facts = replace(manifest(), nvme_paths=(FIRST, replace(AGAIN, nqn=None, numa_node=None)))
    assert from_json(Manifest, parse_json(to_json(facts))) == facts
