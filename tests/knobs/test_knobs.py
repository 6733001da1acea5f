"""Settings: against other tools here, on trees of real kernels, on made-up ones, on garbage."""

import ast
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import knobs
from kvprobe.errors import KvprobeError
from kvprobe.knobs import Family, Reach, Setting
from kvprobe.knobs._subjects import Roots
from kvprobe.schema import KNOBS
from tests.knobs.trees import LOCAL, MULTIPATH, SEPARATE, Tree, names, plant

PACKAGE = Path(knobs.__file__).parent


@pytest.fixture
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    return plant(request.param, tmp_path / "machine")


def by_name(found: list[Setting]) -> dict[tuple[str, str], Setting]:
    return {(each.knob.name, each.subject): each for each in found}


# ---------------------------------------------------------------- this machine


def output(*words: str | Path) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def loop_mount(folder: Path) -> Iterator[tuple[str, Path]]:
    """An ext4 file system with a stripe on a loop device: the device's name and the mount point."""
    image, point = folder / "image", folder / "knobs mount"
    image.write_bytes(bytes(16 << 20))
    point.mkdir()
    output("mkfs.ext4", "-q", "-b", "4096", "-E", "stride=3,stripe_width=13", image)
    output("mount", "-o", "loop,stripe=13,inode_readahead_blks=8", image, point)
    try:
        yield Path(output("findmnt", "-no", "SOURCE", point)).name, point
    finally:
        output("umount", point)


@pytest.mark.root
def test_a_disk_as_blockdev_and_lsblk_see_it(tmp_path: Path) -> None:
    with loop_mount(tmp_path) as (name, point):
        found = by_name(knobs.read_all(knobs.of_device(name)))
        assert by_name(knobs.read_all(knobs.of_path(str(point)))).items() >= found.items()
        device = f"/dev/{name}"
        ours = {knob: each.value for (knob, subject), each in found.items() if subject == name}
        answers = {
            "read_ahead_kb": int(output("blockdev", "--getra", device)) // 2,
            "max_sectors_kb": int(output("blockdev", "--getmaxsect", device)) // 2,
            "logical_block_size": int(output("blockdev", "--getss", device)),
            "physical_block_size": int(output("blockdev", "--getpbsz", device)),
            "minimum_io_size": int(output("blockdev", "--getiomin", device)),
            "optimal_io_size": int(output("blockdev", "--getioopt", device)),
            "inode_readahead_blks": 8,
        }
        assert {knob: ours[knob] for knob in answers} == {k: str(v) for k, v in answers.items()}
        scheduler, depth = output("lsblk", "-nro", "SCHED,RQ-SIZE", device).split()
        assert (ours["scheduler"], ours["nr_requests"]) == (scheduler, depth)
        assert scheduler in found["scheduler", name].allowed.split()
        assert found["stripe", str(point)].value == "13"


@pytest.mark.root
def test_what_rq_affinity_takes_and_ignores(tmp_path: Path) -> None:
    """The catalogue's ``allowed`` and ``ignored`` against this kernel."""
    with loop_mount(tmp_path) as (name, _):
        affinity = by_name(knobs.read_all(knobs.of_device(name)))["rq_affinity", name]
        assert affinity.allowed == "0 1 2" and "3 and more" in affinity.knob.ignored
        file = Path(affinity.source)
        for value in affinity.allowed.split():
            file.write_text(value)
            for ignored in ("3", "7"):
                file.write_text(ignored)
                assert file.read_text().strip() == value


def test_buffers_as_a_socket_gets_them() -> None:
    found = by_name(knobs.read_all(knobs.of_host()))
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        for kind, option, letter in (
            ("tcp_rmem", socket.SO_RCVBUF, "r"),
            ("tcp_wmem", socket.SO_SNDBUF, "w"),
        ):
            value = found[f"net.ipv4.{kind}", "host"].value
            assert value is not None
            assert int(value.split()[1]) == tcp.getsockopt(socket.SOL_SOCKET, option)
            udp.setsockopt(socket.SOL_SOCKET, option, 2**30)
            largest = found[f"net.core.{letter}mem_max", "host"].value
            assert 2 * int(largest or 0) == udp.getsockopt(socket.SOL_SOCKET, option)


