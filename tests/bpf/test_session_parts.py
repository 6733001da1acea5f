"""The parts around a session: refusals, fallback, roots, processes, cost, governor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprobe.bpf import catalog, core_loader, machine, planning, processes, roots, trial
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.compose import compose
from kvprobe.bpf.governor import INTERVAL_NS, Governor
from kvprobe.bpf.session import open_session
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import Filters

from .conftest import LoopFs, rows_of, run_python
from .test_block_rows import DIRECT_READS

root_only = pytest.mark.root


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"probes": ["nonsense"]}, "no probe 'nonsense'"),
        ({"probes": []}, "no probe was chosen"),
        ({"loader": "nonsense"}, "no loader 'nonsense'"),
        ({"ring_bytes": 5000}, "power of two"),
        ({"filters": Filters(keep_one_in=0)}, "keep_one_in"),
        ({"filters": Filters(root="/nowhere/at/all")}, "no directory at /nowhere/at/all"),
        ({"filters": Filters(root="relative")}, "not an absolute path"),
        ({"filters": Filters(tgids=(os.getpid(), 2**22 + 1))}, "no process 4194305"),
    ],
)
def test_bad_requests_are_one_line_with_a_hint(arguments: dict[str, object], message: str) -> None:
    request = {"probes": ["block"], "filters": Filters(), **arguments}
    with pytest.raises(KvprobeError, match=message) as caught:
        open_session(**request)  # type: ignore[arg-type]
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_without_rights_the_answer_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "capabilities", frozenset)
    with pytest.raises(KvprobeError, match="no right to load BPF") as caught:
        open_session(["block"], Filters())
    assert caught.value.exit_code is ExitCode.UNSUPPORTED


@root_only
def test_auto_falls_back_to_bcc_and_keeps_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise KvprobeError("the kernel is too old for this test", "", ExitCode.UNSUPPORTED)

    monkeypatch.setattr(core_loader, "load", refuse)
    with open_session(["block"], Filters()) as session:
        assert session.loader == "bcc"
        assert session.loader_why == "the kernel is too old for this test"
        assert "block_rq_complete" in session.attached["block"]
    with pytest.raises(KvprobeError, match="too old"):
        open_session(["block"], Filters(), loader="core")


@root_only
def test_closing_twice_is_fine_and_leaves_no_descriptor_open(loop_fs: LoopFs) -> None:
    open_session(["lookups"], loop_fs.filters).close()  # leaves its view of tracefs open
    before = os.listdir("/proc/self/fd")
    session = open_session(None, loop_fs.filters)
    path = loop_fs.file()
    run_python(DIRECT_READS, path, 7, 4096, 4096)
    session.detach()
    run_python(DIRECT_READS, path, 11, 4096, 4096)
    assert len(session.poll()["ops"]) == 7
    session.close()
    session.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert session.losses()["ops"].rows == 7


@root_only
def test_the_root_of_all_is_no_filter(loop_fs: LoopFs) -> None:
    path = loop_fs.file()
    with open_session(["ops"], Filters(root="/")) as session:
        run_python(DIRECT_READS, path, 13, 4096, 4096)
        rows = session.poll()["ops"]
    assert len(rows_of(rows, path)) == 13


@root_only
def test_an_event_that_this_kernel_lacks_is_told_with_its_effect() -> None:
    probe = catalog.choose(["block"])[0]
    source = compose([probe], bcc=False)
    kernel = Btf.load()
    assert machine.examine(source, [probe], kernel).missing == ()
    renamed = compose([probe], bcc=False)
    for hook in renamed.hooks:
        if hook.event == "block_rq_issue":
            object.__setattr__(hook, "event", "block_rq_from_the_future")
    (missing,) = machine.examine(renamed, [probe], kernel).missing
    assert missing.what == "tracepoint block_rq_from_the_future"


def test_a_root_knows_its_names_its_mounts_and_the_way_to_it(tmp_path: Path) -> None:
    real = tmp_path / "real" / "kv"
    real.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(real)
    found = roots.read_root(str(link))
    assert (found.inode, found.device) == (
        real.stat().st_ino,
        roots.kernel_device(real.stat().st_dev),
    )
    assert found.prefixes == (f"{link}/", f"{real}/")
    assert not found.has_mounts
    above = [inode for _, inode, what in found.entries if what == roots.ABOVE_ROOT]
    assert real.parent.stat().st_ino in above
    assert Path("/").stat().st_ino in above
    assert found.contains(f"{real}/x")
    assert not found.contains(f"{real}2/x")


def test_descendants_are_found_at_any_depth() -> None:
    code = "import subprocess, sys; subprocess.run(['sleep', '30'])"
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
    try:
        deadline = time.monotonic() + 10
        while not processes.descendants([child.pid]) and time.monotonic() < deadline:
            time.sleep(0.02)
        (grandchild,) = processes.descendants([child.pid])
        assert {child.pid, grandchild} <= processes.descendants([os.getpid()])
    finally:
        subprocess.run(["kill", *map(str, processes.descendants([child.pid]))], check=False)
        child.wait(timeout=10)


@root_only
def test_cost_counts_the_runs_of_a_measured_window(loop_fs: LoopFs) -> None:
    path = loop_fs.file()
    with open_session(["block"], loop_fs.filters) as session:
        session._meter.start(time.monotonic_ns())
        run_python(DIRECT_READS, path, 1009, 4096, 4096)
        session._meter.stop(time.monotonic_ns())
        costs = {cost.name: cost for cost in session.cost()}
        measured_ns = session.measured_ns
    done = costs["block_done"]
    assert done.runs >= 1009
    assert 0 < done.run_ns < measured_ns
    assert costs["block_merged"].run_ns == 0


def test_the_governor_thins_when_over_budget_and_recovers() -> None:
    applied: list[int] = []
    governor = Governor(applied.append, floor=1, budget_share=0.01)
    now = cpu = requests = 0

    def second(cpu_share: float, lost: int = 0, rate: int = 50_000) -> None:
        nonlocal now, cpu, requests
        now, cpu, requests = now + INTERVAL_NS, cpu + int(cpu_share * INTERVAL_NS), requests + rate
        assert governor.is_due(now)
        governor.update(now, cpu, requests, lost)

    second(0.5)  # the first call only sets the base
    assert applied == []
    second(0.5, rate=500)  # few requests: thinning their rows would save nothing
    assert applied == []
    second(0.02)
    second(0.02)
    assert applied == [2, 4]
    second(0.02, rate=300_000)  # three times the requests, three times the budget
    assert applied == [2, 4]
    second(0.001, lost=5)
    assert applied == [2, 4, 8]
    for _ in range(4):
        second(0.001, lost=5)
    assert applied == [2, 4, 8, 4, 2]
    for _ in range(4):
        second(0.5, lost=5, rate=500)
    assert applied == [2, 4, 8, 4, 2, 1]
    assert [change.keep_one_in for change in governor.changes] == applied
    assert "rows lost" in governor.changes[2].why


def test_the_governor_never_keeps_more_than_was_asked_for() -> None:
    applied: list[int] = []
    governor = Governor(applied.append, floor=16)
    for tick in range(1, 8):
        governor.update(tick * INTERVAL_NS, 0, tick, 0)
    assert applied == []
    assert governor.keep_one_in == 16


@root_only
def test_the_governor_thins_a_real_session_that_loses_rows(loop_fs: LoopFs) -> None:
    path = loop_fs.file()
    with open_session(["block"], loop_fs.filters, ring_bytes=4096, budget_share=0.5) as session:
        session.poll()
        run_python(DIRECT_READS, path, 1009, 4096, 4096)
        time.sleep(INTERVAL_NS / 1e9)
        session.poll()
        (change,) = session.thinnings
        assert change.keep_one_in == 2
        lost = session.losses()["block"].lost
        run_python(DIRECT_READS, path, 31, 4096, 4096)
        session.poll()
        loss = session.losses()["block"]
    assert lost > 900
    assert loss.lost - lost <= 1  # a completion that was not shown to BPF
    assert 5 < loss.thinned < 26


def test_loaders_are_named_in_the_order_in_which_auto_tries_them() -> None:
    assert planning.LOADERS == ("auto", "core", "bcc")
