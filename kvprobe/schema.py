"""Every column of every table, once: name, type, unit, meaning.

The kernel side, the capture file and the correlator are all made from this list: ``c_struct``
writes the C record that a probe fills, ``numpy_dtype`` decodes it, ``kvprobe.capture`` stores it.
Tables whose rows come from the kernel have a fixed record; their unsigned columns carry the value
``null`` where the kernel did not know. Other tables are made in Python and use ``-1`` and None.
"""

from enum import IntEnum

import numpy as np

from kvprobe.columns import Column as Column
from kvprobe.columns import Table as Table
from kvprobe.gpu_table import GPU as GPU
from kvprobe.gpu_table import ClockEvent as ClockEvent

UNKNOWN = -1
"""An unknown integer in an analysis frame."""

U64_MAX = 2**64 - 1
U32_MAX = 2**32 - 1
U16_MAX = 2**16 - 1
PATH_BYTES = 400
"""Longest path in a ``lookups`` row, terminator included; longer ones are cut and marked."""


class OpKind(IntEnum):
    """How an engine asked for a read or a write; writes are 64 and above."""

    READ = 1
    PREAD64 = 2
    READV = 3
    PREADV = 4
    PREADV2 = 5
    URING_READ = 16
    LIBAIO_READ = 32
    CUFILE_READ = 48
    CUFILE_READ_ASYNC = 49
    CUFILE_READ_BATCH = 50
    CUFILE_READ_DONE = 51
    WRITE = 65
    PWRITE64 = 66
    WRITEV = 67
    PWRITEV = 68
    PWRITEV2 = 69
    URING_WRITE = 80
    LIBAIO_WRITE = 96
    CUFILE_WRITE = 112
    CUFILE_WRITE_ASYNC = 113
    CUFILE_WRITE_BATCH = 114
    CUFILE_WRITE_DONE = 115

    @property
    def is_write(self) -> bool:
        """Whether bytes go to storage."""
        return self >= OpKind.WRITE


CUFILE_CALLS = (
    OpKind.CUFILE_READ,
    OpKind.CUFILE_READ_DONE,
    OpKind.CUFILE_WRITE,
    OpKind.CUFILE_WRITE_DONE,
)
"""Transfers of libcufile from their beginning to their end; DONE are those of batches."""
CUFILE_HANDED_OVER = (
    OpKind.CUFILE_READ_ASYNC,
    OpKind.CUFILE_READ_BATCH,
    OpKind.CUFILE_WRITE_ASYNC,
    OpKind.CUFILE_WRITE_BATCH,
)
"""Their submission only: it transfers nothing. Of a batch a DONE row may follow."""


class LookupKind(IntEnum):
    """What a ``lookups`` row saw. A rename is two rows of one thread with equal times."""

    ACCESS = 1
    STAT = 2
    OPEN = 3
    RENAME_FROM = 4
    RENAME_TO = 5
    ALREADY_OPEN = 6


class BlockMethod(IntEnum):
    """How the owner of a block request was found (the ``method`` column)."""

    NONE = 0
    DIRECT = 1
    """File of the direct I/O's kiocb; ``offset`` is where that operation starts in the file."""
    PAGE = 2
    """File of the first page; ``offset`` is that page's place in the file."""
    RAW_DEVICE = 3


class NvmeTransport(IntEnum):
    """What carries an NVMe command (the ``transport`` column)."""

    UNKNOWN = 0
    PCI = 1
    TCP = 2
    RDMA = 3
    LOOP = 4


