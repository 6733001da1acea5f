/* SPDX-License-Identifier: GPL-2.0 */
/*
 * cufile: rows of ops for the calls of NVIDIA's libcufile (GPUDirect Storage), by probes on the
 * library's functions. A call names its file by a handle; which file that is was said when the
 * handle was registered.
 *
 * The ABI is that of cufile.h: CUfileError_t comes back in one register, its first half is the
 * error; CUfileDescr_t is a type and then, at 8, a descriptor; CUfileIOParams_t has 64 bytes.
 */

#include "ops_slots.bpf.h"

/* OpKind in kvprobe/schema.py. The last two of each only say that a transfer was handed over. */
enum {
	CUFILE_READ = 48,
	CUFILE_READ_ASYNC = 49,
	CUFILE_READ_BATCH = 50,
	CUFILE_WRITE = 112,
	CUFILE_WRITE_ASYNC = 113,
	CUFILE_WRITE_BATCH = 114,
};

enum {
	CUFILE_CALLS = 8192,
	CUFILE_HANDLES = 65536,
	CUFILE_BATCH = PER_LOADER(128, 32), /* transfers of one batch */
	CUFILE_PARAMETER_BYTES = 64,
	CUFILE_DESCRIPTOR = 1, /* type of a handle that is a file descriptor */
	CUFILE_IS_WRITE = 1,
	CUFILE_MOST = 0x7fffffff,
};

struct cufile_handle {
	u64 address;
	u64 tgid;
};

struct cufile_file {
	u64 inode;
	u32 device;
	u32 direct;
	u64 outside; /* 1: not below the root */
};

struct cufile_call {
	struct cufile_file file;
	u64 start_ns;
	u64 offset;
	u64 pointer; /* where the handle will be, or the batch's parameters */
	u32 requested;
	u32 kind; /* 0: registers a handle */
};

/* struct CUfileIOParams */
struct cufile_parameters {
	u64 mode;
	u64 buffer;
	u64 offset;
	u64 buffer_offset;
	u64 bytes;
	u64 handle;
	u64 opcode; /* the lower half */
	u64 cookie;
};

HASH(cufile_calls, u32, struct cufile_call, CUFILE_CALLS);
LRU_HASH(cufile_handles, struct cufile_handle, struct cufile_file, CUFILE_HANDLES);

inline_always void cufile_begin(struct cufile_call *call)
{
	u32 tid = bpf_get_current_pid_tgid();

	call->start_ns = bpf_ktime_get_ns();
	COUNT(ops_begun, 1);
	if (LOOKUP(cufile_calls, &tid))
		COUNT(ops_ended, 1); /* the one before never ended */
	UPDATE(cufile_calls, &tid, call);
}

inline_always void cufile_end(u32 tid)
{
	COUNT(ops_ended, 1);
	DELETE(cufile_calls, &tid);
}

/* Whether rows are made of it; a handle from before the probe has a file that is not known. */
inline_always int cufile_find(u64 handle, u32 tgid, struct cufile_file *found)
{
	struct cufile_handle key = {.address = handle, .tgid = tgid};
	struct cufile_file *file = LOOKUP(cufile_handles, &key);

	if (!file)
		return 1;
	*found = *file;
	return !file->outside;
}

inline_always int cufile_row(struct cufile_call *call, u64 id, s64 result)
{
	struct ops_result seen = {
		.start_ns = call->start_ns,
		.inode = call->file.inode,
		.offset = call->offset,
		.requested = call->requested,
		.device = call->file.device,
		.tgid = id >> 32,
		.tid = id,
		.kind = call->kind,
		.direct = call->file.direct,
		.result = result > CUFILE_MOST ? CUFILE_MOST : result,
	};

	ops_row(&seen);
	return 0;
}

/* ----------------------------------------------------------------------------- handles */

LIBRARY_ENTER(cufile_register, cuFileHandleRegister)
{
	u64 id = bpf_get_current_pid_tgid(), file;
	u64 descriptor = FUNCTION_ARG(1);
	struct cufile_call call = {.pointer = FUNCTION_ARG(0)};
	struct ops_file found = {};

	if (!kv_is_target(id >> 32))
		return 0;
	if (READ_USER(u32, descriptor) != CUFILE_DESCRIPTOR)
		return 0;
	file = kv_file_of(READ_USER(u32, descriptor + 8));
	if (!file)
		return 0;
	if (ops_examine(file, OPS_READ, &found)) {
		call.file.inode = found.inode;
		call.file.device = found.device;
		call.file.direct = found.direct;
	} else {
		call.file.outside = 1;
	}
	cufile_begin(&call);
	return 0;
}

LIBRARY_EXIT(cufile_registered, cuFileHandleRegister)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = id;
	struct cufile_call *call = LOOKUP(cufile_calls, &tid);
	struct cufile_handle key = {.tgid = id >> 32};

	if (!call || call->kind)
		return 0;
	if (!(u32)FUNCTION_RESULT) {
		key.address = READ_USER(u64, call->pointer);
		UPDATE(cufile_handles, &key, &call->file);
	}
	cufile_end(tid);
	return 0;
}