def test_a_mounted_disk_is_among_the_subjects_of_the_host() -> None:
    root = knobs.of_path("/")
    if not root.disks:
        pytest.skip("/ is not on a disk")
    assert {*root.disks} <= {*knobs.of_host().disks}


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(KvprobeError, match="no block device 'nvme77n1'"):
        knobs.of_device("nvme77n1")


# ---------------------------------------------------------------- recorded kernels


@pytest.mark.parametrize("tree", MULTIPATH, indirect=True)
def test_multipath(tree: Tree) -> None:
    subjects = knobs.of_device("nvme0n1", tree.roots)
    assert subjects.disks == ("nvme0c0n1", "nvme0c1n1", "nvme0n1")
    assert (subjects.controllers, subjects.subsystems) == (("nvme0", "nvme1"), ("nvme-subsys0",))
    found = by_name(knobs.read_all(subjects))
    ahead = found["read_ahead_kb", "nvme0n1"]
    assert (ahead.value, ahead.reach) == ("128", Reach.NEW_OPENS)
    assert "this one counts" in ahead.note
    assert found["read_ahead_kb", "nvme0c0n1"].reach is Reach.READ_ONLY
    assert "never used" in found["read_ahead_kb", "nvme0c0n1"].note
    row = knobs.as_row(found["read_ahead_kb", "nvme0c0n1"])
    assert row["reachability"] == "read_only", "as on this disk, not as in the catalogue"
    for name in ("scheduler", "nr_requests"):
        if (name, "nvme0n1") in found:  # newer kernels have no such file there
            assert found[name, "nvme0n1"].reach is Reach.READ_ONLY
    depth = found["nr_requests", "nvme0c1n1"]
    assert depth.reach is Reach.LIVE
    source = tree.sysfs / "block/nvme0c1n1/queue/nr_requests"
    assert (depth.value, depth.source) == (source.read_text().strip(), str(source))
    assert found["scheduler", "nvme0c0n1"].value == "none"
    assert "mq-deadline" in found["scheduler", "nvme0c0n1"].allowed
    queue_size = found["queue_size", "nvme0"]
    assert (queue_size.value, queue_size.reach) == ("32", Reach.RECONNECT)
    assert (tree.sysfs / "class/nvme/nvme0/sqsize").read_text() == "31\n"
    assert found["io_queues", "nvme1"].value == "2"
    policy = found["iopolicy", "nvme-subsys0"]
    assert (policy.value, policy.note) == ("numa", "2 controllers")


@pytest.mark.parametrize("tree", MULTIPATH, indirect=True)
def test_what_cannot_be_read_is_unknown(tree: Tree) -> None:
    found = by_name(knobs.read_all(knobs.of_device("nvme0n1", tree.roots)))
    file = tree.sysfs / "block/nvme0n1/queue/wbt_lat_usec"
    if file.exists():  # reading it is an error on a multipath disk
        assert found["wbt_lat_usec", "nvme0n1"].value is None
    else:
        assert ("wbt_lat_usec", "nvme0n1") not in found


@pytest.mark.parametrize("tree", names(), indirect=True)
def test_the_host_once_and_every_nvme_disk(tree: Tree) -> None:
    found = knobs.read_all(knobs.of_host(tree.roots))
    assert len(by_name(found)) == len(found), "each setting has one row"
    host = {each.knob.name for each in found if each.subject == "host"}
    assert {"nvme_core.iopolicy", "net.ipv4.tcp_rmem"} <= host
    disks = {each.subject for each in found if each.knob.name == "max_sectors_kb"}
    assert {name for name in os.listdir(tree.sysfs / "block") if "nvme" in name} <= disks
    assert not any("loop" in disk or "ram" in disk for disk in disks), "not in use"


@pytest.mark.parametrize("tree", LOCAL, indirect=True)
def test_a_local_device_gets_its_queues_from_the_module(tree: Tree) -> None:
    found = by_name(knobs.read_all(knobs.of_device("nvme0n1", tree.roots)))
    assert found["queue_size", "nvme0"].reach is Reach.MODULE_RELOAD
    assert found["nvme.io_queue_depth", "host"].value == "1024"
    assert found["max_hw_sectors_kb", "nvme0n1"].value == "128", "the device has MDTS 5"


