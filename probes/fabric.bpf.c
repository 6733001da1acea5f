/* SPDX-License-Identifier: GPL-2.0 */
/*
 * fabric: one row per event of an NVMe path: what happened to its connections, its controller and
 * its namespaces. All of it happens in interrupts and kernel threads, so filters do not apply;
 * connections of others are left out. Repeated news are told once.
 */

#include "nvme.bpf.h"

struct rb_root {
	struct rb_node *rb_node;
} KERNEL_STRUCT;

struct tcp_sock {
	u32 rcv_nxt;
	struct rb_root out_of_order_queue;
} KERNEL_STRUCT;

struct tcp_skb_cb {
	u32 seq;
} KERNEL_STRUCT;

struct sk_buff {
	char cb[48];
} KERNEL_STRUCT;

struct bio_list {
	struct bio *head;
} KERNEL_STRUCT;

struct nvme_ns_head___fabric {
	struct bio_list requeue_list;
	struct work_struct requeue_work;
} KERNEL_STRUCT;

/* FabricKind in kvprobe/schema.py */
enum {
	FABRIC_RETRANSMIT = 1,
	FABRIC_CONGESTION_STATE = 2,
	FABRIC_SEND_SPACE = 3,
	FABRIC_CONNECTION_STATE = 4,
	FABRIC_ERROR_RECOVERY = 5,
	FABRIC_RECONNECT = 6,
	FABRIC_COMMAND_TIMEOUT = 7,
	FABRIC_FAILOVER = 8,
	FABRIC_REQUEUE = 9,
	FABRIC_PATH_LOST = 10,
	FABRIC_PATH_LIVE = 11,
	FABRIC_RECEIVE_GAP = 12,
	FABRIC_NO_QUEUE = 0xffff,
};

/* When a path was last lost and live, by its disk; when a controller was last live. */
struct kv_path {
	u64 lost_ns;
	u64 live_ns;
};

LRU_HASH(fabric_paths, u32, struct kv_path, 4096);
LRU_HASH(fabric_controllers, u64, u64, 1024);
LRU_HASH(fabric_congestion, u64, u64, 8192);
RING(fabric);

inline_always struct kv_fabric *fabric_begin(u32 kind, u64 controller)
{
	struct kv_fabric *row = RESERVE(fabric);

	if (!row)
		return NULL;
	row->time_ns = bpf_ktime_get_ns();
	row->request = 0;
	row->value = 0;
	row->device = 0;
	row->controller = controller ? READ_MODULE(nvme_ctrl, instance, controller) :
				       FABRIC_NO_QUEUE;
	row->queue = FABRIC_NO_QUEUE;
	row->kind = kind;
	row->reserved = 0;
	row->unused = 0;
	row->padding = 0;
	return row;
}

/* ------------------------------------------------------------------------ connections */

inline_always void fabric_of_queue(u32 kind, u64 queue, u64 value)
{
	u64 own = (u64)READ_MODULE(nvme_tcp_queue, ctrl, queue), first;
	struct kv_fabric *row = fabric_begin(kind, ADDRESS(nvme_tcp_ctrl, ctrl, own));

	if (!row)
		return;
	first = (u64)READ_MODULE(nvme_tcp_ctrl, queues, own);
	row->queue = (queue - first) / TYPE_SIZE(nvme_tcp_queue);
	row->value = value;
	SUBMIT(fabric, row);
}

RAW_HOOK(fabric_sent_again, tcp_retransmit_skb, nvme_tcp)
{
	u64 queue = nvme_tcp_queue_of(ARG(0));

	if (queue)
		fabric_of_queue(FABRIC_RETRANSMIT, queue, 0);
	return 0;
}

/* What a target sends is sent again by the target; here it shows as a gap in what arrives. Called
 * for segments off the fast path; only the first one behind a gap counts. */
