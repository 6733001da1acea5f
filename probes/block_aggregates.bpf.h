/* SPDX-License-Identifier: GPL-2.0 */
/*
 * block, part: per device and direction the time at each queue depth, and a histogram of
 * size x latency.
 */

enum {
	KV_QUEUES = 256, /* devices x directions */
	KV_DEPTHS = 256,
	KV_SIZES = 18,
	KV_LATENCIES = 121,
	KV_NO_QUEUE = 0xffffffff,
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

HASH(block_devices, u32, u32, KV_QUEUES);
ARRAY(block_device_count, u32, 1);
ARRAY(block_depth, struct kv_depth, KV_QUEUES);
ARRAY(block_histogram, struct kv_histogram, KV_QUEUES);

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
	FORGET(depth);
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
