/* SPDX-License-Identifier: GPL-2.0 */
/*
 * block: one row per completed block request, with the file it belongs to, and per device and
 * direction the time at each queue depth and a histogram of size x latency.
 *
 * A request in flight lives in a slot chosen by its address; the address is checked, and a second
 * request that hashes to a slot in use goes to a spill map. No hash map on the ordinary path.
 */

struct gendisk {
	struct block_device *part0;
} KERNEL_STRUCT;

struct block_device {
	u32 bd_dev;
} KERNEL_STRUCT;

struct request_queue {
	struct gendisk *disk;
} KERNEL_STRUCT;

struct blk_mq_hw_ctx {
	u32 queue_num;
} KERNEL_STRUCT;

struct bvec_iter {
	u32 bi_idx;
	u32 bi_bvec_done;
} KERNEL_STRUCT;

struct page {
	unsigned long compound_head;
} KERNEL_STRUCT;

struct address_space {
	struct inode *host;
} KERNEL_STRUCT;

struct folio {
	struct address_space *mapping;
	unsigned long index;
} KERNEL_STRUCT;

struct bio_vec {
	struct page *bv_page;
	u32 bv_offset;
} KERNEL_STRUCT;

struct bio {
	u16 bi_flags;
	struct bvec_iter bi_iter;
	void *bi_end_io;
	void *bi_private;
	struct bio_vec *bi_io_vec;
} KERNEL_STRUCT;

struct request {
	struct request_queue *q;
	struct blk_mq_hw_ctx *mq_hctx;
	u32 cmd_flags;
	u32 __data_len;
	u64 __sector;
	struct bio *bio;
} KERNEL_STRUCT;

struct iomap_dio {
	struct kiocb *iocb;
} KERNEL_STRUCT;

struct blkdev_dio {
	struct kiocb *iocb;
	struct bio bio;
} KERNEL_STRUCT;

enum {
	KV_SLOTS = 65536,
	KV_QUEUES = 256, /* devices x directions */
	KV_DEPTHS = 256,
	KV_SIZES = 18,
	KV_LATENCIES = 121,
	KV_NO_QUEUE = 0xffffffff,
	KV_SPILLED = 1, /* in place of a disk */
	KV_PAGE_SHIFT = 12,
	KV_WORKER_KIND = sizeof("kworker/") - 1, /* then u, or the number of its CPU */
};

/* BlockMethod in kvprobe/schema.py */
enum { KV_METHOD_NONE = 0, KV_METHOD_DIRECT = 1, KV_METHOD_PAGE = 2, KV_METHOD_RAW_DEVICE = 3 };

/* One cache line. Disk, device and queues stay when the request is over: the next user of the slot
 * is nearly always the same device. */
struct kv_request {
	u64 request;
	u64 disk;
	u64 queued_ns;
	u64 issued_ns;
	u32 tgid;
	u32 tid;
	u32 device; /* of the disk */
	u32 queues; /* of the device: index of its reads in block_depth and block_histogram */
	u32 queue;  /* of this request, or KV_NO_QUEUE */
	u32 bytes;  /* completed so far */
	u32 flags;
	u16 submitter;
	u16 by_worker; /* submitted by a worker of a CPU, as blk-throttle does when it lets go */
};

struct kv_depth {
	u64 last_ns;
	u64 depth;
	u64 time_ns[KV_DEPTHS];
};

struct kv_cell {
	u64 requests;
	u64 bytes;
};

struct kv_histogram {
	struct kv_cell cells[KV_SIZES * KV_LATENCIES];
};

struct kv_owner {
	u64 inode;
	u64 offset;
	u64 dentry;
	u32 device;
	u32 method;
};

ARRAY(block_slots, struct kv_request, KV_SLOTS);
HASH(block_spill, u64, struct kv_request, 8192);
HASH(block_devices, u32, u32, KV_QUEUES);
ARRAY(block_device_count, u32, 1);
ARRAY(block_depth, struct kv_depth, KV_QUEUES);
ARRAY(block_histogram, struct kv_histogram, KV_QUEUES);
RING(block);

/* The whole disk: request.part is not set yet at block_io_start. 0 for a passthrough queue. */
inline_always u32 block_device_of(u64 disk)
{
	return disk ? READ(block_device, bd_dev, READ(gendisk, part0, disk)) : 0;
}

inline_always u64 block_disk_of(u64 request)
{
	return (u64)READ(request_queue, disk, READ(request, q, request));
}

/* Requests of one queue lie side by side in memory, 256 bytes apart at least, and so do their slots;
 * which part of the slots a megabyte of memory falls on is mixed. */
