/* SPDX-License-Identifier: GPL-2.0 */
/*
 * lookups: one row per existence test (access, stat), open and rename, with the path and the
 * answer. The path is read when the call returns: by then its page has been touched.
 */

/* LookupKind in kvprobe/schema.py */
enum {
	LOOKUPS_ACCESS = 1,
	LOOKUPS_STAT = 2,
	LOOKUPS_OPEN = 3,
	LOOKUPS_RENAME_FROM = 4,
	LOOKUPS_RENAME_TO = 5,
};

enum {
	LOOKUPS_SLOTS = 65536,
	LOOKUPS_SPILLED = 4096,
	LOOKUPS_WORDS = 16, /* of a root's path that are compared; roots.PREFIX_BYTES */
	LOOKUPS_PATH = sizeof(((struct kv_lookups *)0)->path),
};

#define AT_EMPTY_PATH 0x1000
#define LOOKUPS_NO_FLAGS (~0U)

struct lookups_call {
	u64 start_ns;
	u64 path;
	u64 second_path; /* of a rename */
	u32 tid;	 /* 0: slot is free */
	u32 tgid;
	u32 flags;
	u32 kind;
	s32 folder; /* descriptor where a relative path starts; negative: working directory */
	s32 second_folder;
};

/* A root's path with a slash at its end, and ones where it has bytes. */
struct kv_prefix {
	u64 bytes[LOOKUPS_WORDS];
	u64 mask[LOOKUPS_WORDS];
};

ARRAY(lookups_calls, struct lookups_call, LOOKUPS_SLOTS);
HASH(lookups_calls_spill, u32, struct lookups_call, LOOKUPS_SPILLED);
ARRAY(lookups_prefixes, struct kv_prefix, 2);
RING(lookups);

inline_always struct lookups_call *lookups_call_of(u32 tid)
{
	u32 index = tid & (LOOKUPS_SLOTS - 1);
	struct lookups_call *slot = LOOKUP(lookups_calls, &index);

	if (!slot || slot->tid == tid)
		return slot;
	return LOOKUP(lookups_calls_spill, &tid);
}

inline_always void lookups_call_end(u32 tid)
{
	u32 index = tid & (LOOKUPS_SLOTS - 1);
	struct lookups_call *slot = LOOKUP(lookups_calls, &index);

	if (slot && slot->tid == tid)
		slot->tid = 0;
	else
		DELETE(lookups_calls_spill, &tid);
}

inline_always int lookups_enter(u32 kind, s32 folder, u64 path, u32 flags, s32 second_folder,
				u64 second_path)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = id, index = tid & (LOOKUPS_SLOTS - 1);
	struct lookups_call *slot;

	if (!kv_is_target(id >> 32))
		return 0;
	struct lookups_call call = {
		.start_ns = bpf_ktime_get_ns(),
		.path = path,
		.second_path = second_path,
		.tid = tid,
		.tgid = id >> 32,
		.flags = flags,
		.kind = kind,
		.folder = folder,
		.second_folder = second_folder,
	};
	slot = LOOKUP(lookups_calls, &index);
	if (!slot)
		return 0;
	if (!slot->tid || slot->tid == tid)
		*slot = call;
	else
		UPDATE(lookups_calls_spill, &tid, &call);
	return 0;
}

/* ------------------------------------------------------------------------------- paths */

inline_always int lookups_has_prefix(u64 path, u32 which)
{
	struct kv_prefix *prefix = LOOKUP(lookups_prefixes, &which);
	u64 words[LOOKUPS_WORDS] = {};
	u32 i;

	/* Its end may lie on a page that is not there: then what was read is compared. */
	if (!prefix || !prefix->mask[0])
		return 0;
	if (bpf_probe_read_user_str(words, sizeof(words), (void *)path) < 0)
		return 0;
	for (i = 0; i < LOOKUPS_WORDS; i++) {
		if ((words[i] & prefix->mask[i]) != prefix->bytes[i])
			return 0;
	}
	return 1;
}

/* A relative path is passed on where it starts below the root or on the way to it: user space
 * resolves it. */
