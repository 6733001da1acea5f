"""What doctor is told about the kernel: refusals of every kind, and this machine."""

import errno
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.bpf import attach, btf, features, machine, tracefs, trial
from kvprobe.bpf.features import Feature, State
from kvprobe.errors import KvprobeError


def survey() -> dict[str, Feature]:
    return {feature.name: feature for feature in features.survey()}


def refuse(number: int) -> Callable[..., int]:
    def refusing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return refusing


@pytest.fixture
def privileged(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend to be root with all rights, where nothing fails unless a test says so."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(trial, "capabilities", lambda: frozenset({"SYS_ADMIN", "BPF", "PERFMON"}))
    for name in ("program", "ring_buffer", "statistics"):
        monkeypatch.setattr(trial, name, lambda *_: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(trial, "lockdown", lambda: None)
    return monkeypatch


@pytest.mark.root
def test_this_machine_and_nothing_left_open() -> None:
    tracefs.root()  # keeps its one descriptor
    before = len(os.listdir("/proc/self/fd"))
    found = survey()
    assert len(os.listdir("/proc/self/fd")) == before
    assert [f.name for f in found.values() if f.stops_capture] == []
    assert all(f.state is State.OK or (f.why and f.effect) for f in found.values())


def test_no_rights_is_said_once_and_the_rest_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1009)
    monkeypatch.setattr(trial, "capabilities", frozenset)
    found = survey()
    assert [f.name for f in found.values() if f.state is State.ABSENT] == ["rights"]
    assert found["rights"].stops_capture
    assert "1009" in found["rights"].why
    assert found["ring buffer"].state is State.UNKNOWN


def test_root_in_a_container_without_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(trial, "capabilities", frozenset)
    assert "--privileged" in survey()["rights"].fix


def test_capabilities_in_place_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1009)
    monkeypatch.setattr(trial, "capabilities", lambda: frozenset({"BPF", "PERFMON"}))
    assert survey()["rights"].state is State.DEGRADED


@pytest.mark.parametrize(
    ("number", "seccomp", "why", "fix"),
    [
        (errno.ENOSYS, "0", "Function not implemented", "CONFIG_BPF_SYSCALL"),
        (errno.EPERM, "2", "a seccomp filter is active", "seccomp profile"),
        (errno.EPERM, "0", "Operation not permitted", "seccomp profile"),
    ],
)
def test_programs_refused(
    privileged: pytest.MonkeyPatch, number: int, seccomp: str, why: str, fix: str
) -> None:
    privileged.setattr(trial, "program", refuse(number))
    privileged.setattr(trial, "process_status", lambda field: seccomp)
    found = survey()["BPF programs"]
    assert found.stops_capture
    assert why in found.why and fix in found.fix


def test_lockdown(privileged: pytest.MonkeyPatch) -> None:
    privileged.setattr(
        trial,
        "program",
        lambda code=b"": refuse(errno.EINVAL)() if code else os.open(os.devnull, os.O_RDONLY),
    )
    privileged.setattr(trial, "lockdown", lambda: "confidentiality")
    found = survey()
    assert found["BPF programs"].state is State.OK
    assert found["kernel memory"].stops_capture
    assert "lockdown=integrity" in found["kernel memory"].fix


def test_ring_buffer_refused(privileged: pytest.MonkeyPatch) -> None:
    privileged.setattr(trial, "ring_buffer", refuse(errno.EINVAL))
    assert "5.8" in survey()["ring buffer"].fix
    privileged.setattr(trial, "ring_buffer", refuse(errno.EPERM))
    privileged.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    found = survey()["ring buffer"]
    assert (found.why, found.fix) == ("memory lock limit is 8192 KiB", "ulimit -l unlimited")


def test_less_is_shown(privileged: pytest.MonkeyPatch, tmp_path: Path) -> None:
    privileged.setattr(trial, "statistics", refuse(errno.EPERM))
    privileged.setattr(tracefs, "mounted", lambda: None)
    privileged.setattr(tracefs, "root", lambda: None)
    privileged.setattr(machine, "in_initial_pid_namespace", lambda: False)
    found = survey()
    for name in ("BPF statistics", "tracefs", "process ids"):
        assert found[name].state is State.DEGRADED
        assert found[name].effect and found[name].fix
        assert not found[name].stops_capture