inline_always u32 block_slot_index(u64 request)
{
	return (u32)((request >> 8) ^ (((request >> 20) * 0x9E3779B97F4A7C15ULL) >> 40)) &
	       (KV_SLOTS - 1);
}

/* The slot of a request in flight; its own, or one in the spill map. */
inline_always struct kv_request *block_find(u64 request)
{
	u32 index = block_slot_index(request);
	struct kv_request *slot = LOOKUP(block_slots, &index);

	if (!slot || likely_true(slot->request == request))
		return slot;
	return LOOKUP(block_spill, &request);
}

inline_always void block_release(u64 request, struct kv_request *slot)
{
	slot->request = 0;
	if (unlikely_true(slot->disk == KV_SPILLED))
		DELETE(block_spill, &request);
}

/* ------------------------------------------------------------------------- aggregates */

/* Two queues per device: reads, writes. Devices get their pair when they are first seen. */
inline_always u32 block_queues_of(u32 device)
{
	u32 zero = 0, queues, *known = LOOKUP(block_devices, &device), *count;

	if (known)
		return *known;
	count = LOOKUP(block_device_count, &zero);
	if (!count)
		return KV_NO_QUEUE;
	queues = 2 * FETCH_ADD(count, 1);
	if (queues >= KV_QUEUES) {
		COUNT(block_devices_over, 1);
		queues = KV_NO_QUEUE;
	}
	UPDATE(block_devices, &device, &queues);
	return queues;
}

/*
 * Time since the last change goes to the depth before it. Each change swaps the clock in, so the
 * intervals of all CPUs join without gap or overlap and their sum is exact.
 */
inline_always void block_depth_change(u32 queue, u64 now, u64 step)
{
	struct kv_depth *state = LOOKUP(block_depth, &queue);
	struct kv_control *live;
	u64 last, depth;
	u32 zero = 0;

	if (!state)
		return;
	last = EXCHANGE(&state->last_ns, now);
	depth = FETCH_ADD(&state->depth, step);
	if (unlikely_true(!last)) {
		live = LOOKUP(control, &zero);
		last = live ? live->start_ns : now;
	}
	if (depth >= KV_DEPTHS)
		depth = KV_DEPTHS - 1;
	ATOMIC_ADD(&state->time_ns[depth & (KV_DEPTHS - 1)], now - last);
}

inline_always u32 block_log2(u64 value)
{
	u32 bit = 0;

	if (value >> 32) {
		bit += 32;
		value >>= 32;
	}
	if (value >> 16) {
		bit += 16;
		value >>= 16;
	}
	if (value >> 8) {
		bit += 8;
		value >>= 8;
	}
	if (value >> 4) {
		bit += 4;
		value >>= 4;
	}
	if (value >> 2) {
		bit += 2;
		value >>= 2;
	}
	return bit + (value >> 1);
}

/* Sizes: below 512 B, then one bucket per power of two. Latencies: below 1024 ns, then four
 * buckets per power of two. The last of each is open. kvprobe/bpf/aggregates.py has the edges. */
inline_always void block_histogram_add(u32 queue, u32 bytes, u64 latency_ns)
{
	struct kv_histogram *histogram = LOOKUP(block_histogram, &queue);
	u32 size = 0, latency = 0, bit, cell;

	if (!histogram)
		return;
	if (bytes >> 9) {
		size = block_log2(bytes) - 8;
		if (size >= KV_SIZES)
			size = KV_SIZES - 1;
	}
	if (latency_ns >> 10) {
		bit = block_log2(latency_ns);
		latency = 1 + 4 * (bit - 10) + ((latency_ns >> (bit - 2)) & 3);
		if (latency >= KV_LATENCIES)
			latency = KV_LATENCIES - 1;
	}
	cell = size * KV_LATENCIES + latency;
	if (cell < KV_SIZES * KV_LATENCIES) {
		ATOMIC_ADD(&histogram->cells[cell].requests, 1);
		ATOMIC_ADD(&histogram->cells[cell].bytes, bytes);
	}
}

/* ------------------------------------------------------------------------------ owner */

