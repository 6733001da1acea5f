/* SPDX-License-Identifier: GPL-2.0 */
/*
 * ops: one row per read or write that a process asked for, with its file: system calls,
 * io_uring, libaio. Regular files and block devices only.
 *
 * A call in progress lives in a slot chosen by its thread, a request of io_uring or libaio in one
 * chosen by its address; a second one that falls on a slot in use goes to a spill map.
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

/* OpKind in kvprobe/schema.py; one above 64 is a write */
enum {
	OPS_READ = 1,
	OPS_PREAD64 = 2,
	OPS_READV = 3,
	OPS_PREADV = 4,
	OPS_PREADV2 = 5,
	OPS_URING_READ = 16,
	OPS_LIBAIO_READ = 32,
	OPS_WRITE = 65,
	OPS_PWRITE64 = 66,
	OPS_WRITEV = 67,
	OPS_PWRITEV = 68,
	OPS_PWRITEV2 = 69,
	OPS_URING_WRITE = 80,
	OPS_LIBAIO_WRITE = 96,
	OPS_FIRST_WRITE = 64,
};

enum {
	OPS_SLOTS = 65536,
	OPS_SPILLED = 8192,
	OPS_SEGMENTS = 128, /* of a vector whose bytes are added up */
	OPS_LIBAIO_SEGMENTS = 8,
	OPS_BATCH = PER_LOADER(128, 32), /* of one io_submit or io_getevents */
	OPS_IOCB_BYTES = 64,
	OPS_EVENT_BYTES = 32,
};

#define OPS_AT_POSITION (~0ULL) /* an offset: where the file's own position is */
#define OPS_UNKNOWN (~0ULL)

struct ops_file {
	u64 inode;
	u64 position;
	u32 device;
	u32 direct;
};

struct ops_call {
	u64 start_ns;
	u64 inode;
	u64 offset;
	u64 pointer; /* libaio: the caller's array */
	u32 tid;     /* 0: slot is free */
	u32 tgid;
	u32 requested; /* libaio: elements of the array */
	u32 device;
	u32 kind;
	u32 direct;
};

struct ops_request {
	u64 key;   /* address of the io_kiocb, or of the process's iocb; 0: slot is free */
	u32 owner; /* whose address that is: 0 the kernel, else a process */
	u32 kind;
	u64 start_ns;
	u64 inode;
	u64 offset;
	u32 tgid;
	u32 tid;
	u32 requested;
	u32 device;
	u32 direct;
	u32 unused;
};

struct ops_key {
	u64 key;
	u64 owner;
};

ARRAY(ops_calls, struct ops_call, OPS_SLOTS);
HASH(ops_calls_spill, u32, struct ops_call, OPS_SPILLED);
ARRAY(ops_requests, struct ops_request, OPS_SLOTS);
HASH(ops_requests_spill, struct ops_key, struct ops_request, OPS_SPILLED);
RING(ops);

/* ------------------------------------------------------------------------------ slots */

inline_always struct ops_call *ops_call_of(u32 tid)
{
	u32 index = tid & (OPS_SLOTS - 1);
	struct ops_call *slot = LOOKUP(ops_calls, &index);

	if (!slot || slot->tid == tid)
		return slot;
	return LOOKUP(ops_calls_spill, &tid);
}

inline_always void ops_call_begin(struct ops_call *call)
{
	u32 tid = call->tid, index = tid & (OPS_SLOTS - 1);
	struct ops_call *slot = LOOKUP(ops_calls, &index);

	if (!slot)
		return;
	COUNT(ops_begun, 1);
	if (slot->tid == tid)
		COUNT(ops_ended, 1); /* the one before never ended */
	if (!slot->tid || slot->tid == tid)
		*slot = *call;
	else
		UPDATE(ops_calls_spill, &tid, call);
}

inline_always void ops_call_end(u32 tid)
{
	u32 index = tid & (OPS_SLOTS - 1);
	struct ops_call *slot = LOOKUP(ops_calls, &index);

	COUNT(ops_ended, 1);
	if (slot && slot->tid == tid)
		slot->tid = 0;
	else
		DELETE(ops_calls_spill, &tid);
}

