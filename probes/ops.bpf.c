/* SPDX-License-Identifier: GPL-2.0 */
/*
 * ops: one row per read or write that a process asked for, with its file: system calls,
 * io_uring, libaio. Regular files and block devices only.
 */

#include "ops_slots.bpf.h"
#include "ops_uring.bpf.h"

/* ------------------------------------------------------------------------ system calls */

inline_always int ops_enter(u32 kind, u32 descriptor, u64 bytes, u64 vector, u64 offset)
{
	u64 id = bpf_get_current_pid_tgid(), file;
	struct ops_file found = {};

	if (!kv_is_target(id >> 32))
		return 0;
	file = kv_file_of(descriptor);
	if (!file || !ops_examine(file, kind, &found))
		return 0;
	struct ops_call call = {
		.start_ns = bpf_ktime_get_ns(),
		.inode = found.inode,
		.offset = offset == OPS_AT_POSITION ? found.position : offset,
		.tid = id,
		.tgid = id >> 32,
		.requested = vector ? ops_vector_bytes(vector, bytes, OPS_SEGMENTS) : ops_clamp(bytes),
		.device = found.device,
		.kind = kind,
		.direct = found.direct,
	};
	ops_call_begin(&call);
	return 0;
}

inline_always int ops_exit(s64 result)
{
	u32 tid = bpf_get_current_pid_tgid();
	struct ops_call *call = ops_call_of(tid);

	if (!call)
		return 0;
	struct ops_result seen = {
		.start_ns = call->start_ns,
		.inode = call->inode,
		.offset = call->offset,
		.requested = call->requested,
		.device = call->device,
		.tgid = call->tgid,
		.tid = tid,
		.kind = call->kind,
		.direct = call->direct,
		.result = result,
	};
	ops_row(&seen);
	ops_call_end(tid);
	return 0;
}

SYSCALL_ENTER(ops_read_enter, read)
{
	return ops_enter(OPS_READ, SYSCALL_ARG(0), SYSCALL_ARG(2), 0, OPS_AT_POSITION);
}

SYSCALL_ENTER(ops_pread64_enter, pread64)
{
	return ops_enter(OPS_PREAD64, SYSCALL_ARG(0), SYSCALL_ARG(2), 0, SYSCALL_ARG(3));
}

SYSCALL_ENTER(ops_readv_enter, readv)
{
	return ops_enter(OPS_READV, SYSCALL_ARG(0), SYSCALL_ARG(2), SYSCALL_ARG(1),
			 OPS_AT_POSITION);
}

SYSCALL_ENTER(ops_preadv_enter, preadv)
{
	return ops_enter(OPS_PREADV, SYSCALL_ARG(0), SYSCALL_ARG(2), SYSCALL_ARG(1),
			 SYSCALL_ARG(3));
}

/* For the second versions an offset of -1 means the file's position, as OPS_AT_POSITION does. */
SYSCALL_ENTER(ops_preadv2_enter, preadv2)
{
	return ops_enter(OPS_PREADV2, SYSCALL_ARG(0), SYSCALL_ARG(2), SYSCALL_ARG(1),
			 SYSCALL_ARG(3));
}

SYSCALL_ENTER(ops_write_enter, write)
{
	return ops_enter(OPS_WRITE, SYSCALL_ARG(0), SYSCALL_ARG(2), 0, OPS_AT_POSITION);
}

SYSCALL_ENTER(ops_pwrite64_enter, pwrite64)
{
	return ops_enter(OPS_PWRITE64, SYSCALL_ARG(0), SYSCALL_ARG(2), 0, SYSCALL_ARG(3));
}

SYSCALL_ENTER(ops_writev_enter, writev)
{
	return ops_enter(OPS_WRITEV, SYSCALL_ARG(0), SYSCALL_ARG(2), SYSCALL_ARG(1),
			 OPS_AT_POSITION);
}

SYSCALL_ENTER(ops_pwritev_enter, pwritev)
{
	return ops_enter(OPS_PWRITEV, SYSCALL_ARG(0), SYSCALL_ARG(2), SYSCALL_ARG(1),
			 SYSCALL_ARG(3));
}

