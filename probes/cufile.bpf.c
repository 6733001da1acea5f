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

/* OpKind in kvprobe/schema.py. ASYNC and BATCH only say that a transfer was handed over. */
enum {
	CUFILE_READ = 48,
	CUFILE_READ_ASYNC = 49,
	CUFILE_READ_BATCH = 50,
	CUFILE_READ_DONE = 51,
	CUFILE_WRITE = 112,
	CUFILE_WRITE_ASYNC = 113,
	CUFILE_WRITE_BATCH = 114,
	CUFILE_WRITE_DONE = 115,
};

/* Calls that are no operation themselves. */
enum { CUFILE_REGISTERING = 1, CUFILE_SUBMITTING = 2, CUFILE_REAPING = 3 };

enum {
	CUFILE_CALLS = 8192,
	CUFILE_HANDLES = 65536,
	CUFILE_TRANSFERS = 65536, /* of batches under way */
	CUFILE_BATCH = PER_LOADER(128, 32), /* transfers of one batch */
	CUFILE_PARAMETER_BYTES = 64,
	CUFILE_EVENT_BYTES = 24,
	CUFILE_COMPLETE = 0x10, /* status of an event; below 4: under way */
	CUFILE_UNDER_WAY = 3,
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
	u64 pointer; /* where the handle will be, or the batch's parameters or events */
	u64 batch;
	u32 requested;
	u32 kind;
	u32 tid;
	u32 unused;
};

/* A transfer of a batch is known again by what its user calls it. */
struct cufile_transfer {
	u64 batch;
	u64 cookie;
	u64 tgid;
};

/* struct CUfileIOEvents */
struct cufile_event {
	u64 cookie;
	u64 status; /* the lower half */
	s64 result;
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
LRU_HASH(cufile_transfers, struct cufile_transfer, struct cufile_call, CUFILE_TRANSFERS);

inline_always void cufile_begin(struct cufile_call *call)
{
	u32 tid = bpf_get_current_pid_tgid();

	call->start_ns = bpf_ktime_get_ns();
	call->tid = tid;
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

inline_always int cufile_row(struct cufile_call *call, u32 tgid, s64 result)
{
	struct ops_result seen = {
		.start_ns = call->start_ns,
		.inode = call->file.inode,
		.offset = call->offset,
		.requested = call->requested,
		.device = call->file.device,
		.tgid = tgid,
		.tid = call->tid,
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
	struct cufile_call call = {.pointer = FUNCTION_ARG(0), .kind = CUFILE_REGISTERING};
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

	if (!call || call->kind != CUFILE_REGISTERING)
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

	if (!call || call->kind < CUFILE_READ)
		return 0;
	cufile_row(call, id >> 32, result);
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
	struct cufile_call call = {
		.kind = CUFILE_SUBMITTING,
		.batch = FUNCTION_ARG(0),
		.requested = FUNCTION_ARG(1),
		.pointer = FUNCTION_ARG(2),
	};

	if (kv_is_target(bpf_get_current_pid_tgid() >> 32))
		cufile_begin(&call);
	return 0;
}

/* A row of its being handed over; where the library took it, it is kept until it is done. */
SUBPROGRAM int cufile_hand_over(u64 pointer, u64 batch, u64 start_ns, s64 result)
{
	u64 id = bpf_get_current_pid_tgid();
	struct cufile_parameters asked = {};
	struct cufile_transfer key = {.batch = batch, .tgid = id >> 32};
	struct cufile_call call = {.start_ns = start_ns, .tid = id};
	int write;

	if (bpf_probe_read_user(&asked, sizeof(asked), (void *)pointer))
		return 0;
	if (!cufile_find(asked.handle, id >> 32, &call.file))
		return 0;
	write = (u32)asked.opcode == CUFILE_IS_WRITE;
	call.kind = write ? CUFILE_WRITE_BATCH : CUFILE_READ_BATCH;
	call.requested = ops_clamp(asked.bytes);
	call.offset = asked.offset;
	cufile_row(&call, id >> 32, result);
	if (result)
		return 0;
	call.kind = write ? CUFILE_WRITE_DONE : CUFILE_READ_DONE;
	key.cookie = asked.cookie;
	UPDATE(cufile_transfers, &key, &call);
	return 0;
}

LIBRARY_EXIT(cufile_batched, cuFileBatchIOSubmit)
{
	u32 tid = bpf_get_current_pid_tgid(), count, i;
	struct cufile_call *call = LOOKUP(cufile_calls, &tid);
	s64 result = -(s64)(u32)FUNCTION_RESULT;
	u64 pointer, batch, start_ns;

	if (!call || call->kind != CUFILE_SUBMITTING)
		return 0;
	pointer = call->pointer;
	batch = call->batch;
	start_ns = call->start_ns;
	count = call->requested;
	cufile_end(tid);
	for (i = 0; i < CUFILE_BATCH; i++) {
		FORGET(i);
		if (i >= count)
			break;
		cufile_hand_over(pointer + CUFILE_PARAMETER_BYTES * i, batch, start_ns, result);
	}
	if (count > CUFILE_BATCH)
		COUNT(lost_ops, count - CUFILE_BATCH);
	return 0;
}

LIBRARY_ENTER(cufile_status, cuFileBatchIOGetStatus)
{
	struct cufile_call call = {
		.kind = CUFILE_REAPING,
		.batch = FUNCTION_ARG(0),
		.offset = FUNCTION_ARG(2), /* where the number of events will be */
		.pointer = FUNCTION_ARG(3),
	};

	if (kv_is_target(bpf_get_current_pid_tgid() >> 32))
		cufile_begin(&call);
	return 0;
}

SUBPROGRAM int cufile_done(u64 pointer, u64 batch)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct cufile_event event = {};
	struct cufile_transfer key = {.batch = batch, .tgid = tgid};
	struct cufile_call *call;

	if (bpf_probe_read_user(&event, sizeof(event), (void *)pointer))
		return 0;
	if ((u32)event.status <= CUFILE_UNDER_WAY)
		return 0;
	key.cookie = event.cookie;
	call = LOOKUP(cufile_transfers, &key);
	if (!call)
		return 0;
	if ((u32)event.status != CUFILE_COMPLETE && event.result >= 0)
		event.result = -1;
	cufile_row(call, tgid, event.result);
	DELETE(cufile_transfers, &key);
	return 0;
}

LIBRARY_EXIT(cufile_reaped, cuFileBatchIOGetStatus)
{
	u32 tid = bpf_get_current_pid_tgid(), count, i;
	struct cufile_call *call = LOOKUP(cufile_calls, &tid);
	u64 pointer, batch;

	if (!call || call->kind != CUFILE_REAPING)
		return 0;
	pointer = call->pointer;
	batch = call->batch;
	count = (u32)FUNCTION_RESULT ? 0 : READ_USER(u32, call->offset);
	cufile_end(tid);
	for (i = 0; i < CUFILE_BATCH; i++) {
		FORGET(i);
		if (i >= count)
			break;
		cufile_done(pointer + CUFILE_EVENT_BYTES * i, batch);
	}
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