inline_always int lookups_starts_near(s32 folder)
{
	u64 task = bpf_get_current_task(), dentry, inode, file;
	struct kv_file at = {};

	if (folder < 0) {
		u64 fs = (u64)READ(task_struct, fs, task);

		dentry = (u64)READ(path, dentry, ADDRESS(fs_struct, pwd, fs));
	} else {
		file = kv_file_of(folder);
		if (!file)
			return 0;
		dentry = kv_file_dentry(file);
	}
	inode = (u64)READ(dentry, d_inode, dentry);
	if (!inode)
		return 0;
	at.inode = READ(inode, i_ino, inode);
	at.device = kv_inode_device(inode);
	return LOOKUP(roots, &at) != NULL || kv_under_root(dentry, at.device);
}

SUBPROGRAM int lookups_is_wanted(u64 path, u64 folder)
{
	if (!CONFIG(root_inode))
		return 1;
	if (READ_USER(u8, path) != '/')
		return lookups_starts_near(folder);
	return lookups_has_prefix(path, 0) || lookups_has_prefix(path, 1);
}

struct lookups_answer {
	u64 start_ns;
	u64 end_ns;
	u64 inode;
	u64 path;
	u32 device;
	u32 tgid;
	u32 tid;
	u32 flags;
	u32 kind;
	s32 folder;
	s32 result;
};

inline_always void lookups_row(struct lookups_answer *seen)
{
	struct kv_lookups *row = RESERVE(lookups);
	long length;

	if (!row)
		return;
	row->start_ns = seen->start_ns;
	row->end_ns = seen->end_ns;
	row->inode = seen->inode;
	row->fs_device = seen->device;
	row->tgid = seen->tgid;
	row->tid = seen->tid;
	row->result = seen->result;
	row->open_flags = seen->flags;
	row->kind = seen->kind;
	row->cut = 0;
	/* For user space, which clears it: where a relative path starts. */
	row->reserved = seen->folder < 0 ? 0 : seen->folder + 1;
	length = bpf_probe_read_user_str(row->path, LOOKUPS_PATH, (void *)seen->path);
	if (length < 0)
		row->path[0] = 0;
	else if (length == LOOKUPS_PATH && READ_USER(u8, seen->path + LOOKUPS_PATH - 1))
		row->cut = 1;
	SUBMIT(lookups, row);
}

/* The file of a successful open is known better than by its name. */
inline_always int lookups_opened(u32 descriptor, struct lookups_answer *seen)
{
	u64 file = kv_file_of(descriptor), inode;

	if (!file)
		return 0;
	inode = (u64)READ(file, f_inode, file);
	seen->inode = READ(inode, i_ino, inode);
	seen->device = kv_inode_device(inode);
	if (CONFIG(root_inode) && !kv_under_root(kv_file_dentry(file), seen->device))
		return 0;
	kv_remember(seen->inode, seen->device);
	return 1;
}

inline_always int lookups_exit(s64 result)
{
	u32 tid = bpf_get_current_pid_tgid();
	struct lookups_call *call = lookups_call_of(tid);
	u64 second_path;
	s32 second_folder;

	if (!call)
		return 0;
	struct lookups_answer seen = {
		.start_ns = call->start_ns,
		.end_ns = bpf_ktime_get_ns(),
		.path = call->path,
		.tgid = call->tgid,
		.tid = tid,
		.flags = call->flags,
		.kind = call->kind,
		.folder = call->folder,
		.result = result,
	};
	second_path = call->second_path;
	second_folder = call->second_folder;
	lookups_call_end(tid);
	if (seen.kind == LOOKUPS_OPEN && result >= 0) {
		if (!lookups_opened(result, &seen))
			return 0;
	} else if (!lookups_is_wanted(seen.path, seen.folder)) {
		if (!second_path || !lookups_is_wanted(second_path, second_folder))
			return 0;
	}
	lookups_row(&seen);
	if (second_path) {
		seen.kind = LOOKUPS_RENAME_TO;
		seen.path = second_path;
		seen.folder = second_folder;
		lookups_row(&seen);
	}
	return 0;
}

/* ------------------------------------------------------------------------------- tests */

enum { LOOKUPS_HERE = -1 };

SYSCALL_ENTER(lookups_access_enter, access)
{
	return lookups_enter(LOOKUPS_ACCESS, LOOKUPS_HERE, SYSCALL_ARG(0), LOOKUPS_NO_FLAGS, 0, 0);
}