class FabricKind(IntEnum):
    """What a ``fabric`` row saw. ``value`` is what the comment says, 0 otherwise."""

    RETRANSMIT = 1
    """The kernel sent a segment of a queue's connection again."""
    CONGESTION_STATE = 2
    """New state of a queue's connection: 0 open, 1 disorder, 2 CWR, 3 recovery, 4 loss."""
    SEND_SPACE = 3
    """A queue that waited for room in its socket's send buffer got it."""
    CONNECTION_STATE = 4
    """New TCP state of a queue's connection: 1 established, 7 closed .. (tcp_states.h)."""
    ERROR_RECOVERY = 5
    """The driver gave up a controller's connections."""
    RECONNECT = 6
    """The driver tries to connect a controller anew."""
    COMMAND_TIMEOUT = 7
    """A command was not answered in time."""
    FAILOVER = 8
    """A command failed for a reason of its path; its I/O goes to another one."""
    REQUEUE = 9
    """A namespace sends the I/O that waited for a usable path."""
    PATH_LOST = 10
    """A path is no longer used by its namespace."""
    PATH_LIVE = 11
    """A path can be used by its namespace."""
    RECEIVE_GAP = 12
    """A queue got a segment behind a gap: one from the target was lost, or was overtaken."""


_C = Column

BLOCK = Table(
    "block",
    "one completed block request",
    (
        _C("done_ns", "u8", "ns", "completion"),
        _C("queued_ns", "u8", "ns", "request accounted by the block layer", null=0),
        _C("issued_ns", "u8", "ns", "request handed to the driver", null=0),
        _C("inode", "u8", "", "inode of the owning file", null=0),
        _C("sector", "u8", "512 B", "first sector; a flush has none", null=U64_MAX),
        _C("request", "u8", "", "identity of the kernel's request while it lives", null=0),
        _C("offset", "u8", "B", "file offset, see BlockMethod", null=U64_MAX),
        _C("bytes", "u4", "B", "bytes completed"),
        _C("device", "u4", "dev_t", "whole disk, major << 20 | minor"),
        _C("fs_device", "u4", "dev_t", "device number that stat() shows for the file", null=0),
        _C("tgid", "u4", "", "process that submitted the request", null=0),
        _C("tid", "u4", "", "thread that submitted the request", null=0),
        _C("flags", "u4", "", "request flags (cmd_flags >> 8)"),
        _C("hw_queue", "u4", "", "hardware queue number", null=U32_MAX),
        _C("op", "u1", "", "request operation: 0 read, 1 write, 2 flush, 3 discard"),
        _C("method", "u1", "", "how the owner was found, see BlockMethod"),
        _C("status", "u1", "", "block status, 0 is success"),
        _C("held", "u1", "", "1: held back by blk-throttle before it was queued"),
    ),
    kernel=True,
)

OPS = Table(
    "ops",
    "one read or write that an engine asked for",
    (
        _C("start_ns", "u8", "ns", "call entered or submitted"),
        _C("end_ns", "u8", "ns", "call returned or completed"),
        _C("inode", "u8", "", "inode of the file", null=0),
        _C("offset", "u8", "B", "file offset of the first byte", null=U64_MAX),
        _C("requested", "u4", "B", "bytes asked for"),
        _C("result", "i4", "B", "bytes transferred, or a negative errno"),
        _C("fs_device", "u4", "dev_t", "device number that stat() shows for the file", null=0),
        _C("tgid", "u4", "", "process"),
        _C("tid", "u4", "", "thread that asked"),
        _C("kind", "u1", "", "see OpKind"),
        _C("direct", "u1", "", "1: the file was open for direct I/O"),
        _C("reserved", "u2", "", "zero"),
    ),
    kernel=True,
)