SYSCALL_ENTER(ops_pwritev2_enter, pwritev2)
{
	return ops_enter(OPS_PWRITEV2, SYSCALL_ARG(0), SYSCALL_ARG(2), SYSCALL_ARG(1),
			 SYSCALL_ARG(3));
}

/* After the calls' beginnings: what ends a row is attached before what begins it. */
SYSCALL_EXIT(ops_returned, read, pread64, readv, preadv, preadv2, write, pwrite64, writev, pwritev,
	     pwritev2)
{
	return ops_exit(SYSCALL_RESULT);
}

/* ---------------------------------------------------------------------------- io_uring */

RAW_HOOK(ops_uring_submit_req, io_uring_submit_req)
{
	return ops_uring_submit(ARG(0));
}

/* Its name before. Two arguments since 6.0; then the request is the first, before the second. */
RAW_HOOK(ops_uring_submit_sqe, io_uring_submit_sqe)
{
	if (ARGUMENTS(io_uring_submit_sqe) <= 2)
		return ops_uring_submit(ARG(0));
	return ops_uring_submit(ARG(1));
}

/* (context, request, cqe), or with the members of the cqe instead: user_data, res .. */
RAW_HOOK(ops_uring_done, io_uring_complete)
{
	if (ARGUMENTS(io_uring_complete) == 3)
		return ops_uring_complete(ARG(1), READ(io_uring_cqe, res, ARG(2)));
	if (ARGUMENTS(io_uring_complete) > 5)
		return ops_uring_complete(ARG(1), ARG(3));
	return 0;
}

/* ------------------------------------------------------------------------------ libaio */

enum { LIBAIO_PREAD = 0, LIBAIO_PWRITE = 1, LIBAIO_PREADV = 7, LIBAIO_PWRITEV = 8 };

/* struct iocb of the kernel's interface, as far as it matters here */
struct ops_iocb {
	u64 data;
	u64 key_and_flags;
	u16 code;
	u16 priority;
	u32 descriptor;
	u64 buffer;
	u64 bytes;
	u64 offset;
};

SUBPROGRAM int ops_libaio_begin(u64 pointer, u64 id, u64 now)
{
	struct ops_iocb iocb = {};
	struct ops_file found = {};
	u64 file;
	bool vector;

	if (bpf_probe_read_user(&iocb, sizeof(iocb), (void *)pointer))
		return 0;
	/* The file first: the verifier walks the way to the root anew for each branch before it. */
	file = kv_file_of(iocb.descriptor);
	if (!file || !ops_examine(file, OPS_LIBAIO_READ, &found))
		return 0;
	vector = iocb.code == LIBAIO_PREADV || iocb.code == LIBAIO_PWRITEV;
	if (!vector && iocb.code != LIBAIO_PREAD && iocb.code != LIBAIO_PWRITE)
		return 0;
	struct ops_request begun = {
		.key = pointer,
		.owner = id >> 32,
		.kind = iocb.code == LIBAIO_PWRITE || iocb.code == LIBAIO_PWRITEV
				? OPS_LIBAIO_WRITE
				: OPS_LIBAIO_READ,
		.start_ns = now,
		.offset = iocb.offset,
		.tgid = id >> 32,
		.tid = id,
	};
	begun.requested = vector ? ops_vector_bytes(iocb.buffer, iocb.bytes, OPS_LIBAIO_SEGMENTS)
				 : ops_clamp(iocb.bytes);
	begun.inode = found.inode;
	begun.device = found.device;
	begun.direct = found.direct;
	ops_request_begin(&begun);
	return 0;
}

SUBPROGRAM int ops_libaio_drop(u64 pointer, u64 id)
{
	if (ops_request_of(pointer, id >> 32))
		ops_request_end(pointer, id >> 32);
	return 0;
}