SYSCALL_ENTER(lookups_faccessat_enter, faccessat)
{
	return lookups_enter(LOOKUPS_ACCESS, SYSCALL_ARG(0), SYSCALL_ARG(1), LOOKUPS_NO_FLAGS, 0,
			     0);
}

SYSCALL_ENTER(lookups_faccessat2_enter, faccessat2)
{
	return lookups_enter(LOOKUPS_ACCESS, SYSCALL_ARG(0), SYSCALL_ARG(1), LOOKUPS_NO_FLAGS, 0,
			     0);
}

SYSCALL_ENTER(lookups_newstat_enter, newstat)
{
	return lookups_enter(LOOKUPS_STAT, LOOKUPS_HERE, SYSCALL_ARG(0), LOOKUPS_NO_FLAGS, 0, 0);
}

SYSCALL_ENTER(lookups_newlstat_enter, newlstat)
{
	return lookups_enter(LOOKUPS_STAT, LOOKUPS_HERE, SYSCALL_ARG(0), LOOKUPS_NO_FLAGS, 0, 0);
}

/* With AT_EMPTY_PATH it is about a descriptor: no look-up. */
SYSCALL_ENTER(lookups_newfstatat_enter, newfstatat)
{
	if (SYSCALL_ARG(3) & AT_EMPTY_PATH)
		return 0;
	return lookups_enter(LOOKUPS_STAT, SYSCALL_ARG(0), SYSCALL_ARG(1), LOOKUPS_NO_FLAGS, 0, 0);
}

SYSCALL_ENTER(lookups_statx_enter, statx)
{
	if (SYSCALL_ARG(2) & AT_EMPTY_PATH)
		return 0;
	return lookups_enter(LOOKUPS_STAT, SYSCALL_ARG(0), SYSCALL_ARG(1), LOOKUPS_NO_FLAGS, 0, 0);
}

/* ------------------------------------------------------------------------------- opens */

SYSCALL_ENTER(lookups_open_enter, open)
{
	return lookups_enter(LOOKUPS_OPEN, LOOKUPS_HERE, SYSCALL_ARG(0), SYSCALL_ARG(1), 0, 0);
}

SYSCALL_ENTER(lookups_openat_enter, openat)
{
	return lookups_enter(LOOKUPS_OPEN, SYSCALL_ARG(0), SYSCALL_ARG(1), SYSCALL_ARG(2), 0, 0);
}

/* struct open_how begins with 64 bits of flags. */
SYSCALL_ENTER(lookups_openat2_enter, openat2)
{
	return lookups_enter(LOOKUPS_OPEN, SYSCALL_ARG(0), SYSCALL_ARG(1),
			     READ_USER(u64, SYSCALL_ARG(2)), 0, 0);
}

/* ----------------------------------------------------------------------------- renames */

SYSCALL_ENTER(lookups_rename_enter, rename)
{
	return lookups_enter(LOOKUPS_RENAME_FROM, LOOKUPS_HERE, SYSCALL_ARG(0), LOOKUPS_NO_FLAGS,
			     LOOKUPS_HERE, SYSCALL_ARG(1));
}

SYSCALL_ENTER(lookups_renameat_enter, renameat)
{
	return lookups_enter(LOOKUPS_RENAME_FROM, SYSCALL_ARG(0), SYSCALL_ARG(1), LOOKUPS_NO_FLAGS,
			     SYSCALL_ARG(2), SYSCALL_ARG(3));
}

SYSCALL_ENTER(lookups_renameat2_enter, renameat2)
{
	return lookups_enter(LOOKUPS_RENAME_FROM, SYSCALL_ARG(0), SYSCALL_ARG(1), LOOKUPS_NO_FLAGS,
			     SYSCALL_ARG(2), SYSCALL_ARG(3));
}

/* After the calls' beginnings: what ends a row is attached before what begins it. */
SYSCALL_EXIT(lookups_returned, access, faccessat, faccessat2, newstat, newlstat, newfstatat, statx,
	     open, openat, openat2, rename, renameat, renameat2)
{
	return lookups_exit(SYSCALL_RESULT);
}