/* File, and place in it, of a page: buffered reads, read-ahead, write-back, mapped files. */
inline_always void block_page_owner(u64 bio, struct kv_owner *owner)
{
	u64 iter = ADDRESS(bio, bi_iter, bio), vector, page, head, mapping, inode;
	u32 tail = 0;

	vector = (u64)READ(bio, bi_io_vec, bio) +
		 16ULL * READ(bvec_iter, bi_idx, iter);
	page = (u64)READ(bio_vec, bv_page, vector);
	if (!page)
		return;
	head = READ(page, compound_head, page);
	if (head & 1) {
		tail = (u32)(page - (head - 1)) / (u32)TYPE_SIZE(page);
		page = head - 1;
	}
	mapping = (u64)READ(folio, mapping, page);
	if (!mapping || (mapping & 3)) /* anonymous or movable */
		return;
	inode = (u64)READ(address_space, host, mapping);
	owner->offset = ((READ(folio, index, page) + tail) << KV_PAGE_SHIFT) +
			READ(bio_vec, bv_offset, vector) + READ(bvec_iter, bi_bvec_done, iter);
	if ((READ(inode, i_mode, inode) & S_IFMT) == S_IFBLK) { /* file system metadata, too */
		owner->method = KV_METHOD_RAW_DEVICE;
		return;
	}
	owner->method = KV_METHOD_PAGE;
	owner->inode = READ(inode, i_ino, inode);
	owner->device = kv_inode_device(inode);
	if (CONFIG(root_inode))
		owner->dentry = kv_inode_dentry(inode);
}

/* A bio that was split off points to the one it came from. */
inline_always u64 block_whole(u64 bio)
{
	u32 i;

	for (i = 0; i < 4; i++) {
		u64 end = (u64)READ(bio, bi_end_io, bio);

		if (!end || end != SYMBOL(bio_chain_endio))
			break;
		bio = (u64)READ(bio, bi_private, bio);
	}
	return bio;
}

/* blk-throttle held the request back: a rule covers its bio, and a worker let it go. */
inline_always bool block_is_held(u64 bio, struct kv_request *slot)
{
	u64 flags;

	if (!slot->by_worker || !bio)
		return 0;
	flags = READ(bio, bi_flags, bio) | READ(bio, bi_flags, block_whole(bio));
	return (flags >> ENUMERATOR(BIO_BPS_THROTTLED) | flags >> ENUMERATOR(BIO_THROTTLED)) & 1;
}

/* File of a direct operation and where that operation starts. */
inline_always void block_owner(u64 bio, struct kv_owner *owner)
{
	u64 whole = block_whole(bio), end, address, file;
	const struct bio *view = VIEW(bio, whole);

	end = (u64)READ(bio, bi_end_io, view);
	if (end && end == SYMBOL(iomap_dio_bio_end_io)) {
		address = (u64)READ(iomap_dio, iocb, READ(bio, bi_private, view));
		owner->method = KV_METHOD_DIRECT;
	} else if (end && end == SYMBOL(blkdev_bio_end_io_async)) {
		address = (u64)READ(blkdev_dio, iocb, CONTAINER(blkdev_dio, bio, whole));
		owner->method = KV_METHOD_RAW_DEVICE;
	} else {
		block_page_owner(bio, owner);
		return;
	}
	const struct kiocb *iocb = VIEW(kiocb, address);

	file = (u64)READ(kiocb, ki_filp, iocb);
	owner->offset = READ(kiocb, ki_pos, iocb);
	const struct inode *inode = VIEW(inode, READ(file, f_inode, file));

	owner->inode = READ(inode, i_ino, inode);
	owner->device = READ(super_block, s_dev, READ(inode, i_sb, inode));
	if (CONFIG(root_inode))
		owner->dentry = kv_file_dentry(file);
}

/* The last word on the filters: only now is the file known. */
inline_always int block_is_wanted(struct kv_request *slot, struct kv_owner *owner)
{
	if (CONFIG(root_inode)) {
		if (owner->inode && !owner->dentry)
			COUNT(block_path_unknown, 1);
		return kv_under_root(owner->dentry, owner->device);
	}
	if (!CONFIG(filter_tgids))
		return 1;
	if (slot->submitter == KV_TARGET) {
		if (owner->inode)
			kv_remember(owner->inode, owner->device);
		return 1;
	}
	return owner->inode && kv_is_remembered(owner->inode, owner->device);
}

inline_always int block_is_thinned(void)
{
	u32 zero = 0;
	struct kv_control *live = LOOKUP(control, &zero);

	if (!live || live->keep_one_in <= 1)
		return 0;
	return bpf_get_prandom_u32() % (u32)live->keep_one_in != 0;
}

/* ------------------------------------------------------------------------------ hooks */

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