SYSCALL_ENTER(ops_io_submit_enter, io_submit)
{
	u64 id = bpf_get_current_pid_tgid(), count = SYSCALL_ARG(1), array = SYSCALL_ARG(2);
	u64 now = bpf_ktime_get_ns();
	u32 i;

	if (!kv_is_target(id >> 32) || (s64)count <= 0)
		return 0;
	struct ops_call call = {
		.start_ns = now,
		.pointer = array,
		.requested = ops_clamp(count),
		.tid = id,
	};
	ops_call_begin(&call);
	for (i = 0; i < OPS_BATCH; i++) {
		FORGET(i);
		if (i >= count)
			break;
		ops_libaio_begin(READ_USER(u64, array + 8 * i), id, now);
	}
	if (count > OPS_BATCH)
		COUNT(lost_ops, count - OPS_BATCH);
	return 0;
}

/* What the kernel did not take will never complete. */
SYSCALL_EXIT(ops_io_submit_exit, io_submit)
{
	u64 id = bpf_get_current_pid_tgid();
	struct ops_call *call = ops_call_of(id);
	u64 taken = SYSCALL_RESULT < 0 ? 0 : SYSCALL_RESULT;
	u64 array, count;
	u32 i;

	if (!call)
		return 0;
	array = call->pointer;
	count = call->requested;
	ops_call_end(id);
	if (taken >= count)
		return 0;
	for (i = 0; i < OPS_BATCH; i++) {
		FORGET(i);
		if (i >= count)
			break;
		if (i >= taken)
			ops_libaio_drop(READ_USER(u64, array + 8 * i), id);
	}
	return 0;
}

inline_always int ops_reap_enter(u64 events)
{
	u64 id = bpf_get_current_pid_tgid();

	if (!kv_is_target(id >> 32))
		return 0;
	struct ops_call call = {
		.start_ns = bpf_ktime_get_ns(),
		.pointer = events,
		.tid = id,
	};
	ops_call_begin(&call);
	return 0;
}

/* struct io_event: data, address of the iocb, result, second result. */
inline_always int ops_reap_exit(s64 count)
{
	u64 id = bpf_get_current_pid_tgid(), events, event, key;
	struct ops_call *call = ops_call_of(id);
	struct ops_request *begun;
	u32 i;

	if (!call)
		return 0;
	events = call->pointer;
	ops_call_end(id);
	for (i = 0; i < OPS_BATCH; i++) {
		FORGET(i);
		if (i >= count)
			break;
		event = events + OPS_EVENT_BYTES * i;
		key = READ_USER(u64, event + 8);
		begun = ops_request_of(key, id >> 32);
		if (!begun)
			continue;
		struct ops_result seen = {
			.start_ns = begun->start_ns,
			.inode = begun->inode,
			.offset = begun->offset,
			.requested = begun->requested,
			.device = begun->device,
			.tgid = begun->tgid,
			.tid = begun->tid,
			.kind = begun->kind,
			.direct = begun->direct,
			.result = READ_USER(s64, event + 16),
		};
		ops_row(&seen);
		ops_request_end(key, id >> 32);
	}
	if (count > OPS_BATCH)
		COUNT(lost_ops, count - OPS_BATCH);
	return 0;
}

SYSCALL_ENTER(ops_io_getevents_enter, io_getevents)
{
	return ops_reap_enter(SYSCALL_ARG(3));
}

SYSCALL_EXIT(ops_io_getevents_exit, io_getevents)
{
	return ops_reap_exit(SYSCALL_RESULT);
}

SYSCALL_ENTER(ops_io_pgetevents_enter, io_pgetevents)
{
	return ops_reap_enter(SYSCALL_ARG(3));
}

SYSCALL_EXIT(ops_io_pgetevents_exit, io_pgetevents)
{
	return ops_reap_exit(SYSCALL_RESULT);
}

/* A thread that ends within a call leaves no slot behind. */
RAW_HOOK(ops_thread_exit, sched_process_exit)
{
	u32 tid = READ(task_struct, pid, ARG(0));

	if (ops_call_of(tid))
		ops_call_end(tid);
	return 0;
}
