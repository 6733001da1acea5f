"""The guest's side: runs cases one after another and leaves what happened in a folder for each.

    python -m tests.lab.agent CASE..        (in a guest; results go to $KVPROBE_LAB_RESULTS)

A folder has the recording, `NAME.kvcap.part`, and `facts.json` (what the workload and the kernel
counted, what was injected), or `error.txt`. `doctor` and `compile` are not cases: see their
functions.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvprobe.capture.record import record
from kvprobe.capture.recorder import Recorder
from kvprobe.commands._listening import AUTO, listen
from kvprobe.commands._live import open_live
from kvprobe.model import Filters
from tests.lab.case import Backing, Case, Fault, Topology, Work, load
from tests.lab.loaders import run_loaders
from tests.lab.stand import MOUNT, Stand, stand
from tests.lab.target import BLOCK, load_modules

LATE_SECONDS = 1.0
"""Recording goes on after the work, for what is written or completed late."""
WORK_SECONDS = 240
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


def run_case(case: Case, folder: Path) -> None:
    """Build, record, work, disturb, take down.

    Raises:
        Exception: whatever went wrong; nothing of it is expected.
    """
    facts: dict[str, Any] = {"case": asdict(case), "kernel": os.uname().release, "times": {}}
    clock = _Times(facts["times"])
    HUGE_PAGES.write_text("16")
    with stand(case.topology, not any(fault.loss_percent for fault in case.faults)) as built:
        for fault in (fault for fault in case.faults if fault.at_s < 0):
            built.apply(fault)
        facts["disks"] = {disk: _disk(disk) for disk in {built.disk, *built.path_disks}}
        facts["paths"] = built.path_disks
        clock("stand")
        for work in case.work:
            if work.tool == "kv":
                (MOUNT / "kv").mkdir(exist_ok=True)
                _run_json(_kv(work, "--warm", "reused", "--warm-only"))
                clock("warm")
        events = MOUNT / "events.jsonl" if any(w.tool == "kv" for w in case.work) else None
        _record(case, built, folder, facts, events, clock)
        facts["controllers"] = built.path_disks
    clock("undo")
    (folder / "facts.json").write_text(json.dumps(facts, indent=1))


class _Times:
    """Seconds that each stage took."""

    def __init__(self, into: dict[str, float]) -> None:
        self._into = into
        self._last = time.monotonic()

    def __call__(self, stage: str) -> None:
        now = time.monotonic()
        self._into[stage] = round(now - self._last, 2)
        self._last = now


def _record(
    case: Case,
    built: Stand,
    folder: Path,
    facts: dict[str, Any],
    events: Path | None,
    clock: _Times,
) -> None:
    """One capture around the case's work."""
    recorder = Recorder(Path("/run") / f"{case.name}.kvcap")  # memory: the share is slow
    signals = [] if events is None else [f"events:{events}"]
    try:
        source, manifest = open_live(
            Filters(), "auto", listen(AUTO, signals, None, [], detect=False)
        )
        clock("attach")
        worker = _Worker(case, built, events)
        worker.start()
        final = record(source, recorder, manifest, worker.is_over)
        worker.join()
        clock("work")
    finally:
        recorder.leave()
    shutil.copytree(recorder.part, folder / recorder.part.name)  # the host packs it, faster
    clock("copy")
    if worker.failure:
        raise worker.failure
    facts.update(worker.facts)
    facts["lost"] = {name: loss.lost for name, loss in final.losses.items()}


class _Worker(threading.Thread):
    """Does the work and, at their times, the faults; every program is a process of its own."""

    def __init__(self, case: Case, built: Stand, events: Path | None) -> None:
        super().__init__(name="lab-work")
        self.facts: dict[str, Any] = {"work": [], "counted": {}, "faults": []}
        self.failure: BaseException | None = None
        self._case, self._built, self._events = case, built, events
        self._end = 0.0
        self._began = 0.0

    def is_over(self, now_ns: int) -> bool:
        """Whether recording can end."""
        return not self.is_alive() and time.monotonic() > self._end + LATE_SECONDS

    def run(self) -> None:
        try:
            before, store = self._built.counts(), self._built.store()
            faults = threading.Thread(target=self._disturb, name="lab-faults")
            self._began = time.monotonic()
            faults.start()
            for work in self._case.work:
                self.facts["work"].append(_do(work, self._built, self._events))
            faults.join()
            time.sleep(0.3)  # what the file system writes on its own
            self.facts["counted"] = _difference(before, self._built.counts())
            completed = self._built.store()["requests"] - store["requests"]
            self.facts["store"] = {"device": store["device"], "requests": completed}
        except BaseException as error:
            self.failure = error
        self._end = time.monotonic()

    def _disturb(self) -> None:
        timed: list[Fault] = sorted(
            (fault for fault in self._case.faults if fault.at_s >= 0), key=lambda f: f.at_s
        )
        for fault in timed:
            time.sleep(max(0.0, self._began + fault.at_s - time.monotonic()))
            try:
                begun_ns = time.monotonic_ns()
                self._built.apply(fault)
                self.facts["faults"].append(
                    {**asdict(fault), "begun_ns": begun_ns, "done_ns": time.monotonic_ns()}
                )
            except BaseException as error:
                self.failure = error
                return


