/* SPDX-License-Identifier: GPL-2.0 */
/*
 * block, part: requests in flight.
 *
 * A request lives in a slot chosen by its address; the address is checked, and a second request
 * that hashes to a slot in use goes to a spill map. No hash map on the ordinary path.
 *
 * Kernels before 6.5 have no event that tells of a new request. There its first bio gets the slot
 * (block_getrq, in the thread that submits it), and the request takes over what is in it, when it
 * is first heard of.
 */

/* In place of a disk. */
#define KV_SPILLED (~0ULL)

enum {
	KV_SLOTS = 65536,
	KV_FLUSH = 2,	    /* REQ_OP_FLUSH */
	KV_PASSTHROUGH = 34, /* REQ_OP_DRV_IN: this operation and those above it have no bio event */
	KV_IN_FRONT = PER_LOADER(256, 128), /* bios merged in front of the one that began a request */
	KV_WORKER_KIND = sizeof("kworker/") - 1, /* then u, or the number of its CPU */
};

/* One cache line. Disk, device and queues stay when the request is over: the next user of the slot
 * is nearly always the same device. */
struct kv_request {
	u64 key; /* address of the request, or of its first bio; 0: slot is free */
	u64 disk; /* serial number, see kv_disk_serial; or KV_SPILLED */
	u64 queued_ns;
	u64 issued_ns;
	u32 tgid;
	u32 tid;
	u32 device; /* of the disk */
	u32 queues; /* of the device: index of its reads in block_depth and block_histogram */
	u32 queue;  /* of this request, or KV_NO_QUEUE */
	u32 bytes;  /* of this request, 0 until some are completed */
	u32 flags;
	u16 submitter;
	u8 by_worker; /* submitted by a worker of a CPU, as blk-throttle does when it lets go */
	u8 wanted;    /* by the nvme probe; a request that fails over loses its bio, and so its file */
};

ARRAY(block_slots, struct kv_request, KV_SLOTS);
HASH(block_spill, u64, struct kv_request, 8192);

/* Requests of one queue lie side by side in memory, 256 bytes apart at least, and so do their slots;
 * which part of the slots a megabyte of memory falls on is mixed. */
inline_always u32 block_request_index(u64 request)
{
	return (u32)((request >> 8) ^ (((request >> 20) * 0x9E3779B97F4A7C15ULL) >> 40)) &
	       (KV_SLOTS - 1);
}

/* Bios are 64 bytes apart at least. */
inline_always u32 block_bio_index(u64 bio)
{
	return block_request_index(bio << 2);
}

/* The slot of what is in flight; its own, or one in the spill map. */
inline_always struct kv_request *block_find(u64 key, u32 index)
{
	struct kv_request *slot = LOOKUP(block_slots, &index);

	if (!slot || likely_true(slot->key == key))
		return slot;
	return LOOKUP(block_spill, &key);
}

inline_always void block_release(struct kv_request *slot)
{
	u64 key = slot->key;

	slot->key = 0;
	if (unlikely_true(slot->disk == KV_SPILLED))
		DELETE(block_spill, &key);
}

inline_always void block_abandon(struct kv_request *slot)
{
	if (slot->queue != KV_NO_QUEUE)
		block_depth_change(slot->queue, bpf_ktime_get_ns(), -1);
}

/* A request came back although its last completion was not shown to us. */
inline_always void block_was_unseen(struct kv_request *slot)
{
	block_abandon(slot);
	COUNT(block_unseen, 1);
	if (slot->submitter == KV_TARGET)
		COUNT(lost_block, 1);
}

/* A request, or its first bio, begins its life in the thread that submits it. */
inline_always void block_begin(u64 key, u32 index, u64 disk, u32 flags)
{
	u64 id = bpf_get_current_pid_tgid(), task = bpf_get_current_task(), now;
	u32 task_flags = READ(task_struct, flags, task), op = flags & 0xff;
	struct kv_request *slot = LOOKUP(block_slots, &index), spilled;
	u64 serial = disk ? kv_disk_serial(disk) : 0;
	bool spill = 0;

	if (!slot)
		return;
	if (unlikely_true(slot->key)) {
		if (slot->key == key) {
			block_was_unseen(slot);
		} else {
			__builtin_memset(&spilled, 0, sizeof(spilled));
			spill = 1;
			slot = &spilled;
		}
	}
	if (unlikely_true(slot->disk != serial || !disk)) {
		if (!kv_is_device(disk)) {
			slot->disk = 0;
			return;
		}
		slot->device = kv_disk_device(disk);
		slot->disk = serial;
		slot->queues = disk ? block_queues_of(slot->device) : KV_NO_QUEUE;
	}
	now = bpf_ktime_get_ns();
	slot->key = key;
	slot->queued_ns = now;
	slot->issued_ns = 0;
	slot->tgid = id >> 32;
	slot->tid = id;
	slot->bytes = 0;
	slot->flags = flags;
	slot->submitter = kv_submitter(id >> 32, task_flags);
	slot->wanted = 0;
	slot->by_worker = task_flags & PF_WQ_WORKER &&
			  READ_AT(char, ADDRESS(task_struct, comm, task) + KV_WORKER_KIND) != 'u';
	slot->queue = op <= 1 && slot->queues != KV_NO_QUEUE ? slot->queues + op : KV_NO_QUEUE;
	if (slot->queue != KV_NO_QUEUE)
		block_depth_change(slot->queue, now, 1);
	if (unlikely_true(spill)) {
		slot->disk = KV_SPILLED;
		UPDATE(block_spill, &key, slot);
	}
}

/* ---------------------------------------------------------------- without block_io_start */

inline_always void block_move(struct kv_request *left, u64 request)
{
	u32 index = block_request_index(request);
	struct kv_request *slot = LOOKUP(block_slots, &index), taken = *left;

	if (!slot)
		return;
	taken.key = request;
	taken.flags = READ(request, cmd_flags, request);
	block_release(left);
	if (slot->key && slot->key != request) {
		taken.disk = KV_SPILLED;
		UPDATE(block_spill, &request, &taken);
		return;
	}
	if (slot->key)
		block_was_unseen(slot);
	taken.disk = 0;
	*slot = taken;
}

/*
 * Take over what a bio of the request left. The one that began it is the first, unless others were
 * merged in front: then the last, unless others were merged behind it, too.
 */
SUBPROGRAM int block_adopt(u64 request)
{
	u64 bio = (u64)READ(request, bio, request), last = (u64)READ(request, biotail, request);
	struct kv_request *left;
	u32 i;

	if (!bio || !kv_is_device(kv_request_disk(request)))
		return 0;
	left = block_find(bio, block_bio_index(bio));
	if (!left && bio != last)
		left = block_find(last, block_bio_index(last));
	for (i = 0; !left && i < KV_IN_FRONT; i++) {
		FORGET(i);
		bio = (u64)READ(bio, bi_next, bio);
		if (!bio || bio == last)
			return 0;
		left = block_find(bio, block_bio_index(bio));
	}
	if (!left)
		return 0;
	block_move(left, request);
	return 1;
}