RAW_HOOK(block_start, block_io_start)
{
	u64 request = ARG(0), id = bpf_get_current_pid_tgid(), task = bpf_get_current_task(), now;
	u64 disk = block_disk_of(request);
	u32 task_flags = READ(task_struct, flags, task), index = block_slot_index(request), op;
	struct kv_request *slot = LOOKUP(block_slots, &index), spilled;
	bool spill = 0;

	if (!slot)
		return 0;
	if (unlikely_true(slot->request)) {
		if (slot->request == request) {
			block_was_unseen(slot);
		} else {
			__builtin_memset(&spilled, 0, sizeof(spilled));
			spill = 1;
			slot = &spilled;
		}
	}
	if (unlikely_true(slot->disk != disk || !disk)) {
		slot->device = block_device_of(disk);
		if (CONFIG(device) && slot->device != CONFIG(device)) {
			slot->disk = 0;
			return 0;
		}
		slot->disk = disk;
		slot->queues = disk ? block_queues_of(slot->device) : KV_NO_QUEUE;
	}
	now = bpf_ktime_get_ns();
	slot->request = request;
	slot->queued_ns = now;
	slot->issued_ns = 0;
	slot->tgid = id >> 32;
	slot->tid = id;
	slot->bytes = 0;
	slot->flags = READ(request, cmd_flags, request);
	slot->submitter = kv_submitter(id >> 32, task_flags);
	slot->by_worker = task_flags & PF_WQ_WORKER &&
			  READ_AT(char, ADDRESS(task_struct, comm, task) + KV_WORKER_KIND) != 'u';
	op = slot->flags & 0xff;
	slot->queue = op <= 1 && slot->queues != KV_NO_QUEUE ? slot->queues + op : KV_NO_QUEUE;
	if (slot->queue != KV_NO_QUEUE)
		block_depth_change(slot->queue, now, 1);
	if (unlikely_true(spill)) {
		slot->disk = KV_SPILLED;
		UPDATE(block_spill, &request, slot);
	}
	return 0;
}

RAW_HOOK(block_issue, block_rq_issue)
{
	u64 request = ARG(0);
	struct kv_request *slot = block_find(request);

	if (slot)
		slot->issued_ns = bpf_ktime_get_ns();
	return 0;
}

inline_always void block_row(u64 request, struct kv_request *slot, u64 now, u32 bytes, u32 status)
{
	const struct request *view = VIEW(request, request);
	u64 bio = (u64)READ(request, bio, view), queue = (u64)READ(request, mq_hctx, view);
	struct kv_owner owner = {.offset = ~0ULL};
	struct kv_block *row;

	if (bio)
		block_owner(bio, &owner);
	if (!block_is_wanted(slot, &owner))
		return;
	if (block_is_thinned()) {
		COUNT(thinned_block, 1);
		return;
	}
	row = RESERVE(block);
	if (!row)
		return;
	row->done_ns = now;
	row->queued_ns = slot->queued_ns;
	row->issued_ns = slot->issued_ns;
	row->inode = owner.inode;
	row->sector = READ(request, __sector, view) - (slot->bytes >> 9);
	row->request = kv_request_id(request);
	row->offset = owner.offset;
	row->bytes = slot->bytes + bytes;
	row->device = slot->device;
	row->fs_device = owner.device;
	row->tgid = slot->tgid;
	row->tid = slot->tid;
	row->flags = slot->flags >> 8;
	row->hw_queue = queue ? READ(blk_mq_hw_ctx, queue_num, queue) : ~0U;
	row->op = slot->flags;
	row->method = owner.method;
	row->status = status;
	row->held = block_is_held(bio, slot);
	SUBMIT(block, row);
}

RAW_HOOK(block_done, block_rq_complete)
{
	u64 request = ARG(0), now;
	u32 bytes = ARG(2);
	struct kv_request *slot = block_find(request);

	if (!slot) {
		if (bytes && (!CONFIG(device) ||
			      block_device_of(block_disk_of(request)) == CONFIG(device)))
			COUNT(block_unmatched, 1);
		return 0;
	}
	if (bytes < READ(request, __data_len, request)) { /* the rest is still to come */
		slot->bytes += bytes;
		return 0;
	}
	now = bpf_ktime_get_ns();
	if (slot->queue != KV_NO_QUEUE) {
		block_depth_change(slot->queue, now, -1);
		block_histogram_add(slot->queue, slot->bytes + bytes, now - slot->queued_ns);
	}
	if (slot->submitter != KV_STRANGER && now - slot->queued_ns >= CONFIG(min_latency_ns))
		block_row(request, slot, now, bytes, ARG(1) & 0xff);
	block_release(request, slot);
	return 0;
}

/* Two requests became one: the second never completes. */
RAW_HOOK(block_merged, block_rq_merge)
{
	u64 request = ARG(0);
	struct kv_request *slot = block_find(request);

	if (!slot)
		return 0;
	block_abandon(slot);
	block_release(request, slot);
	return 0;
}
