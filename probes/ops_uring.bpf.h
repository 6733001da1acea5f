/* SPDX-License-Identifier: GPL-2.0 */
/*
 * ops, part: a request of io_uring, submitted and completed.
 */

struct io_rw {
	struct kiocb kiocb;
	u64 addr;
	u32 len;
} KERNEL_STRUCT;

struct io_kiocb {
	struct file *file;
	u8 opcode;
} KERNEL_STRUCT;

struct io_uring_cqe {
	s32 res;
} KERNEL_STRUCT;

enum {
	URING_READV = 1,
	URING_WRITEV = 2,
	URING_READ_FIXED = 4,
	URING_WRITE_FIXED = 5,
	URING_READ = 22,
	URING_WRITE = 23,
	URING_READV_FIXED = 60,
	URING_WRITEV_FIXED = 61,
};

/* The file is not set yet: it is looked at when the request completes. */
inline_always int ops_uring_submit(u64 request)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 code = READ(io_kiocb, opcode, request);
	bool vector = code == URING_READV || code == URING_WRITEV || code == URING_READV_FIXED ||
		      code == URING_WRITEV_FIXED;
	bool write = code == URING_WRITEV || code == URING_WRITE_FIXED || code == URING_WRITE ||
		     code == URING_WRITEV_FIXED;

	if (!vector && !write && code != URING_READ && code != URING_READ_FIXED)
		return 0;
	if (!kv_is_target(id >> 32))
		return 0;
	struct ops_request begun = {
		.key = request,
		.kind = write ? OPS_URING_WRITE : OPS_URING_READ,
		.start_ns = bpf_ktime_get_ns(),
		.offset = OPS_UNKNOWN,
		.tgid = id >> 32,
		.tid = id,
	};
	if (HAS_TYPE(io_rw)) { /* it lies over the beginning of the io_kiocb */
		begun.offset = READ(kiocb, ki_pos, ADDRESS(io_rw, kiocb, request));
		begun.requested = READ(io_rw, len, request);
		if (vector)
			begun.requested = ops_vector_bytes(READ(io_rw, addr, request),
							   begun.requested, OPS_SEGMENTS);
	}
	ops_request_begin(&begun);
	return 0;
}

inline_always int ops_uring_complete(u64 request, s32 result)
{
	struct ops_request *begun = ops_request_of(request, 0);
	struct ops_file found = {};
	u64 file;

	if (!begun)
		return 0;
	file = (u64)READ(io_kiocb, file, request);
	struct ops_result seen = {
		.start_ns = begun->start_ns,
		.offset = begun->offset,
		.requested = begun->requested,
		.tgid = begun->tgid,
		.tid = begun->tid,
		.kind = begun->kind,
		.result = result,
	};
	ops_request_end(request, 0);
	if (!file || !ops_examine(file, seen.kind, &found))
		return 0;
	seen.inode = found.inode;
	seen.device = found.device;
	seen.direct = found.direct;
	if (seen.offset == OPS_UNKNOWN && result >= 0) /* the file's position has moved on */
		seen.offset = found.position - result;
	ops_row(&seen);
	return 0;
}
