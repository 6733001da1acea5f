/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nvme: one row per NVMe command to a namespace, made when the driver sees its completion.
 *
 * Order of events of one request: block_io_start, nvme_setup_cmd, block_rq_issue, sending,
 * arrival of the answer, nvme_complete_rq, block_rq_complete. A retried request is set up again;
 * one that fails over to another path completes with no bytes, and its I/O becomes a new request.
 * A command in flight lives in a slot chosen by its request's address, as in block. Whose it is,
 * the block probe knows: filters are its filters.
 */

#include "nvme.bpf.h"

struct ib_qp {
	void *qp_context;
} KERNEL_STRUCT;

struct ib_wc {
	void *wr_cqe;
	enum { NVME_RDMA_SUCCESS = 0 } status; /* libbpf wants an enumeration, as the kernel has */
	struct ib_qp *qp;
} KERNEL_STRUCT;

/* NvmeTransport in kvprobe/schema.py, and the driver's names for them as numbers. */
enum { NVME_UNKNOWN = 0, NVME_PCI = 1, NVME_TCP = 2, NVME_RDMA = 3, NVME_LOOP = 4 };
enum { NVME_NAME_PCIE = 0x65696370, NVME_NAME_TCP = 0x00706374 };
enum { NVME_NAME_RDMA = 0x616d6472, NVME_NAME_LOOP = 0x706f6f6c };

enum {
	NVME_OP_FLUSH = 2,	    /* block operations, include/linux/blk_types.h */
	NVME_OP_DRIVER_IN = 34,
	NVME_OP_DRIVER_OUT = 35,
	NVME_COMMAND_ID = 12,	    /* in a completion entry, by the NVMe specification */
	NVME_TAG_BITS = 0xfff,	    /* of a command id; the rest counts generations */
	NVME_STATUS_BITS = 0x7ff,   /* code and type; above are retry hints */
	NVME_LISTED = PER_LOADER(128, 64), /* commands that wait to be sent, looked at */
};

/* One cache line. Table of operations and transport stay when the command is over. */
struct kv_command {
	u64 request;
	u64 operations; /* of the controller: the transport was learned from these */
	u64 setup_ns;
	u64 sent_ns;
	u64 arrived_ns; /* where the transport tells it per command */
	u32 device;
	u32 bytes;
	u32 nsid;
	u16 controller;
	u16 queue;
	u16 command_id;
	u8 opcode;
	u8 transport;
	u32 spilled;
};

/* What a queue's socket told. */
struct kv_arrivals {
	u64 waiting_ns; /* first arrival since the driver last began to read */
	u64 reading_ns; /* first arrival of what the driver reads */
	u64 last_ns;
};

ARRAY(nvme_slots, struct kv_command, KV_SLOTS);
HASH(nvme_spill, u64, struct kv_command, 8192);
LRU_HASH(nvme_arrivals, u64, struct kv_arrivals, 8192);
RING(nvme);

inline_always struct kv_command *nvme_find(u64 request)
{
	u32 index = block_request_index(request);
	struct kv_command *slot = LOOKUP(nvme_slots, &index);

	if (!slot || likely_true(slot->request == request))
		return slot;
	return LOOKUP(nvme_spill, &request);
}

inline_always void nvme_release(u64 request, struct kv_command *slot)
{
	slot->request = 0;
	if (unlikely_true(slot->spilled))
		DELETE(nvme_spill, &request);
}

/* ---------------------------------------------------------------------------- filters */

/*
 * The block probe's slot says who submitted the request. Only flushes, which the block layer
 * makes itself, and passthrough commands may lack one: they are shown where nothing is asked
 * about processes and files.
 */
