"""Identity and the chain on trees of real kernels: two-path TCP and RDMA, PCI; and on garbage."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.commands._chain_text import chain_lines
from kvprobe.commands._terminal import Style
from kvprobe.model import NvmePath
from kvprobe.sources import devices, nvme
from kvprobe.sources.path_watch import PathWatch
from kvprobe.sources.queues import HardwareQueue, ranges
from kvprobe.sources.topology import Kind, Layer, chain_below
from tests.knobs.trees import LOCAL, MULTIPATH, SEPARATE, Tree, names, plant

NQN = "nqn.2014-08.org.nvmexpress:kvprobe-lab"


@pytest.fixture
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    return plant(request.param, tmp_path / "machine")


def paths(tree: Tree) -> tuple[NvmePath, ...]:
    return nvme.nvme_paths(tree.sysfs, tree.diskstats)


def numbers(tree: Tree) -> dict[str, int]:
    """What /proc/diskstats of the recorded machine says, read without kvprobe."""
    words = [line.split() for line in tree.diskstats.read_text().splitlines()]
    return {w[2]: int(w[0]) << 20 | int(w[1]) for w in words}


def test_trees_of_both_kernels_are_there() -> None:
    assert set(names()) == {*MULTIPATH, *LOCAL, *SEPARATE}


@pytest.mark.parametrize("tree", MULTIPATH, indirect=True)
def test_two_paths_to_one_namespace(tree: Tree) -> None:
    found = paths(tree)
    assert len(found) == 2
    assert {p.device for p in found} == {numbers(tree)[p.name] for p in found}
    assert {p.head for p in found} == {"nvme0n1"}
    assert {p.head_device for p in found} == {numbers(tree)["nvme0n1"]}
    assert len({p.key for p in found}) == 2, "the address tells them apart"
    assert len({p.namespace for p in found}) == 1 and found[0].namespace
    assert {(p.nqn, p.nsid, p.state) for p in found} == {(NQN, 1, "live")}
    # Connected with 32 entries: 6.1 has 32 tags, 6.12 has 31; one is for connecting.
    fit = 31 if (tree.sysfs / "block/nvme0n1/queue/nr_requests").exists() else 30
    assert {(p.io_queues, p.queue_size, p.ana_state) for p in found} == {(2, fit, "optimized")}
    assert {p.iopolicy for p in found} == {"numa"}
    assert all("src_addr" not in (p.address or "") for p in found)
    assert [p.controller for p in found] == [0, 1]


@pytest.mark.parametrize("tree", LOCAL, indirect=True)
def test_a_local_device(tree: Tree) -> None:
    (found,) = paths(tree)
    assert (found.transport, found.nsid, found.state) == ("pcie", 1, "live")
    assert found.name == found.head == "nvme0n1"
    assert found.device == found.head_device == numbers(tree)["nvme0n1"]
    assert found.address is not None and found.address.startswith("0000:00:")
    assert found.iopolicy is None, "there is only one way"


@pytest.mark.parametrize("tree", SEPARATE, indirect=True)
def test_two_paths_that_are_not_joined(tree: Tree) -> None:
    first, second = paths(tree)
    assert (first.name, second.name) == ("nvme0n1", "nvme1n1")
    assert [p.head for p in (first, second)] == ["nvme0n1", "nvme1n1"], "no head is theirs"
    assert [p.head_device for p in (first, second)] == [first.device, second.device]
    assert first.namespace == second.namespace and first.key != second.key
    assert first.ana_state is None and first.iopolicy is None
    assert nvme.native_multipath(tree.sysfs) is False


@pytest.mark.parametrize("tree", MULTIPATH[1:2], indirect=True)
def test_a_lower_nr_requests_bounds_what_fits(tree: Tree) -> None:
    (tree.sysfs / "block/nvme0c1n1/queue/nr_requests").write_text("11\n")
    assert [p.queue_size for p in paths(tree)] == [31, 10]
    shutil.rmtree(tree.sysfs / "block/nvme0c1n1/mq")
    assert [p.queue_size for p in paths(tree)] == [31, 31], "as the controller says"


@pytest.mark.parametrize("tree", MULTIPATH, indirect=True)
def test_path_disks_are_devices(tree: Tree) -> None:
    kind = "rdma" if "rdma" in str(tree.sysfs.resolve()) else "tcp"
    found = {f.name: f for f in devices.devices(tree.sysfs, tree.mountinfo, tree.diskstats)}
    for path in paths(tree):
        facts = found[path.name]
        assert facts.device == path.device
        assert facts.transport in (f"nvme {kind}", "nvme tcp", "nvme rdma")
        assert facts.mounts == found["nvme0n1"].mounts != ()
        assert facts.size_bytes == found["nvme0n1"].size_bytes
        queue = tree.sysfs / "block" / path.name / "queue"
        assert facts.nr_requests == int((queue / "nr_requests").read_text())


@pytest.mark.parametrize("tree", MULTIPATH, indirect=True)
def test_from_a_partition_to_the_queues(tree: Tree) -> None:
    part = chain_below("nvme0n1p1", tree.sysfs, tree.mountinfo, tree.diskstats)
    assert part.device == numbers(tree)["nvme0n1p1"]
    (head,) = part.below
    assert [layer.kind for layer in part.walk()] == [
        Kind.PARTITION,
        Kind.HEAD,
        *(Kind.PATH, Kind.CONTROLLER) * 2,
    ]
    assert (head.facts["nqn"], head.facts["iopolicy"]) == (NQN, "numa")
    for path in head.below:
        assert path.device == numbers(tree)[path.name]
        assert [queue.number for queue in path.queues] == [0, 1]
        assert sorted(cpu for queue in path.queues for cpu in queue.cpus) == [0, 1]
        tags = tree.sysfs / "block" / path.name / "mq/0/nr_tags"
        assert path.queues[0].commands == int(tags.read_text()) - 1, "one is for connecting"
    assert head.queues == (), "the head has none of its own"


@pytest.mark.parametrize("tree", names(), indirect=True)
def test_the_tree_is_drawn(tree: Tree) -> None:
    layer = chain_below("nvme0n1", tree.sysfs, tree.mountinfo, tree.diskstats)
    text = list(chain_lines(layer, Style(100, True, False)))
    assert all(line.isascii() for line in text)
    assert sum(line.lstrip(" |`-").startswith("queue pair") for line in text) == len(
        [queue for each in layer.walk() for queue in each.queues]
    )
    assert "unknown" not in " ".join(text), text


TWO_PATHS = """\
nvme0n1p1 (259:3): partition, 63.0 MiB
└─ nvme0n1 (259:1): NVMe multipath disk, 64.0 MiB, namespace 1 of NQN, I/O policy numa
   ├─ nvme0c0n1 (259:0): path, optimized
   │  ├─ nvme0: tcp 127.0.0.1:4420 from 127.0.0.1, live, 2 I/O queues of 32 entries
   │  ├─ queue pair 1, 30 commands, CPUs 0
   │  └─ queue pair 2, 30 commands, CPUs 1
   └─ nvme0c1n1 (259:2): path, optimized
      ├─ nvme1: tcp 127.0.0.2:4420 from 127.0.0.1, live, 2 I/O queues of 32 entries
      ├─ queue pair 1, 30 commands, CPUs 0
      └─ queue pair 2, 30 commands, CPUs 1