LIBRARY_ENTER(cufile_deregister, cuFileHandleDeregister)
{
	struct cufile_handle key = {
		.address = FUNCTION_ARG(0),
		.tgid = bpf_get_current_pid_tgid() >> 32,
	};

	DELETE(cufile_handles, &key);
	return 0;
}

/* ------------------------------------------------------------------- reads and writes */

inline_always int cufile_enter(u32 kind, u64 handle, u64 bytes, u64 offset)
{
	u64 id = bpf_get_current_pid_tgid();
	struct cufile_call call = {
		.kind = kind,
		.requested = ops_clamp(bytes),
		.offset = offset,
	};

	if (!kv_is_target(id >> 32) || !cufile_find(handle, id >> 32, &call.file))
		return 0;
	cufile_begin(&call);
	return 0;
}

inline_always int cufile_exit(s64 result)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = id;
	struct cufile_call *call = LOOKUP(cufile_calls, &tid);

	if (!call || !call->kind)
		return 0;
	cufile_row(call, id, result);
	cufile_end(tid);
	return 0;
}

LIBRARY_ENTER(cufile_read, cuFileRead)
{
	return cufile_enter(CUFILE_READ, FUNCTION_ARG(0), FUNCTION_ARG(2), FUNCTION_ARG(3));
}

LIBRARY_ENTER(cufile_write, cuFileWrite)
{
	return cufile_enter(CUFILE_WRITE, FUNCTION_ARG(0), FUNCTION_ARG(2), FUNCTION_ARG(3));
}

LIBRARY_EXIT(cufile_returned, cuFileRead, cuFileWrite)
{
	return cufile_exit(FUNCTION_RESULT);
}

/* Size and offset are where the caller says; what a stream does later is not seen. */
LIBRARY_ENTER(cufile_read_async, cuFileReadAsync)
{
	return cufile_enter(CUFILE_READ_ASYNC, FUNCTION_ARG(0), READ_USER(u64, FUNCTION_ARG(2)),
			    READ_USER(u64, FUNCTION_ARG(3)));
}

LIBRARY_ENTER(cufile_write_async, cuFileWriteAsync)
{
	return cufile_enter(CUFILE_WRITE_ASYNC, FUNCTION_ARG(0), READ_USER(u64, FUNCTION_ARG(2)),
			    READ_USER(u64, FUNCTION_ARG(3)));
}

LIBRARY_EXIT(cufile_handed_over, cuFileReadAsync, cuFileWriteAsync)
{
	return cufile_exit(-(s64)(u32)FUNCTION_RESULT);
}

/* ----------------------------------------------------------------------------- batches */

LIBRARY_ENTER(cufile_batch, cuFileBatchIOSubmit)
{
	u64 id = bpf_get_current_pid_tgid();
	struct cufile_call call = {
		.kind = CUFILE_READ_BATCH,
		.requested = FUNCTION_ARG(1),
		.pointer = FUNCTION_ARG(2),
	};

	if (!kv_is_target(id >> 32))
		return 0;
	cufile_begin(&call);
	return 0;
}

SUBPROGRAM int cufile_batch_row(u64 pointer, u64 start_ns, s64 result)
{
	u64 id = bpf_get_current_pid_tgid();
	struct cufile_parameters asked = {};
	struct cufile_call call = {.start_ns = start_ns};

	if (bpf_probe_read_user(&asked, sizeof(asked), (void *)pointer))
		return 0;
	if (!cufile_find(asked.handle, id >> 32, &call.file))
		return 0;
	call.kind = (u32)asked.opcode == CUFILE_IS_WRITE ? CUFILE_WRITE_BATCH : CUFILE_READ_BATCH;
	call.requested = ops_clamp(asked.bytes);
	call.offset = asked.offset;
	cufile_row(&call, id, result);
	return 0;
}

LIBRARY_EXIT(cufile_batched, cuFileBatchIOSubmit)
{
	u32 tid = bpf_get_current_pid_tgid(), count, i;
	struct cufile_call *call = LOOKUP(cufile_calls, &tid);
	s64 result = -(s64)(u32)FUNCTION_RESULT;
	u64 pointer, start_ns;

	if (!call || !call->kind)
		return 0;
	pointer = call->pointer;
	start_ns = call->start_ns;
	count = call->requested;
	cufile_end(tid);
	for (i = 0; i < CUFILE_BATCH; i++) {
		FORGET(i);
		if (i >= count)
			break;
		cufile_batch_row(pointer + CUFILE_PARAMETER_BYTES * i, start_ns, result);
	}
	if (count > CUFILE_BATCH)
		COUNT(lost_ops, count - CUFILE_BATCH);
	return 0;
}

/* A thread that ends within a call leaves nothing behind. */
RAW_HOOK(cufile_thread_exit, sched_process_exit)
{
	u32 tid = READ(task_struct, pid, ARG(0));

	if (LOOKUP(cufile_calls, &tid))
		cufile_end(tid);
	return 0;
}