inline_always int nvme_may_be_wanted(u64 request, struct kv_request *known)
{
	u32 op;

	if (likely_true(known != NULL))
		return known->submitter != KV_STRANGER;
	op = READ(request, cmd_flags, request) & 0xff;
	if (op != NVME_OP_FLUSH && op != NVME_OP_DRIVER_IN && op != NVME_OP_DRIVER_OUT)
		return 0;
	if (CONFIG(filter_tgids) || CONFIG(root_inode)) {
		COUNT(nvme_without_owner, 1);
		return 0;
	}
	return kv_is_device(kv_request_disk(request));
}

/* The last word, as block_is_wanted has it; a request that fails over will be asked no more. */
inline_always int nvme_is_wanted(u64 request, struct kv_request *known)
{
	struct kv_owner owner = {.offset = ~0ULL};
	u64 bio;

	if (!known)
		return !CONFIG(filter_tgids) && !CONFIG(root_inode);
	if (CONFIG(root_inode) || known->submitter != KV_TARGET) {
		bio = (u64)READ(request, bio, request);
		if (bio)
			block_owner(bio, &owner);
		if (!block_is_wanted(known, &owner))
			return 0;
	}
	known->wanted = 1;
	return 1;
}

/* ------------------------------------------------------------------------------ hooks */

inline_always u32 nvme_transport_of(u64 operations)
{
	u32 name = READ_AT(u32, READ_MODULE(nvme_ctrl_ops, name, operations));

	if (name == NVME_NAME_TCP)
		return NVME_TCP;
	if (name == NVME_NAME_RDMA)
		return NVME_RDMA;
	if (name == NVME_NAME_PCIE)
		return NVME_PCI;
	return name == NVME_NAME_LOOP ? NVME_LOOP : NVME_UNKNOWN;
}

/*
 * The request is set up again without a completion that we saw: the driver lacked memory and
 * gave it back, or a completion was not shown to us; then the id has a new generation.
 */
inline_always void nvme_set_up_again(struct kv_command *slot, u16 command_id)
{
	if (slot->command_id == command_id)
		COUNT(nvme_given_back, 1);
	else
		COUNT(lost_nvme, 1);
}

RAW_HOOK(nvme_setup, nvme_setup_cmd, nvme_core)
{
	u64 request = ARG(0), controller, operations, command;
	struct kv_request *known = block_submitted(request);
	u32 index = block_request_index(request);
	struct kv_command *slot, spilled;

	if (nvme_is_admin(request)) {
		COUNT(nvme_admin, 1);
		return 0;
	}
	if (!nvme_may_be_wanted(request, known))
		return 0;
	slot = LOOKUP(nvme_slots, &index);
	if (!slot)
		return 0;
	/* Laid down by the NVMe specification: opcode, flags, command id, namespace. */
	command = READ_AT(u64, ARG(1));
	__builtin_memset(&spilled, 0, sizeof(spilled));
	if (unlikely_true(slot->request)) {
		if (slot->request == request) {
			nvme_set_up_again(slot, command >> 16);
		} else {
			spilled.spilled = 1;
			slot = &spilled;
		}
	}
	controller = nvme_controller_of(request);
	operations = (u64)READ_MODULE(nvme_ctrl, ops, controller);
	if (unlikely_true(slot->operations != operations)) {
		slot->transport = nvme_transport_of(operations);
		slot->operations = operations;
	}
	slot->request = request;
	slot->sent_ns = 0;
	slot->arrived_ns = 0;
	slot->device = known ? known->device : kv_disk_device(kv_request_disk(request));
	slot->bytes = READ(request, __data_len, request);
	slot->nsid = command >> 32;
	slot->controller = READ_MODULE(nvme_ctrl, instance, controller);
	slot->queue = nvme_queue_of(request);
	slot->command_id = command >> 16;
	slot->opcode = command;
	slot->setup_ns = bpf_ktime_get_ns();
	if (unlikely_true(spilled.spilled))
		UPDATE(nvme_spill, &request, slot);
	return 0;
}