@pytest.mark.parametrize("tree", SEPARATE, indirect=True)
def test_a_policy_without_native_multipath(tree: Tree) -> None:
    found = by_name(knobs.read_all(knobs.of_host(tree.roots)))
    assert found["nvme_core.multipath", "host"].value == "N"
    policies = [each for (name, _), each in found.items() if name == "iopolicy"]
    assert all("does nothing" in each.note for each in policies)
    assert found["scheduler", "nvme1n1"].reach is Reach.LIVE


# ---------------------------------------------------------------- made-up machines


def made_up(root: Path) -> Tree:
    """md0 of two disks with an XFS, an NFS mount, control groups, GPUDirect Storage."""
    tree = Tree(root)
    for index, name in enumerate(("sda", "sdb", "md0")):
        tree.write(f"sys/block/{name}/dev", f"{9 if name == 'md0' else 8}:{index * 16}\n")
        tree.write(f"sys/block/{name}/queue/read_ahead_kb", f"{131 * (index + 1)}\n")
    tree.write("sys/block/loop7/dev", "7:7\n")
    tree.write("sys/block/loop7/queue/read_ahead_kb", "139\n")
    for name in ("sda", "sdb"):
        tree.write(f"sys/block/md0/slaves/{name}/x", "")
        tree.write(f"sys/block/{name}/holders/md0/x", "")
    tree.write("sys/block/md0/md/level", "raid5\n")
    tree.write("sys/block/md0/md/chunk_size", "65536\n")
    tree.write("sys/block/md0/md/stripe_cache_size", "257\n")
    tree.write("sys/class/bdi/0:50/read_ahead_kb", "137\n")
    tree.write("sys/devices/virtual/workqueue/nvme_tcp_wq/cpumask", "f\n")
    groups = root / "groups"
    tree.write(
        "groups/a.slice/io.max", "9:32 rbps=1009 wbps=max\n8:0 rbps=7 wbps=max\n7:7 rbps=1\n"
    )
    tree.write("groups/a.slice/io.weight", "default 100\n9:32 211\n")
    tree.write("groups/a.slice/b.scope/io.weight", "default 103\n")
    tree.write(
        "etc/cufile.json",
        """{
        // a comment, and "a // string"
        "logging": {"dir": "http://not/a/comment"},
        "properties": {"max_direct_io_size_kb": 8192, "allow_compat_mode": true,},
        "execution": {"max_io_threads": 5 /* five */, "max_io_queue_depth": [1]}
    }""",
    )
    tree.write(
        "proc/self/mountinfo",
        "20 1 9:32 / /kv rw - xfs /dev/md0 rw,sunit=128,swidth=384\n"
        "21 1 9:32 /x /bound rw - xfs /dev/md0 rw,sunit=128,swidth=384\n"
        "22 1 0:50 / /nfs rw - nfs4 server:/export rw,rsize=262144,wsize=131072,nconnect=7\n"
        f"23 1 0:60 / {groups} rw - cgroup2 cgroup2 rw\n"
        "24 1 7:7 / /snap rw - squashfs /dev/loop7 ro\n",
    )
    return tree


def test_volumes_mounts_groups_and_gpudirect(tmp_path: Path) -> None:
    tree = made_up(tmp_path)
    subjects = knobs.of_host(tree.roots)
    assert subjects.disks == ("md0", "sda", "sdb")
    found = by_name(knobs.read_all(subjects))
    values = {f"{name} {subject}": each.value for (name, subject), each in found.items()}
    assert values == {
        "read_ahead_kb md0": "393",
        "read_ahead_kb sda": "131",
        "read_ahead_kb sdb": "262",
        "chunk_size md0": "65536",
        "stripe_cache_size md0": "257",
        "sunit /kv": "128",
        "swidth /kv": "384",
        "allocsize /kv": "not set",
        "rsize /nfs": "262144",
        "wsize /nfs": "131072",
        "nconnect /nfs": "7",
        "bdi_read_ahead_kb /nfs": "137",
        "io.max /a.slice": "sda rbps=7 wbps=max",
        "io.weight /a.slice": "md0 211",
        "io.weight /a.slice/b.scope": "103",
        "nvme_tcp_wq.cpumask host": "f",
        "properties.max_direct_io_size_kb host": "8192",
        "execution.max_io_threads host": "5",
    }
    limits = [e.value for e in knobs.read_all(subjects) if e.knob.name == "io.max"]
    assert limits == ["md0 rbps=1009 wbps=max", "sda rbps=7 wbps=max"]
    assert "this one counts" in found["read_ahead_kb", "md0"].note
    assert found["read_ahead_kb", "sda"].note == "not used: set it on md0 above"
    assert found["chunk_size", "md0"].reach is Reach.DESTRUCTIVE
    assert found["execution.max_io_threads", "host"].reach is Reach.ENGINE_RESTART
    assert found["rsize", "/nfs"].reach is Reach.REMOUNT


