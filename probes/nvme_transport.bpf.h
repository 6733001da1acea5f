/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nvme, part: when a transport sent a command, and when its answer arrived.
 */

#include "nvme_slots.bpf.h"

struct ib_qp {
	void *qp_context;
} KERNEL_STRUCT;

struct ib_wc {
	void *wr_cqe;
	enum { NVME_RDMA_SUCCESS = 0 } status; /* libbpf wants an enumeration, as the kernel has */
	struct ib_qp *qp;
} KERNEL_STRUCT;

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