/* First sign on the queue of what is being read, if it came after the command went out. */
inline_always u64 nvme_arrival(u64 request, struct kv_command *slot)
{
	u64 queue = (u64)READ(blk_mq_hw_ctx, driver_data, READ(request, mq_hctx, request));
	u64 since = slot->sent_ns ? slot->sent_ns : slot->setup_ns, found;
	struct kv_arrivals *arrivals = LOOKUP(nvme_arrivals, &queue);

	if (!arrivals)
		return 0;
	found = arrivals->reading_ns;
	if (found < since)
		found = arrivals->last_ns;
	return found < since ? 0 : found;
}

inline_always void nvme_row(u64 request, struct kv_command *slot)
{
	u64 arrived_ns = slot->arrived_ns;
	struct kv_nvme *row = RESERVE(nvme);

	if (!row)
		return;
	if (slot->transport == NVME_TCP)
		arrived_ns = nvme_arrival(request, slot);
	row->done_ns = bpf_ktime_get_ns();
	row->setup_ns = slot->setup_ns;
	row->sent_ns = slot->sent_ns;
	row->arrived_ns = arrived_ns;
	row->request = kv_request_id(request);
	row->bytes = slot->bytes;
	row->device = slot->device;
	row->nsid = slot->nsid;
	row->controller = slot->controller;
	row->queue = slot->queue;
	row->command_id = slot->command_id;
	row->status = READ_MODULE(nvme_request, status, nvme_of_request(request)) &
		      NVME_STATUS_BITS;
	row->opcode = slot->opcode;
	row->retries = READ_MODULE(nvme_request, retries, nvme_of_request(request));
	row->transport = slot->transport;
	row->reserved = 0;
	SUBMIT(nvme, row);
}

inline_always void nvme_completed(u64 request, u32 index, struct kv_command *slot)
{
	struct kv_request *known = block_find(request, index);

	if (nvme_is_wanted(request, known)) {
		if (known && block_is_thinned(request, known))
			COUNT(thinned_nvme, 1);
		else
			nvme_row(request, slot);
	}
	nvme_release(request, slot);
}

/* See block_done_nested. */
RAW_HOOK(nvme_nested, nvme_complete_rq, nvme_core)
{
	u64 request = ARG(0);
	u32 index = block_request_index(request);
	struct kv_command *slot = LOOKUP(nvme_slots, &index);

	if (unlikely_true(slot && slot->request == request))
		nvme_completed(request, index, slot);
	return 0;
}

RAW_HOOK(nvme_complete, nvme_complete_rq, nvme_core)
{
	u64 request = ARG(0);
	struct kv_command *slot = nvme_find(request);

	if (slot) /* else filtered, from before the session, or failed before it was a command */
		nvme_completed(request, block_request_index(request), slot);
	return 0;
}

inline_always void nvme_was_sent(u64 request)
{
	struct kv_command *slot = nvme_find(request);

	if (slot)
		slot->sent_ns = bpf_ktime_get_ns();
}

/* -------------------------------------------------------------------------------- tcp */

/*
 * The command that the queue will go on sending, or begin with: the one half sent, else the
 * first of those listed, else the oldest of those that submitters pushed meanwhile, newest first.
 */
inline_always u64 nvme_tcp_next(u64 queue)
{
	u64 own = (u64)READ_MODULE(nvme_tcp_queue, request, queue), list, node, older;
	u32 i;

	if (own)
		return own;
	list = ADDRESS(nvme_tcp_queue, send_list, queue);
	node = (u64)READ(list_head, next, list);
	if (node && node != list)
		return CONTAINER(nvme_tcp_request, entry, node);
	node = (u64)READ(llist_head, first, ADDRESS(nvme_tcp_queue, req_list, queue));
	for (i = 0; node && i < NVME_LISTED; i++) {
		older = (u64)READ(llist_node, next, node);
		if (!older)
			return CONTAINER(nvme_tcp_request, lentry, node);
		node = older;
	}
	return 0;
}