def test_one_disk_only(tmp_path: Path) -> None:
    tree = made_up(tmp_path)
    found = by_name(knobs.read_all(knobs.of_device("/dev/sda", tree.roots)))
    assert {subject for _, subject in found} == {"sda", "/a.slice", "/a.slice/b.scope"}
    assert ("sunit", "/kv") in by_name(knobs.read_all(knobs.of_device("md0", tree.roots)))


@pytest.mark.parametrize("tree", MULTIPATH[:1], indirect=True)
def test_a_limit_on_a_path_does_nothing(tree: Tree) -> None:
    numbers = {name: number for number, name in knobs.of_host(tree.roots).numbers.items()}
    tree.write(
        "groups/g/io.max",
        "".join(
            f"{numbers[name] >> 20}:{numbers[name] & 0xFFFFF} rbps={rate}\n"
            for name, rate in (("nvme0n1", 1009), ("nvme0c1n1", 1013))
        ),
    )
    with open(tree.mountinfo, "a") as file:
        file.write(f"99 1 0:99 / {tree.root}/groups rw - cgroup2 cgroup2 rw\n")
    found = knobs.read_all(knobs.of_device("nvme0n1", tree.roots), Family.QUEUE_DEPTH)
    limits = {each.value: each for each in found if each.knob.name == "io.max"}
    assert limits["nvme0n1 rbps=1009"].reach is Reach.LIVE
    assert limits["nvme0c1n1 rbps=1013"].reach is Reach.READ_ONLY
    assert "does nothing" in limits["nvme0c1n1 rbps=1013"].note


# ---------------------------------------------------------------- the catalogue


def test_every_entry_says_what_a_person_must_know() -> None:
    for kind in knobs.kinds().values():
        assert kind.knobs and kind.summary
        assert len({knob.name for knob in kind.knobs}) == len(kind.knobs)
        for knob in kind.knobs:
            assert knob.meaning and not knob.meaning.endswith("."), knob.name
            if knob.reach is not Reach.READ_ONLY:
                assert knob.undo, knob.name


def test_rows_have_the_columns_of_the_table(tmp_path: Path) -> None:
    rows = [knobs.as_row(each) for each in knobs.read_all(knobs.of_host(made_up(tmp_path).roots))]
    assert all(list(row) == [column.name for column in KNOBS.columns] for row in rows)
    assert json.loads(json.dumps(rows)) == rows
    assert {row["family"] for row in rows} == {*Family}


def test_nothing_here_writes() -> None:
    writing = {"write_text", "write_bytes", "write", "open", "unlink", "rename", "replace_file"}
    for path in PACKAGE.glob("*.py"):
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        }
        if path.name == "nvme_identify.py":  # a node is opened to ask; the command only reads
            assert "os.open(node, os.O_RDONLY | os.O_CLOEXEC)" in path.read_text()
            called.discard("open")
        assert not called & writing, path.name


def test_no_machine_at_all(tmp_path: Path) -> None:
    roots = Roots(*(tmp_path / name for name in ("sys", "proc", "etc", "dev")))
    assert knobs.read_all(knobs.of_host(roots)) == []


GARBAGE = st.one_of(st.text(max_size=40), st.sampled_from(["", "[", "\0", "9" * 5000, "[" * 3000]))


@settings(max_examples=20)
@given(st.data())
def test_garbage_in_every_file_is_no_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("tree")
    tree = (
        plant(data.draw(st.sampled_from(names())), root)
        if data.draw(st.booleans())
        else (made_up(root))
    )
    files = sorted(path for path in tree.root.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=60)):
        path.write_bytes(data.draw(GARBAGE).encode("utf-8", "replace"))
    knobs.read_all(knobs.of_host(tree.roots))
    for disk in os.listdir(tree.sysfs / "block"):
        knobs.read_all(knobs.of_device(disk, tree.roots))