LOOKUPS = Table(
    "lookups",
    "one existence test, open or rename of a file, with its answer",
    (
        _C("start_ns", "u8", "ns", "call entered"),
        _C("end_ns", "u8", "ns", "call returned"),
        _C("inode", "u8", "", "inode, where the call opened the file", null=0),
        _C("fs_device", "u4", "dev_t", "device number that stat() shows for it", null=0),
        _C("tgid", "u4", "", "process"),
        _C("tid", "u4", "", "thread"),
        _C("result", "i4", "", "0 or a descriptor, or a negative errno"),
        _C("open_flags", "u4", "", "flags of an open", null=U32_MAX),
        _C("kind", "u1", "", "see LookupKind"),
        _C("cut", "u1", "", "1: the path was longer than the column"),
        _C("reserved", "u2", "", "zero"),
        _C("path", f"S{PATH_BYTES}", "", "path as the caller gave it"),
    ),
    kernel=True,
    derived=(
        _C("kv_key", "O", "", "KV key that the engine's recogniser finds in the path"),
        _C("kv_temporary", "i8", "", "1: a name that is renamed when the file is whole"),
        _C("kv_shared", "i8", "", "1: a file that holds the chunks of many prompts"),
    ),
)

NVME = Table(
    "nvme",
    "one NVMe command; a retried request has several",
    (
        _C("done_ns", "u8", "ns", "the driver saw the command's completion"),
        _C("setup_ns", "u8", "ns", "the driver made the command"),
        _C("sent_ns", "u8", "ns", "handed to the transport for the last time", null=0),
        _C("arrived_ns", "u8", "ns", "first sign on its queue of what completed it", null=0),
        _C("request", "u8", "", "as in block: with the time, it joins a command to its request"),
        _C("bytes", "u4", "B", "bytes of the request when the command was made"),
        _C("device", "u4", "dev_t", "whole disk; under native multipath the path", null=0),
        _C("nsid", "u4", "", "namespace on its controller", null=0),
        _C("controller", "u2", "", "instance: the N of /dev/nvmeN", null=U16_MAX),
        _C("queue", "u2", "", "queue pair of the controller; 0 is the admin queue"),
        _C("command_id", "u2", "", "as sent"),
        _C("status", "u2", "", "NVMe status with its type, 0 is success"),
        _C("opcode", "u1", "", "2 read, 1 write, 0 flush .."),
        _C("retries", "u1", "", "earlier commands of the same request"),
        _C("transport", "u1", "", "see NvmeTransport"),
        _C("reserved", "u1", "", "zero"),
    ),
    kernel=True,
)

FABRIC = Table(
    "fabric",
    "one event of an NVMe path: of its connections, its controller or its namespace",
    (
        _C("time_ns", "u8", "ns", "when"),
        _C("request", "u8", "", "of a failover or a timeout, as in block", null=0),
        _C("value", "u8", "", "see FabricKind"),
        _C("device", "u4", "dev_t", "whole disk of the path, or the head", null=0),
        _C("controller", "u2", "", "instance: the N of /dev/nvmeN", null=U16_MAX),
        _C("queue", "u2", "", "queue pair of the controller", null=U16_MAX),
        _C("kind", "u1", "", "see FabricKind"),
        _C("reserved", "u1", "", "zero"),
        _C("unused", "u2", "", "zero"),
        _C("padding", "u4", "", "zero"),
    ),
    kernel=True,
)

DEPTH = Table(
    "depth",
    "time a device spent at one queue depth during one interval, from in-kernel sums",
    (
        _C("start_ns", "i8", "ns", "interval begins"),
        _C("end_ns", "i8", "ns", "interval ends"),
        _C("device", "i8", "dev_t", "whole disk"),
        _C("direction", "i8", "", "0 read, 1 write"),
        _C("depth", "i8", "", "requests between queued and done; the last bucket is open"),
        _C("time_ns", "i8", "ns", "time at this depth"),
    ),
)

HISTOGRAM = Table(
    "histogram",
    "requests of one interval by size and latency (queued to done), from in-kernel counters",
    (
        _C("start_ns", "i8", "ns", "interval begins"),
        _C("end_ns", "i8", "ns", "interval ends"),
        _C("device", "i8", "dev_t", "whole disk"),
        _C("direction", "i8", "", "0 read, 1 write"),
        _C("size_low_bytes", "i8", "B", "bucket's lower edge, inclusive"),
        _C("latency_low_ns", "i8", "ns", "bucket's lower edge, inclusive"),
        _C("latency_high_ns", "i8", "ns", "bucket's upper edge, exclusive"),
        _C("requests", "i8", "", "requests in the bucket"),
        _C("bytes", "i8", "B", "bytes of those requests"),
    ),
)

