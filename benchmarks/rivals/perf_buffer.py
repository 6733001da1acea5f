"""bcc's biosnoop, as near as this kernel allows: two hashes, a perf buffer, a call for each event.

Debian's own does not start on every kernel (no headers, renamed functions). This one has its maps,
its record and its loop, on raw tracepoints, compiled with the include tree that kvprobe writes.
Its callback decodes the record and counts; the original also prints, which costs it more.

Run as ``python -m benchmarks.rivals.perf_buffer DEVICE``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rivals import Running, Tracer
from benchmarks.rivals.agent import Agent, serve
from kvprobe.bpf import bcc_child, stubs
from kvprobe.bpf.bcc_loader import DEBIAN_PACKAGES
from kvprobe.bpf.btf import Btf
from kvprobe.errors import KvprobeError

_FIELDS = (
    ("request", "q"),
    ("request", "__data_len"),
    ("request", "__sector"),
    ("request", "cmd_flags"),
    ("request_queue", "disk"),
    ("gendisk", "disk_name"),
    ("gendisk", "part0"),
    ("block_device", "bd_dev"),
)
_PAGES = 64
"""Of the perf buffer of each processor, as in biosnoop."""
_POLL_MS = 100

_TEXT = r"""
#define FIELD(type, at, offset) ({ type v = 0; \
	bpf_probe_read_kernel(&v, sizeof(v), (void *)((u64)(at) + (offset))); v; })

struct start_req_t { u64 ts; u64 data_len; };
struct val_t { u64 ts; u32 pid; char name[16]; };
struct data_t {
	u32 pid; u64 rwflag; u64 delta; u64 qdelta; u64 sector; u64 len; u64 ts;
	char disk_name[32]; char name[16];
};

BPF_HASH(start, u64, struct start_req_t);
BPF_HASH(infobyreq, u64, struct val_t);
BPF_PERF_OUTPUT(events);

static inline u64 disk_of(u64 req)
{
	return FIELD(u64, FIELD(u64, req, O_request_q), O_request_queue_disk);
}

static inline int is_other(u64 req)
{
	u64 part = FIELD(u64, disk_of(req), O_gendisk_part0);

	return FIELD(u32, part, O_block_device_bd_dev) != DEVICE;
}

RAW_TRACEPOINT_PROBE(block_io_start)
{
	u64 req = ctx->args[0];
	struct val_t val = {};

	if (is_other(req))
		return 0;
	if (bpf_get_current_comm(&val.name, sizeof(val.name)) == 0) {
		val.pid = bpf_get_current_pid_tgid() >> 32;
		infobyreq.update(&req, &val);
	}
	return 0;
}

RAW_TRACEPOINT_PROBE(block_rq_issue)
{
	u64 req = ctx->args[0];
	struct start_req_t start_req = {};

	if (is_other(req))
		return 0;
	start_req.ts = bpf_ktime_get_ns();
	start_req.data_len = FIELD(u32, req, O_request___data_len);
	start.update(&req, &start_req);
	return 0;
}

RAW_TRACEPOINT_PROBE(block_io_done)
{
	u64 req = ctx->args[0];
	struct start_req_t *startp = start.lookup(&req);
	struct val_t *valp;
	struct data_t data = {};
	u64 ts;

	if (startp == 0)
		return 0;
	ts = bpf_ktime_get_ns();
	data.delta = ts - startp->ts;
	data.ts = ts / 1000;
	data.len = startp->data_len;
	valp = infobyreq.lookup(&req);
	if (valp == 0) {
		data.name[0] = '?';
	} else {
		data.pid = valp->pid;
		data.sector = FIELD(u64, req, O_request___sector);
		bpf_probe_read_kernel(&data.name, sizeof(data.name), valp->name);
		bpf_probe_read_kernel(&data.disk_name, sizeof(data.disk_name),
			(void *)(disk_of(req) + O_gendisk_disk_name));
	}
	data.rwflag = (FIELD(u32, req, O_request_cmd_flags) & 0xff) == 1;
	events.perf_submit(ctx, &data, sizeof(data));
	start.delete(&req);
	infobyreq.delete(&req);
	return 0;
}
"""


def tracers() -> tuple[Tracer, ...]:
    """The one."""
    return (Tracer("perf_buffer", "bcc: biosnoop's maps and loop, callback that counts", _start),)


def _start(device: int, name: str) -> Running:
    return Agent(__name__, (device,))


def offset_macros() -> list[str]:
    """Compiler options with the offsets of this kernel.

    Raises:
        KvprobeError: it lacks a field.
    """
    kernel = Btf.load()
    macros = []
    for structure, name in _FIELDS:
        field = kernel.field(structure, name)
        if field is None:
            raise KvprobeError(f"this kernel has no {structure}.{name}")
        macros.append(f"-DO_{structure}_{name}={field.offset}")
    return macros


def compile_text(text: str, cflags: list[str]) -> Any:
    """Compile with Debian's bcc and kvprobe's include tree; returns bcc's ``BPF``."""
    bcc = bcc_child.import_bcc(DEBIAN_PACKAGES)
    with tempfile.TemporaryDirectory(prefix="kvprobe-bench-") as folder:
        stubs.write(Path(folder))
        os.environ["BCC_KERNEL_SOURCE"] = folder
        here = os.getcwd()
        try:
            return bcc.BPF(text=text, cflags=cflags)
        finally:
            os.chdir(here)  # bcc goes to the include tree and stays there if it fails


class _Counter:
    """biosnoop's loop."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self._events = program["events"]
        self.rows = self.lost = self.sum_ns = 0
        self._events.open_perf_buffer(self._take, page_cnt=_PAGES, lost_cb=self._lose)

    def _take(self, cpu: int, data: Any, size: int) -> None:
        event = self._events.event(data)
        self.rows += 1
        self.sum_ns += event.delta

    def _lose(self, count: int) -> None:
        self.lost += count

    def work(self) -> float:
        self._program.perf_buffer_poll(timeout=_POLL_MS)
        return 0.0

    def finish(self) -> dict[str, Any]:
        before = -1
        while before != self.rows:
            before = self.rows
            self._program.perf_buffer_poll(timeout=_POLL_MS)
        return {"rows": self.rows, "lost": self.lost, "more": {}}


def main() -> None:
    """The child."""
    counter = _Counter(compile_text(_TEXT, [*offset_macros(), f"-DDEVICE={sys.argv[1]}"]))
    serve(counter.work, counter.finish)


if __name__ == "__main__":
    main()