inline_always u32 ops_request_index(u64 key, u32 owner)
{
	return ((key ^ ((u64)owner << 32)) * 0x9E3779B97F4A7C15ULL) >> 48;
}

inline_always struct ops_request *ops_request_of(u64 key, u32 owner)
{
	u32 index = ops_request_index(key, owner);
	struct ops_request *slot = LOOKUP(ops_requests, &index);
	struct ops_key spilled = {.key = key, .owner = owner};

	if (!slot || (slot->key == key && slot->owner == owner))
		return slot;
	return LOOKUP(ops_requests_spill, &spilled);
}

inline_always void ops_request_begin(struct ops_request *request)
{
	u32 index = ops_request_index(request->key, request->owner);
	struct ops_request *slot = LOOKUP(ops_requests, &index);
	struct ops_key spilled = {.key = request->key, .owner = request->owner};
	int same;

	if (!slot)
		return;
	COUNT(ops_begun, 1);
	same = slot->key == request->key && slot->owner == request->owner;
	if (same)
		COUNT(ops_ended, 1); /* the one before never ended */
	if (same || !slot->key)
		*slot = *request;
	else
		UPDATE(ops_requests_spill, &spilled, request);
}

inline_always void ops_request_end(u64 key, u32 owner)
{
	u32 index = ops_request_index(key, owner);
	struct ops_request *slot = LOOKUP(ops_requests, &index);
	struct ops_key spilled = {.key = key, .owner = owner};

	COUNT(ops_ended, 1);
	if (slot && slot->key == key && slot->owner == owner)
		slot->key = 0;
	else
		DELETE(ops_requests_spill, &spilled);
}

/* ------------------------------------------------------------------------------- files */

/* Whether a file is one to look at, and what a row says about it. */
inline_always int ops_examine(u64 file, u32 kind, struct ops_file *found)
{
	u64 inode = (u64)READ(file, f_inode, file);
	u32 type = READ(inode, i_mode, inode) & S_IFMT, flags;

	if (type != S_IFREG && type != S_IFBLK)
		return 0;
	found->inode = READ(inode, i_ino, inode);
	found->device = kv_inode_device(inode);
	if (CONFIG(root_inode) && !kv_under_root(kv_file_dentry(file), found->device))
		return 0;
	kv_remember(found->inode, found->device);
	flags = READ(file, f_flags, file);
	found->direct = (flags & CONFIG(o_direct)) != 0;
	if (kind > OPS_FIRST_WRITE && flags & O_APPEND)
		found->position = READ(inode, i_size, inode);
	else
		found->position = READ(file, f_pos, file);
	return 1;
}

inline_always u32 ops_clamp(u64 bytes)
{
	return bytes > 0xffffffffULL ? 0xffffffff : bytes;
}

/* Bytes of a vector of segments: struct iovec is an address and a length. */
SUBPROGRAM u32 ops_vector_bytes(u64 vector, u64 count, u64 most)
{
	u64 sum = 0;
	u32 i;

	for (i = 0; i < OPS_SEGMENTS; i++) {
		FORGET(i);
		if (i >= count || i >= most)
			break;
		sum += READ_USER(u64, vector + 16 * i + 8);
	}
	return ops_clamp(sum);
}

struct ops_result {
	u64 start_ns;
	u64 inode;
	u64 offset;
	u32 requested;
	u32 device;
	u32 tgid;
	u32 tid;
	u32 kind;
	u32 direct;
	s32 result;
};

inline_always void ops_row(struct ops_result *seen)
{
	u64 now = bpf_ktime_get_ns();
	struct kv_ops *row;

	row = RESERVE(ops);
	if (!row)
		return;
	row->start_ns = seen->start_ns;
	row->end_ns = now;
	row->inode = seen->inode;
	row->offset = seen->offset;
	/* Unknown where the buffer was chosen by the kernel, too low for a very long vector. */
	row->requested = seen->result > 0 && seen->requested < (u32)seen->result
				 ? (u32)seen->result
				 : seen->requested;
	row->result = seen->result;
	row->fs_device = seen->device;
	row->tgid = seen->tgid;
	row->tid = seen->tid;
	row->kind = seen->kind;
	row->direct = seen->direct;
	row->reserved = 0;
	SUBMIT(ops, row);
}

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
