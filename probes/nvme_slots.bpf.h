/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nvme, part: commands in flight.
 */

#include "nvme.bpf.h"

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