def _do(work: Work, built: Stand, events: Path | None) -> dict[str, Any]:
    """One run; returns what the program says it did."""
    if work.tool == "kv":
        return {"tool": "kv", "said": _run_json(_kv(work, "--events", str(events)))}
    place = MOUNT / "file" if built.topology.file_system else f"/dev/{built.disk}"
    command = ["fio", "--output-format=json", f"--filename={place}", "--direct=1", "--size=256m"]
    # In huge pages, so that what a read is cut into does not depend on where its memory lies.
    command += ["--thread", "--stonewall", "--iomem=shmhuge"]
    for number, job in enumerate(work.jobs, 1):
        command += [f"--name=job{number}", *shlex.split(job)]
    return {"tool": "fio", "said": _fio(_run_json(command))}


def _kv(work: Work, *more: str) -> list[str]:
    options = [word for job in work.jobs for word in shlex.split(job)]
    command = [sys.executable, "-m", "kvprobe", "workload", "run", "--json"]
    return [*command, "--root", str(MOUNT / "kv"), *options, *more]


def _run_json(command: list[str]) -> dict[str, Any]:
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=WORK_SECONDS,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {(ran.stderr or ran.stdout).strip()[-800:]}")
    document: dict[str, Any] = json.loads(ran.stdout[ran.stdout.index("{") :])
    return document


def _fio(document: dict[str, Any]) -> dict[str, Any]:
    """The counts and times of a fio report, all jobs together."""
    told: dict[str, Any] = {}
    for kind in ("read", "write"):
        jobs = [job[kind] for job in document["jobs"]]
        told[kind] = {
            "requests": sum(job["total_ios"] for job in jobs),
            "bytes": sum(job["io_bytes"] for job in jobs),
            "mean_ns": jobs[0]["clat_ns"]["mean"],
        }
    told["flush"] = {"requests": sum(job["sync"]["total_ios"] for job in document["jobs"])}
    told["errors"] = sum(job["error"] for job in document["jobs"])
    return told


def _difference(
    before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]
) -> dict[str, dict[str, int]]:
    """What was counted in between; a disk that came meanwhile began at zero."""
    return {
        disk: {kind: value - before.get(disk, {}).get(kind, 0) for kind, value in counts.items()}
        for disk, counts in after.items()
    }


def _disk(disk: str) -> dict[str, str]:
    """The limits by which the kernel cuts requests."""
    names = ("max_sectors_kb", "max_hw_sectors_kb", "max_segments", "nr_requests", "scheduler")
    folder = BLOCK / disk / "queue"
    return {name: (folder / name).read_text().strip() for name in names if (folder / name).exists()}


def run_doctor(folder: Path) -> None:
    """What `kvprobe doctor` says of a file system over two nvme-tcp paths, nvme-rdma at hand."""
    load_modules("rdma")
    command = [sys.executable, "-m", "kvprobe", "doctor", "--path", str(MOUNT)]
    store = Backing(memory_backed=True)
    with stand(Topology(transport="tcp", paths=2, file_system="ext4", backing=store)):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"doctor: status {ran.returncode}: {ran.stderr.strip()[-800:]}")
    (folder / "doctor.txt").write_text(ran.stdout)


def run_compile(folder: Path) -> None:
    """Compile and attach every probe here, from BTF alone."""
    from kvprobe.bpf.session import open_session

    for transport in ("tcp", "rdma"):
        load_modules(transport)
    headers = Path("/lib/modules") / os.uname().release / "build"
    with open_session(None, Filters(), loader="bcc") as session:
        facts = {
            "headers": headers.exists(),
            "loader": session.loader,
            "attached": session.attached,
            "missing": [asdict(missing) for missing in session.missing],
        }
    (folder / "compile.json").write_text(json.dumps(facts, indent=1))


def main() -> int:
    results = Path(os.environ["KVPROBE_LAB_RESULTS"])
    status = 0
    for name in sys.argv[1:]:
        folder = results / name
        folder.mkdir()
        began = time.monotonic()
        try:
            if name == "doctor":
                run_doctor(folder)
            elif name == "compile":
                run_compile(folder)
            elif name == "loaders":
                run_loaders(folder)
            else:
                run_case(load(name), folder)
        except Exception as error:
            status = 1
            log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
            (folder / "error.txt").write_text(f"{error}\n\n{traceback.format_exc()}\n{log[-4000:]}")
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