"""
ONE_DEVICE = """\
nvme0n1p1 (259:1): partition, 63.0 MiB
└─ nvme0n1 (259:0): disk, 64.0 MiB
   ├─ nvme0: pcie 0000:00:04.0, live, 2 I/O queues of 1024 entries
   ├─ queue pair 1, 1023 commands, CPUs 0
   └─ queue pair 2, 1023 commands, CPUs 1
"""


@pytest.mark.parametrize(
    ("tree", "text"), [("6.12-tcp", TWO_PATHS), ("6.12-pci", ONE_DEVICE)], indirect=["tree"]
)
def test_golden_chain(tree: Tree, text: str) -> None:
    layer = chain_below("nvme0n1p1", tree.sysfs, tree.mountinfo, tree.diskstats)
    drawn = "\n".join(chain_lines(layer, Style(100, False, False))) + "\n"
    assert drawn == text.replace("NQN", NQN)


@pytest.mark.parametrize("tree", MULTIPATH[1:2], indirect=True)
def test_a_path_that_comes_back_under_another_name(tree: Tree) -> None:
    watch = PathWatch(tree.sysfs, tree.mountinfo, tree.diskstats)
    before = watch.paths
    watch.look()
    assert watch.paths == before
    # disconnect, and connect: nvme0c0n1 (259:0) becomes nvme0c2n1 with the number of the old one
    controllers = tree.sysfs / "devices/virtual/nvme-fabrics/ctl"
    shutil.copytree(controllers / "nvme0", controllers / "nvme2", symlinks=True)
    os.rename(controllers / "nvme2/nvme0c0n1", controllers / "nvme2/nvme0c2n1")
    device = controllers / "nvme2/nvme0c2n1/device"
    device.unlink()
    device.symlink_to(controllers / "nvme2")
    (tree.sysfs / "block/nvme0c2n1").symlink_to(controllers / "nvme2/nvme0c2n1")
    (tree.sysfs / "class/nvme/nvme2").symlink_to(controllers / "nvme2")
    (tree.sysfs / "block/nvme0c0n1").unlink()
    (tree.sysfs / "class/nvme/nvme0").unlink()
    tree.diskstats.write_text(tree.diskstats.read_text().replace("nvme0c0n1", "nvme0c2n1"))
    watch.look()
    assert {p.name for p in watch.paths} == {"nvme0c0n1", "nvme0c1n1", "nvme0c2n1"}
    old, new = (next(p for p in watch.paths if p.name == f"nvme0c{n}n1") for n in (0, 2))
    assert old.key == new.key and old.device == new.device
    assert watch.paths.index(new) > watch.paths.index(old), "the number is the newer one's now"
    assert [d.name for d in watch.devices if d.device == new.device] == ["nvme0c2n1"]
    # and back again
    for kind, number in (("block", "c2n1"), ("class/nvme", "2")):
        (tree.sysfs / kind / f"nvme{'0' if kind == 'block' else ''}{number}").unlink()
    (tree.sysfs / "block/nvme0c0n1").symlink_to(controllers / "nvme0/nvme0c0n1")
    (tree.sysfs / "class/nvme/nvme0").symlink_to(controllers / "nvme0")
    tree.diskstats.write_text(tree.diskstats.read_text().replace("nvme0c2n1", "nvme0c0n1"))
    watch.look()
    assert watch.paths.index(old) > watch.paths.index(new)
    assert [d.name for d in watch.devices if d.device == old.device] == ["nvme0c0n1"]


@pytest.mark.parametrize("tree", MULTIPATH[1:2], indirect=True)
def test_a_state_that_changes_is_taken_in(tree: Tree) -> None:
    watch = PathWatch(tree.sysfs, tree.mountinfo, tree.diskstats)
    (tree.sysfs / "class/nvme/nvme1/state").write_text("connecting\n")
    watch.look()
    assert {p.name: p.state for p in watch.paths} == {
        "nvme0c0n1": "live",
        "nvme0c1n1": "connecting",
    }
    (tree.sysfs / "block/nvme0c1n1/ana_state").write_text("inaccessible\n")
    watch.look()
    assert {p.ana_state for p in watch.paths} == {"optimized"}, "a quick look is not so close"
    watch.look(closely=True)
    assert {p.ana_state for p in watch.paths} == {"optimized", "inaccessible"}


@pytest.mark.parametrize("tree", MULTIPATH[1:2], indirect=True)
def test_newer_kernels_list_the_paths(tree: Tree) -> None:
    assert nvme.paths_of_head("nvme0n1", tree.sysfs) == ["nvme0c0n1", "nvme0c1n1"]
    listed = tree.sysfs / "block/nvme0n1/multipath"
    listed.mkdir()
    (listed / "nvme0c1n1").symlink_to(tree.sysfs / "block/nvme0c1n1")
    assert nvme.paths_of_head("nvme0n1", tree.sysfs) == ["nvme0c1n1"]


def test_addresses() -> None:
    text = "traddr=10.0.0.7,trsvcid=4420,src_addr=10.0.0.9"
    assert nvme.parse_address(text) == {
        "traddr": "10.0.0.7",
        "trsvcid": "4420",
        "src_addr": "10.0.0.9",
    }
    assert nvme.short_address(text) == "10.0.0.7:4420"
    assert nvme.short_address("traddr=fd00::7,trsvcid=4420") == "[fd00::7]:4420"
    assert nvme.short_address("0000:00:04.0") == "0000:00:04.0"
    assert nvme.short_address(None) == nvme.short_address("") == ""


@pytest.mark.parametrize(
    ("given", "text"),
    [((), ""), ((3,), "3"), ((0, 1, 2, 3), "0-3"), ((8, 0, 1, 3), "0-1,3,8"), ((5, 5, 6), "5-6")],
)
def test_ranges(given: tuple[int, ...], text: str) -> None:
    assert ranges(given) == text


def test_many_queues_are_shown_together() -> None:
    queues = tuple(HardwareQueue(n, (2 * n, 2 * n + 1), 127) for n in range(61))
    text = list(chain_lines(Layer(Kind.DISK, "nvme0n1", queues=queues), Style(80, True, False)))
    assert text == ["nvme0n1: disk", "`- queue pairs 1-61, 127 commands each, CPUs 0-121"]


# ---------------------------------------------------------------- garbage

GARBAGE = st.one_of(st.text(max_size=40), st.sampled_from(["", "-1", "\0", "9" * 5000, "\x1b[2J"]))


@settings(max_examples=20)
@given(st.data())
def test_garbage_in_every_file_is_no_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tree = plant(data.draw(st.sampled_from(names())), tmp_path_factory.mktemp("tree"))
    files = sorted(path for path in tree.root.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=60)):
        path.write_bytes(data.draw(GARBAGE).encode("utf-8", "replace"))
    PathWatch(tree.sysfs, tree.mountinfo, tree.diskstats)
    for name in os.listdir(tree.sysfs / "block"):
        layer = chain_below(name, tree.sysfs, tree.mountinfo, tree.diskstats)
        text = "".join(chain_lines(layer, Style(100, False, False)))
        assert text.isprintable(), repr(text)