FUNCTION_ENTER(fabric_gap, tcp_data_queue, nvme_tcp)
{
	u64 socket = FUNCTION_ARG(0), queue = nvme_tcp_queue_of(socket);
	s32 ahead;

	if (!queue)
		return 0;
	ahead = READ(tcp_skb_cb, seq, ADDRESS(sk_buff, cb, FUNCTION_ARG(1))) -
		READ(tcp_sock, rcv_nxt, socket);
	if (ahead > 0 && !READ(rb_root, rb_node, ADDRESS(tcp_sock, out_of_order_queue, socket)))
		fabric_of_queue(FABRIC_RECEIVE_GAP, queue, 0);
	return 0;
}

RAW_HOOK(fabric_congested, tcp_cong_state_set, nvme_tcp)
{
	u64 queue = nvme_tcp_queue_of(ARG(0)), state = ARG(1) & 0xff, *last;

	if (!queue)
		return 0;
	last = LOOKUP(fabric_congestion, &queue);
	if (last ? *last == state : !state) /* a connection begins open */
		return 0;
	UPDATE(fabric_congestion, &queue, &state);
	fabric_of_queue(FABRIC_CONGESTION_STATE, queue, state);
	return 0;
}

RAW_HOOK(fabric_connection, inet_sock_set_state, nvme_tcp)
{
	u64 queue = nvme_tcp_queue_of(ARG(0));

	if (queue)
		fabric_of_queue(FABRIC_CONNECTION_STATE, queue, ARG(2) & 0xff);
	return 0;
}

/* Called only after a send found no room. The driver goes on when a third is free, as
 * sk_stream_is_writeable() has it; until then, news of less room are none. */
FUNCTION_ENTER(fabric_has_space, nvme_tcp_write_space, nvme_tcp)
{
	u64 socket = FUNCTION_ARG(0), queue = nvme_tcp_queue_of(socket);
	s32 size, used;

	if (!queue)
		return 0;
	size = READ(sock, sk_sndbuf, socket);
	used = READ(sock, sk_wmem_queued, socket);
	if (size - used >= used >> 1)
		fabric_of_queue(FABRIC_SEND_SPACE, queue, 0);
	return 0;
}

/* ------------------------------------------------------------------------ controllers */

inline_always void fabric_of_controller(u32 kind, u64 controller)
{
	struct kv_fabric *row = fabric_begin(kind, controller);

	if (row)
		SUBMIT(fabric, row);
}

FUNCTION_ENTER(fabric_tcp_gave_up, nvme_tcp_error_recovery_work, nvme_tcp)
{
	u64 own = CONTAINER(nvme_tcp_ctrl, err_work, FUNCTION_ARG(0));

	fabric_of_controller(FABRIC_ERROR_RECOVERY, ADDRESS(nvme_tcp_ctrl, ctrl, own));
	return 0;
}

FUNCTION_ENTER(fabric_rdma_gave_up, nvme_rdma_error_recovery_work, nvme_rdma)
{
	u64 own = CONTAINER(nvme_rdma_ctrl, err_work, FUNCTION_ARG(0));

	fabric_of_controller(FABRIC_ERROR_RECOVERY, ADDRESS(nvme_rdma_ctrl, ctrl, own));
	return 0;
}

/* The work of a delayed work is its first member. */
FUNCTION_ENTER(fabric_tcp_connects, nvme_tcp_reconnect_ctrl_work, nvme_tcp)
{
	u64 own = CONTAINER(nvme_tcp_ctrl, connect_work, FUNCTION_ARG(0));

	fabric_of_controller(FABRIC_RECONNECT, ADDRESS(nvme_tcp_ctrl, ctrl, own));
	return 0;
}

FUNCTION_ENTER(fabric_rdma_connects, nvme_rdma_reconnect_ctrl_work, nvme_rdma)
{
	u64 own = CONTAINER(nvme_rdma_ctrl, reconnect_work, FUNCTION_ARG(0));

	fabric_of_controller(FABRIC_RECONNECT, ADDRESS(nvme_rdma_ctrl, ctrl, own));
	return 0;
}

inline_always void fabric_of_request(u32 kind, u64 request)
{
	struct kv_fabric *row = fabric_begin(kind, nvme_controller_of(request));

	if (!row)
		return;
	row->request = kv_request_id(request);
	row->queue = nvme_is_admin(request) ? 0 : nvme_queue_of(request);
	row->device = kv_disk_device(kv_request_disk(request));
	SUBMIT(fabric, row);
}

