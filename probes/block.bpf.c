/* SPDX-License-Identifier: GPL-2.0 */
/*
 * block: one row per completed block request, with the file it belongs to, and per device and
 * direction the time at each queue depth and a histogram of size x latency.
 */

#include "block_aggregates.bpf.h"
#include "block_owner.bpf.h"
#include "block_slots.bpf.h"

RING(block);

/* blk-throttle held the request back: a rule covers its bio, and a worker let it go. */
inline_always bool block_is_held(u64 bio, struct kv_request *slot)
{
	u64 flags;

	if (!slot->by_worker || !bio)
		return 0;
	flags = READ(bio, bi_flags, bio) | READ(bio, bi_flags, block_whole(bio));
	return (flags >> ENUMERATOR(BIO_BPS_THROTTLED) | flags >> ENUMERATOR(BIO_THROTTLED)) & 1;
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

/* By the request itself, so that rows of several tables about it stay or go together. */
inline_always int block_is_thinned(u64 request, struct kv_request *slot)
{
	u32 zero = 0;
	struct kv_control *live = LOOKUP(control, &zero);
	u64 mixed = (request ^ slot->queued_ns) * 0x9E3779B97F4A7C15ULL;

	if (!live || live->keep_one_in <= 1)
		return 0;
	return (mixed >> 32) % live->keep_one_in != 0;
}

/* ------------------------------------------------------------------------------ hooks */

/* A request that is heard of, where it may have begun as a bio. */
inline_always struct kv_request *block_known(u64 request)
{
	struct kv_request *slot = block_find(request, block_request_index(request));

	if (slot || ARGUMENTS(block_io_start) || !block_adopt(request))
		return slot;
	return block_find(request, block_request_index(request));
}

/* A request on its way to the device: what its bio left is newer than what is in its own slot,
 * which may be of an earlier use whose completion was not shown to us. */
inline_always struct kv_request *block_submitted(u64 request)
{
	if (!ARGUMENTS(block_io_start))
		block_adopt(request);
	return block_find(request, block_request_index(request));
}

RAW_HOOK(block_start, block_io_start)
{
	u64 request = ARG(0);

	block_begin(request, block_request_index(request), kv_request_disk(request),
		    READ(request, cmd_flags, request));
	return 0;
}

RAW_HOOK(block_bio_start, block_getrq)
{
	u64 bio = ARG(0);

	block_begin(bio, block_bio_index(bio),
		    (u64)READ(block_device, bd_disk, READ(bio, bi_bdev, bio)),
		    READ(bio, bi_opf, bio));
	return 0;
}

/*
 * A request that never was a bio is first heard of here; its time of allocation is known. That is
 * a flush, which the block layer makes for all that wait for one, and without block_io_start a
 * passthrough command.
 */
inline_always void block_issued_first(u64 request)
{
	u32 index = block_request_index(request), flags = READ(request, cmd_flags, request);
	u64 allocated_ns = READ(request, start_time_ns, request);
	struct kv_request *slot;

	if ((flags & 0xff) != KV_FLUSH &&
	    (ARGUMENTS(block_io_start) || (flags & 0xff) < KV_PASSTHROUGH))
		return; /* begun before we were attached, or of another device */
	block_begin(request, index, kv_request_disk(request), flags);
	slot = block_find(request, index);
	if (slot && allocated_ns)
		slot->queued_ns = allocated_ns;
}

RAW_HOOK(block_issue, block_rq_issue)
{
	u64 request = ARG(0);
	struct kv_request *slot = block_submitted(request);

	if (unlikely_true(!slot)) {
		block_issued_first(request);
		slot = block_find(request, block_request_index(request));
	}
	if (slot)
		slot->issued_ns = bpf_ktime_get_ns();
	return 0;
}

/* ``left`` is what the request had still to do before these bytes were completed. */
inline_always void block_row(u64 request, struct kv_request *slot, u64 now, u32 left, u32 bytes,
			     u32 status)
{
	const struct request *view = VIEW(request, request);
	u64 bio = (u64)READ(request, bio, view), queue = (u64)READ(request, mq_hctx, view);
	struct kv_owner owner = {.offset = ~0ULL};
	struct kv_block *row;

	if (bio)
		block_owner(bio, &owner);
	if (!(slot->wanted && !bio) && !block_is_wanted(slot, &owner))
		return;
	if (block_is_thinned(request, slot)) {
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
	row->sector = READ(request, __sector, view) - ((slot->bytes - left) >> 9);
	row->request = kv_request_id(request);
	row->offset = owner.offset;
	row->bytes = slot->bytes - left + bytes;
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

/* Doing this twice for one event does no harm: the second time there is nothing to do. */
inline_always void block_completed(u64 request, struct kv_request *slot, u32 bytes, u32 status)
{
	u32 left = READ(request, __data_len, request);
	u64 now;

	if (!slot->bytes)
		slot->bytes = left;
	if (bytes < left) /* the rest is still to come */
		return;
	now = bpf_ktime_get_ns();
	if (slot->queue != KV_NO_QUEUE) {
		block_depth_change(slot->queue, now, -1);
		block_histogram_add(slot->queue, slot->bytes - left + bytes, now - slot->queued_ns);
	}
	if (slot->submitter != KV_STRANGER && now - slot->queued_ns >= CONFIG(min_latency_ns))
		block_row(request, slot, now, left, bytes, status);
	block_release(slot);
}

/*
 * The kernel does not run a program where it interrupts that same program: a completion in an
 * interrupt that comes while block_done looks at one in a thread. This one runs after it (what is
 * declared later is attached first) and then does its work.
 */
RAW_HOOK(block_done_nested, block_rq_complete)
{
	u64 request = ARG(0);
	u32 index = block_request_index(request);
	struct kv_request *slot = LOOKUP(block_slots, &index);

	if (unlikely_true(slot && slot->key == request))
		block_completed(request, slot, ARG(2), ARG(1) & 0xff);
	return 0;
}

RAW_HOOK(block_done, block_rq_complete)
{
	u64 request = ARG(0);
	u32 bytes = ARG(2);
	struct kv_request *slot = block_known(request);

	if (slot)
		block_completed(request, slot, bytes, ARG(1) & 0xff);
	else if (bytes && kv_is_device(kv_request_disk(request)))
		COUNT(block_unmatched, 1);
	return 0;
}

/* Two requests became one: the second never completes. */
RAW_HOOK(block_merged, block_rq_merge)
{
	u64 request = ARG(0);
	struct kv_request *slot = block_known(request);

	if (!slot)
		return 0;
	block_abandon(slot);
	block_release(slot);
	return 0;
}