REQUESTS = Table(
    "requests",
    "one inference request as its engine tells it",
    (
        _C("id", "O", "", "request id"),
        _C("arrival_ns", "i8", "ns", "request reached the engine"),
        _C("scheduled_ns", "i8", "ns", "first scheduled"),
        _C("prefill_start_ns", "i8", "ns", "prefill of the uncached rest begins"),
        _C("prefill_end_ns", "i8", "ns", "prefill ends"),
        _C("first_token_ns", "i8", "ns", "first token"),
        _C("prompt_tokens", "i8", "tokens", "prompt length"),
        _C("device_hit_tokens", "i8", "tokens", "found in device memory"),
        _C("storage_hit_tokens", "i8", "tokens", "restored from storage"),
        _C("computed_tokens", "i8", "tokens", "prefilled"),
        _C("host_hit_tokens", "i8", "tokens", "found in the engine's host memory tier"),
        _C(
            "offload_hit_tokens",
            "i8",
            "tokens",
            "found outside device memory: host memory and storage, where the engine adds them up",
        ),
        _C("uncertainty_ns", "i8", "ns", "how far the times of this row may be off"),
    ),
)

KEYS = Table(
    "keys",
    "which KV chunk keys a request restores, where the engine tells",
    (
        _C("request_id", "O", "", "request id"),
        _C("position", "i8", "", "place of the chunk in the prompt"),
        _C("key", "O", "", "the key a recogniser finds in the path"),
    ),
)

HOST = Table(
    "host",
    "one counter or gauge of the host, sampled each second",
    (
        _C("time_ns", "i8", "ns", "when sampled"),
        _C("metric", "O", "", "name with its unit"),
        _C("subject", "O", "", "device, interface or empty"),
        _C("value", "f8", "", "value; counters are cumulative"),
    ),
)

KNOBS = Table(
    "knobs",
    "one setting as it was when recording began",
    (
        _C("name", "O", "", "the kernel's name for it"),
        _C("family", "O", "", "block_size, queue_depth or prefetch"),
        _C("subject", "O", "", "device, controller, subsystem, mount, control group or host"),
        _C("value", "O", "", "as text"),
        _C("unit", "O", "", "of the value"),
        _C("source", "O", "", "the file that was read"),
        _C("reachability", "O", "", "what a change takes, see kvprobe.knobs.Reach"),
        _C("note", "O", "", "what to know of it on this subject"),
    ),
)

TABLES = {
    table.name: table
    for table in (
        BLOCK,
        OPS,
        LOOKUPS,
        NVME,
        FABRIC,
        DEPTH,
        HISTOGRAM,
        REQUESTS,
        KEYS,
        HOST,
        KNOBS,
        GPU,
    )
}

_C_TYPES = {"u8": "u64", "u4": "u32", "u2": "u16", "u1": "u8", "i4": "s32"}


def numpy_dtype(table: Table) -> np.dtype[np.void]:
    """The packed record of a table; kernel records are multiples of 8 bytes."""
    return np.dtype([(c.name, c.dtype) for c in table.columns])


def c_struct(table: Table) -> str:
    """``struct kv_NAME`` in C for a kernel table, in the exact layout of ``numpy_dtype``."""
    lines = []
    for column in table.columns:
        if column.dtype.startswith("S"):
            lines.append(f"\tchar {column.name}[{column.dtype[1:]}];")
        else:
            lines.append(f"\t{_C_TYPES[column.dtype]} {column.name};")
    return f"struct kv_{table.name} {{\n" + "\n".join(lines) + "\n};\n"