FUNCTION_ENTER(nvme_tcp_send, nvme_tcp_try_send, nvme_tcp)
{
	u64 own = nvme_tcp_next(FUNCTION_ARG(0));

	if (own)
		nvme_was_sent(nvme_request_of(own));
	return 0;
}

inline_always void nvme_tcp_arrived(u64 queue)
{
	u64 now = bpf_ktime_get_ns();
	struct kv_arrivals *arrivals = LOOKUP(nvme_arrivals, &queue);
	struct kv_arrivals first = {.waiting_ns = now, .last_ns = now};

	if (unlikely_true(!arrivals)) {
		UPDATE(nvme_arrivals, &queue, &first);
		return;
	}
	if (!arrivals->waiting_ns)
		arrivals->waiting_ns = now;
	arrivals->last_ns = now;
}

/* Fires for every socket of the host; before 6.4 there is only the function. */
RAW_HOOK(nvme_tcp_ready, sk_data_ready, nvme_tcp)
{
	u64 queue = nvme_tcp_queue_of(ARG(0));

	if (queue)
		nvme_tcp_arrived(queue);
	return 0;
}

FUNCTION_ENTER(nvme_tcp_callback, nvme_tcp_data_ready, nvme_tcp)
{
	u64 queue = nvme_tcp_queue_of(FUNCTION_ARG(0));

	if (queue)
		nvme_tcp_arrived(queue);
	return 0;
}

/* It reads all that has arrived, and completes what that answers, before it returns. */
FUNCTION_ENTER(nvme_tcp_receive, nvme_tcp_try_recv, nvme_tcp)
{
	u64 queue = FUNCTION_ARG(0);
	struct kv_arrivals *arrivals = LOOKUP(nvme_arrivals, &queue);

	if (arrivals && arrivals->waiting_ns) {
		arrivals->reading_ns = arrivals->waiting_ns;
		arrivals->waiting_ns = 0;
	}
	return 0;
}

/* ------------------------------------------------------------------------------- rdma */

FUNCTION_ENTER(nvme_rdma_send, nvme_rdma_post_send, nvme_rdma)
{
	nvme_was_sent(nvme_request_of(CONTAINER(nvme_rdma_request, sqe, FUNCTION_ARG(1))));
	return 0;
}

/* The request of a completion entry: by its tag, as the driver finds it. */
inline_always u64 nvme_rdma_request_of(u64 queue, u32 command_id)
{
	u64 controller = (u64)READ_MODULE(nvme_rdma_queue, ctrl, queue), first, tags;
	u32 number;

	first = (u64)READ_MODULE(nvme_rdma_ctrl, queues, controller);
	number = (queue - first) / TYPE_SIZE(nvme_rdma_queue);
	if (!number) /* admin */
		return 0;
	tags = (u64)READ(blk_mq_tag_set, tags, ADDRESS(nvme_rdma_ctrl, tag_set, controller));
	tags = READ_AT(u64, tags + 8ULL * (number - 1));
	return READ_AT(u64, (u64)READ(blk_mq_tags, rqs, tags) +
				    8ULL * (command_id & NVME_TAG_BITS));
}

FUNCTION_ENTER(nvme_rdma_receive, nvme_rdma_recv_done, nvme_rdma)
{
	u64 done = FUNCTION_ARG(1), element, entry, queue, request;
	struct kv_command *slot;

	if (READ_MODULE(ib_wc, status, done) != NVME_RDMA_SUCCESS)
		return 0;
	element = CONTAINER(nvme_rdma_qe, cqe, READ_MODULE(ib_wc, wr_cqe, done));
	entry = (u64)READ_MODULE(nvme_rdma_qe, data, element);
	queue = (u64)READ_MODULE(ib_qp, qp_context, READ_MODULE(ib_wc, qp, done));
	request = nvme_rdma_request_of(queue, READ_AT(u16, entry + NVME_COMMAND_ID));
	slot = request ? nvme_find(request) : NULL;
	if (slot)
		slot->arrived_ns = bpf_ktime_get_ns();
	return 0;
}