FUNCTION_ENTER(fabric_tcp_timeout, nvme_tcp_timeout, nvme_tcp)
{
	fabric_of_request(FABRIC_COMMAND_TIMEOUT, FUNCTION_ARG(0));
	return 0;
}

FUNCTION_ENTER(fabric_rdma_timeout, nvme_rdma_timeout, nvme_rdma)
{
	fabric_of_request(FABRIC_COMMAND_TIMEOUT, FUNCTION_ARG(0));
	return 0;
}

FUNCTION_ENTER(fabric_pci_timeout, nvme_timeout, nvme)
{
	fabric_of_request(FABRIC_COMMAND_TIMEOUT, FUNCTION_ARG(0));
	return 0;
}

/* -------------------------------------------------------------------------- multipath */

FUNCTION_ENTER(fabric_failover, nvme_failover_req, nvme_core)
{
	fabric_of_request(FABRIC_FAILOVER, FUNCTION_ARG(0));
	return 0;
}

/* Also runs, with nothing to do, whenever a path comes or goes. */
FUNCTION_ENTER(fabric_requeue, nvme_requeue_work, nvme_core)
{
	u64 head = CONTAINER(nvme_ns_head___fabric, requeue_work, FUNCTION_ARG(0));
	struct kv_fabric *row;

	if (!READ(bio_list, head, ADDRESS(nvme_ns_head___fabric, requeue_list, head)))
		return 0;
	row = fabric_begin(FABRIC_REQUEUE, 0);
	if (!row)
		return 0;
	row->device = kv_disk_device((u64)READ_MODULE(nvme_ns_head, disk, head));
	SUBMIT(fabric, row);
	return 0;
}

inline_always void fabric_of_path(u32 kind, u64 namespace, u32 device)
{
	struct kv_fabric *row = fabric_begin(kind, (u64)READ_MODULE(nvme_ns, ctrl, namespace));

	if (!row)
		return;
	row->device = device;
	SUBMIT(fabric, row);
}

inline_always u32 fabric_device_of(u64 namespace)
{
	return kv_disk_device((u64)READ_MODULE(nvme_ns, disk, namespace));
}

/* Every command that fails over says it again. */
FUNCTION_ENTER(fabric_path_lost, nvme_mpath_clear_current_path, nvme_core)
{
	u64 namespace = FUNCTION_ARG(0), controller, *live;
	u32 device = fabric_device_of(namespace);
	struct kv_path *known = LOOKUP(fabric_paths, &device), path;

	__builtin_memset(&path, 0, sizeof(path));
	if (known) {
		controller = (u64)READ_MODULE(nvme_ns, ctrl, namespace);
		live = LOOKUP(fabric_controllers, &controller);
		if (known->lost_ns > known->live_ns && (!live || *live < known->lost_ns))
			return 0;
		path.live_ns = known->live_ns;
	}
	path.lost_ns = bpf_ktime_get_ns();
	UPDATE(fabric_paths, &device, &path);
	fabric_of_path(FABRIC_PATH_LOST, namespace, device);
	return 0;
}

/* Said of every path of a controller whenever the target tells the state of one. */
FUNCTION_ENTER(fabric_path_live, nvme_mpath_set_live, nvme_core)
{
	u64 namespace = FUNCTION_ARG(0);
	u32 device = fabric_device_of(namespace);
	struct kv_path *known = LOOKUP(fabric_paths, &device), path;

	__builtin_memset(&path, 0, sizeof(path));
	if (known) {
		if (known->live_ns > known->lost_ns)
			return 0;
		path.lost_ns = known->lost_ns;
	}
	path.live_ns = bpf_ktime_get_ns();
	UPDATE(fabric_paths, &device, &path);
	fabric_of_path(FABRIC_PATH_LIVE, namespace, device);
	return 0;
}

/* A controller became live: where the target tells no states, so did its paths. */
FUNCTION_ENTER(fabric_controller_live, nvme_kick_requeue_lists, nvme_core)
{
	u64 controller = FUNCTION_ARG(0), now = bpf_ktime_get_ns();

	UPDATE(fabric_controllers, &controller, &now);
	return 0;
}
