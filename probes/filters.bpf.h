/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Who and what is traced, decided before anything is reserved. kvprobe/bpf/session.py fills the
 * maps: targets (processes; children join here), roots (directories whose files count; as many
 * entries as there are, set at load).
 */

struct kv_file {
	u64 inode;
	u64 device;
};

struct kv_control {
	u64 keep_one_in;
	u64 start_ns; /* since when the aggregates count */
};

/* KV_DEEPEST: folders between a file and the root; where inlined, the verifier walks each. */
enum { KV_ROOT = 1, KV_ABOVE_ROOT = 2, KV_DEEPEST = PER_LOADER(32, 16) };
enum { KV_STRANGER = 0, KV_TARGET = 1, KV_KERNEL_THREAD = 2 };

HASH(targets, u32, u32, 16384);
HASH(roots, struct kv_file, u32, 1);
LRU_HASH(traffic, struct kv_file, u32, 65536);
ARRAY(control, struct kv_control, 1);
PER_CPU_ARRAY(counters, u64, KV_COUNTERS);

inline_always void kv_count(u32 counter, u64 n)
{
	u64 *sum = LOOKUP(counters, &counter);

	if (sum)
		ATOMIC_ADD(sum, n);
}

/* Joins tables without giving away where the kernel's memory lies. */
inline_always u64 kv_request_id(u64 request)
{
	return request ^ CONFIG(secret);
}

/* The whole disk's number. 0 for a queue without a disk, as of an NVMe controller itself. */
inline_always u32 kv_disk_device(u64 disk)
{
	return disk ? READ(block_device, bd_dev, READ(gendisk, part0, disk)) : 0;
}

/* request.part is not set yet when a request begins. */
inline_always u64 kv_request_disk(u64 request)
{
	return (u64)READ(request_queue, disk, READ(request, q, request));
}

/* Never given twice, while the memory and the number of a disk that went away are (5.15). */
inline_always u64 kv_disk_serial(u64 disk)
{
	return HAS_FIELD(gendisk, diskseq) ? READ(gendisk, diskseq, disk) : disk;
}

/* Requests for a native multipath disk go to the hidden disks of its paths. */
inline_always int kv_is_device(u64 disk)
{
	u64 namespace, head;

	if (!CONFIG(device) || kv_disk_device(disk) == CONFIG(device))
		return 1;
	if (!CONFIG(device_has_paths) || !disk)
		return 0;
	namespace = (u64)READ(gendisk, private_data, disk);
	if ((u64)READ_MODULE(nvme_ns, disk, namespace) != disk) /* another driver's disk */
		return 0;
	head = (u64)READ_MODULE(nvme_ns, head, namespace);
	return kv_disk_device((u64)READ_MODULE(nvme_ns_head, disk, head)) == CONFIG(device);
}

/* kvprobe itself is never traced. */
inline_always int kv_is_target(u32 tgid)
{
	if (tgid == CONFIG(own_tgid))
		return 0;
	if (!CONFIG(filter_tgids))
		return 1;
	return LOOKUP(targets, &tgid) != NULL;
}

/* Kernel threads submit for others (write-back, throttled I/O): the file decides, later. */
inline_always u32 kv_submitter(u32 tgid, u32 task_flags)
{
	if (kv_is_target(tgid))
		return KV_TARGET;
	if (CONFIG(filter_tgids) && task_flags & PF_KTHREAD)
		return KV_KERNEL_THREAD;
	return KV_STRANGER;
}

inline_always u64 kv_file_dentry(u64 file)
{
	return (u64)READ(path, dentry, ADDRESS(file, f_path, file));
}

inline_always u64 kv_inode_dentry(u64 inode)
{
	u64 alias = (u64)READ(hlist_head, first, ADDRESS(inode, i_dentry, inode));

	return alias ? CONTAINER(dentry, d_u, alias) : 0;
}

inline_always u32 kv_inode_device(u64 inode)
{
	return READ(super_block, s_dev, READ(inode, i_sb, inode));
}

/* Is this directory entry the root directory, below it, or in a file system mounted below it? */
SUBPROGRAM int kv_under_root(u64 dentry, u32 device)
{
	u64 parent, inode;
	u32 i;

	for (i = 0; i < KV_DEEPEST && dentry; i++) {
		inode = (u64)READ(dentry, d_inode, dentry);
		if (inode) {
			struct kv_file at = {.inode = READ(inode, i_ino, inode), .device = device};

			if (at.inode == CONFIG(root_inode) && device == CONFIG(root_device))
				return 1;
			if (CONFIG(more_roots)) {
				u32 *what = LOOKUP(roots, &at);

				if (what && *what == KV_ROOT)
					return 1;
			}
		}
		parent = (u64)READ(dentry, d_parent, dentry);
		if (parent == dentry)
			return 0;
		dentry = parent;
	}
	return 0;
}

/* Files that targets use: how a request submitted by a kernel thread is known to be theirs. */
inline_always void kv_remember(u64 inode, u32 device)
{
	struct kv_file key = {.inode = inode, .device = device};
	u32 one = 1;

	if (CONFIG(remember_files) && !LOOKUP(traffic, &key))
		UPDATE(traffic, &key, &one);
}

inline_always int kv_is_remembered(u64 inode, u32 device)
{
	struct kv_file key = {.inode = inode, .device = device};

	return LOOKUP(traffic, &key) != NULL;
}

/* Descriptor -> struct file of the current process, 0 where it is not open. */
inline_always u64 kv_file_of(u32 descriptor)
{
	u64 table = (u64)READ(files_struct, fdt,
			      READ(task_struct, files, bpf_get_current_task()));

	if (descriptor >= READ(fdtable, max_fds, table))
		return 0;
	return READ_AT(u64, (u64)READ(fdtable, fd, table) + 8ULL * descriptor);
}

/* ------------------------------------------------------------------------------ hooks */

RAW_HOOK(targets_fork, sched_process_fork)
{
	u32 parent = READ(task_struct, tgid, ARG(0)), child = READ(task_struct, tgid, ARG(1));

	if (parent != child && LOOKUP(targets, &parent))
		UPDATE(targets, &child, &parent);
	return 0;
}

RAW_HOOK(targets_exit, sched_process_exit)
{
	u64 task = ARG(0);
	u32 tgid = READ(task_struct, tgid, task);
	int live = READ_AT(int, ADDRESS(signal_struct, live, READ(task_struct, signal, task)));

	if (live == 0)
		DELETE(targets, &tgid);
	return 0;
}
