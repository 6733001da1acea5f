/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the probes nvme and fabric know of the NVMe driver. All of these structures are modules'
 * (nvme_core, nvme_tcp, nvme_rdma); only the fields that are read.
 */

struct nvme_ctrl_ops {
	const char *name;
} KERNEL_STRUCT;

struct nvme_ctrl {
	int instance;
	const struct nvme_ctrl_ops *ops;
} KERNEL_STRUCT;

struct nvme_request {
	u8 retries;
	u16 status;
	struct nvme_ctrl *ctrl;
} KERNEL_STRUCT;

struct blk_mq_tags {
	struct request **rqs;
} KERNEL_STRUCT;

struct blk_mq_tag_set {
	struct blk_mq_tags **tags;
} KERNEL_STRUCT;

struct work_struct {
	void *func;
} KERNEL_STRUCT;

struct delayed_work {
	struct work_struct work;
} KERNEL_STRUCT;

struct list_head {
	struct list_head *next;
} KERNEL_STRUCT;

struct llist_node {
	struct llist_node *next;
} KERNEL_STRUCT;

struct llist_head {
	struct llist_node *first;
} KERNEL_STRUCT;

struct sock {
	void *sk_data_ready;
	void *sk_user_data;
	int sk_sndbuf;
	int sk_wmem_queued;
} KERNEL_STRUCT;

struct nvme_tcp_request {
	struct list_head entry;
	struct llist_node lentry;
} KERNEL_STRUCT;

struct nvme_tcp_queue {
	struct llist_head req_list;
	struct list_head send_list;
	struct nvme_tcp_request *request;
	struct nvme_tcp_ctrl *ctrl;
} KERNEL_STRUCT;

struct nvme_tcp_ctrl {
	struct nvme_tcp_queue *queues;
	struct nvme_ctrl ctrl;
	struct work_struct err_work;
	struct delayed_work connect_work;
} KERNEL_STRUCT;

struct ib_cqe {
	void *done;
} KERNEL_STRUCT;

struct nvme_rdma_qe {
	struct ib_cqe cqe;
	void *data;
} KERNEL_STRUCT;

struct nvme_rdma_request {
	struct nvme_rdma_qe sqe;
} KERNEL_STRUCT;

struct nvme_rdma_queue {
	struct nvme_rdma_ctrl *ctrl;
} KERNEL_STRUCT;

struct nvme_rdma_ctrl {
	struct nvme_rdma_queue *queues;
	struct blk_mq_tag_set tag_set;
	struct nvme_ctrl ctrl;
	struct work_struct err_work;
	struct delayed_work reconnect_work;
} KERNEL_STRUCT;

/* SK_USER_DATA_NOCOPY and its kin */
#define NVME_SOCKET_FLAGS 7ULL

/* The driver's own part of a request lies right behind it. */
inline_always u64 nvme_of_request(u64 request)
{
	return request + TYPE_SIZE(request);
}

inline_always u64 nvme_request_of(u64 own)
{
	return own - TYPE_SIZE(request);
}

inline_always u64 nvme_controller_of(u64 request)
{
	return (u64)READ_MODULE(nvme_request, ctrl, nvme_of_request(request));
}

/* Admin and connect queues belong to no namespace; they are queue 0. */
inline_always bool nvme_is_admin(u64 request)
{
	return !READ(request_queue, queuedata, READ(request, q, request));
}

inline_always u32 nvme_queue_of(u64 request)
{
	return READ(blk_mq_hw_ctx, queue_num, READ(request, mq_hctx, request)) + 1;
}

/* The nvme-tcp queue behind a socket, 0 for other sockets. */
inline_always u64 nvme_tcp_queue_of(u64 socket)
{
	if (!SYMBOL(nvme_tcp_data_ready) ||
	    (u64)READ(sock, sk_data_ready, socket) != SYMBOL(nvme_tcp_data_ready))
		return 0;
	return (u64)READ(sock, sk_user_data, socket) & ~NVME_SOCKET_FLAGS;
}
