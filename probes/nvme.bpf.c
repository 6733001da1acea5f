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

#include "nvme_transport.bpf.h"

RING(nvme);

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