def test_no_type_information(privileged: pytest.MonkeyPatch, tmp_path: Path) -> None:
    privileged.setattr(btf, "VMLINUX", tmp_path / "none")
    found = survey()["BTF"]
    assert found.stops_capture
    assert "CONFIG_DEBUG_INFO_BTF" in found.fix


@pytest.mark.parametrize(
    ("called", "found", "command"),
    [
        ("/opt/venv/bin/kvprobe", "/opt/venv/bin/kvprobe", "sudo /opt/venv/bin/kvprobe doctor"),
        ("/usr/local/bin/kvprobe", "/usr/local/bin/kvprobe", "sudo kvprobe doctor"),
        ("/x/kvprobe/__main__.py", None, f"sudo {sys.executable} -m kvprobe doctor"),
        ("/usr/bin/pytest", "/usr/bin/pytest", "sudo kvprobe doctor"),
    ],
)
def test_the_command_for_root(
    monkeypatch: pytest.MonkeyPatch, called: str, found: str | None, command: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: found)
    for options in ([], ["report", "a.kvcap"]):  # asked by another verb, doctor has more to say
        monkeypatch.setattr(sys, "argv", [called, *options])
        assert features._as_root() == command
    monkeypatch.setattr(sys, "argv", [called, "doctor", "--path", "/mnt/k v", "--json"])
    assert features._as_root() == f"{command} --path '/mnt/k v' --json"


@pytest.mark.root
def test_trials() -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert trial.raw_tracepoint("sys_enter") is True
    assert trial.raw_tracepoint("no_such_tracepoint") is False
    assert trial.error_of(lambda: trial.ring_buffer(4096)) is None
    bad_size = trial.error_of(lambda: trial.ring_buffer(4097))
    assert bad_size is not None and bad_size.errno == errno.EINVAL
    assert trial.error_of(lambda: trial.program(b"\xff" * 8)) is not None
    assert len(os.listdir("/proc/self/fd")) == before
    assert trial.capabilities() >= {"SYS_ADMIN"}


@pytest.mark.root
def test_a_private_tracefs_is_the_same_as_a_mounted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts_before = Path("/proc/self/mounts").read_text()
    descriptor = tracefs.detached_mount("tracefs")
    assert descriptor is not None
    try:
        assert Path("/proc/self/mounts").read_text() == mounts_before, "nobody else sees it"
        place = Path(f"/proc/self/fd/{descriptor}")
        monkeypatch.setattr(tracefs, "root", lambda: place)
        fields = tracefs.event_format("block", "block_rq_issue")
        assert fields is not None and fields["common_pid"] == (4, 4)
        assert tracefs.tracepoint_id("block", "block_rq_issue") != tracefs.tracepoint_id(
            "block", "block_rq_complete"
        )
        assert tracefs.tracepoint_id("block", "no_such_event") is None
        assert tracefs.event_format("block", "no_such_event") is None
    finally:
        os.close(descriptor)
    assert tracefs.detached_mount("no_such_filesystem") is None


@pytest.mark.root
def test_attaching_to_what_is_not_there() -> None:
    program = trial.program()
    try:
        with pytest.raises(KvprobeError, match="cannot attach to raw tracepoint no_such"):
            attach.attach_raw_tracepoint(program, "no_such_tracepoint")
        with pytest.raises(KvprobeError, match="cannot attach to tracepoint syscalls:no_such"):
            attach.attach_tracepoint(program, "syscalls", "no_such_event")
        # A raw tracepoint program is of the wrong type for an event of tracefs.
        with pytest.raises(KvprobeError, match="cannot attach to tracepoint syscalls:sys_enter"):
            attach.attach_tracepoint(program, "syscalls", "sys_enter_getppid")
    finally:
        os.close(program)
