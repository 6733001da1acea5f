/* SPDX-License-Identifier: GPL-2.0 */
/*
 * ops, part: calls and requests in progress, their files, and the row that each becomes.
 *
 * A call in progress lives in a slot chosen by its thread, a request of io_uring or libaio in one
 * chosen by its address; a second one that falls on a slot in use goes to a spill map.
 */

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
