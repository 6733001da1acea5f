/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The dialect in which probes are written. One source compiles twice:
 *
 *   core  clang -target bpf -> CO-RE object -> libbpf         (KV_BCC undefined)
 *         and once more with KV_PLAIN, for kernels that lack bpf_rdonly_cast (before 6.2)
 *   bcc   Debian's bcc, on the node, without kernel headers   (KV_BCC defined)
 *
 * kvprobe/bpf/compose.py joins this file, the records made from kvprobe/schema.py, the
 * configuration and the chosen probes into one C text. It finds declarations by the names of the
 * macros below, so write their arguments as plain identifiers. Under bcc a map cannot be used
 * inside a macro; compose.py therefore writes one plain function per map and operation
 * (NAME_lookup, NAME_update, NAME_delete, NAME_reserve, NAME_submit) right after
 * its declaration, and the map macros call those.
 *
 *   RAW_HOOK(program, event) { .. ARG(n) .. }       kernel tracepoint with its kernel arguments
 *   SYSCALL_ENTER(program, call) { .. SYSCALL_ARG(n) .. }
 *   SYSCALL_EXIT(program, call, call ..) { .. SYSCALL_RESULT .. }
 *   FUNCTION_ENTER(program, function) { .. FUNCTION_ARG(n) .. }      kprobe, n from 0 to 5
 *   FUNCTION_EXIT(program, function) { .. FUNCTION_RESULT .. }       kretprobe
 *   LIBRARY_ENTER(program, function, function ..)   the same for functions that the probe's library
 *   LIBRARY_EXIT(program, function, function ..)    exports: uprobe and uretprobe
 *
 * The tracepoint or function of a module names it last: RAW_HOOK(program, event, module). Such a
 * hook is left out where the module is not loaded. A kernel may have no function probes, and a
 * compiler may have inlined the function away: probes must do without.
 *
 *   SUBPROGRAM                            a function that core verifies once, not at every use:
 *                                         numbers in, a number out
 *   PER_LOADER(core, bcc)                 one of two numbers; bcc's loops must be shorter
 *   READ(structure, field, pointer)       one field of a kernel structure, of its declared type
 *   VIEW(structure, pointer)              a pointer for several READs: core casts once
 *   READ_MODULE(structure, field, pointer)   READ for a structure of a module
 *   ADDRESS(structure, field, pointer)    where it is: for embedded structures, strings, arrays
 *   CONTAINER(structure, field, address)  the structure around a field
 *   HAS_FIELD(structure, field), HAS_TYPE(structure), TYPE_SIZE(structure)
 *                                         these and the last two above serve modules' as well
 *   READ_AT(type, address)                a plain value at a kernel address
 *   READ_USER(type, address)              a plain value at a user address
 *
 *   HASH(map, key, value, entries) LRU_HASH(..) ARRAY(map, value, entries) PER_CPU_ARRAY(..)
 *   RING(table)                                     ring buffer of struct kv_TABLE
 *   LOOKUP(map, &key) UPDATE(map, &key, &value) DELETE(map, &key)
 *   RESERVE(table) SUBMIT(table, row)               a failed RESERVE counts itself as lost_TABLE
 *   COUNT(counter, n)                               adds to a per-CPU counter of that name
 *   CONFIG(name)            a constant that the session sets
 *   SYMBOL(function)        a kernel function's address, 0 where this kernel lacks it
 *   ENUMERATOR(name)        a kernel enumerator's value, 63 where this kernel lacks it
 *   ARGUMENTS(event)        how many arguments a kernel tracepoint passes, 0 where it is absent
 *
 * A name after three underscores is a flavour: struct request___nvme is struct request.
 */

typedef signed char s8;
typedef unsigned char u8;
typedef short s16;
typedef unsigned short u16;

#ifndef KV_BCC
typedef int s32;
typedef unsigned int u32;
typedef long long s64;
typedef unsigned long long u64;
typedef unsigned long size_t;
typedef _Bool bool;
#define NULL ((void *)0)
#endif

#define inline_always static inline __attribute__((always_inline))
#define likely_true(x) __builtin_expect(!!(x), 1)
#define unlikely_true(x) __builtin_expect(!!(x), 0)

/*
 * The compiler forgets what it knows of a number. A bound that is applied after that stays where
 * it is written, next to its use: older verifiers lose it when the number was on the stack between.
 * A loop that forgets its counter keeps counting up to a constant, which they can follow; the
 * compiler would like to count down from an unknown number.
 */
#define FORGET(number) asm volatile("" : "+r"(number))

enum { KV_ANY = 0, KV_NO_WAKEUP = 1 };

#ifdef KV_BCC
/* ------------------------------------------------------------------------------------- bcc */

#define KERNEL_STRUCT
#define SUBPROGRAM inline_always

/*
 * Where a source calls these helpers by their own names, bcc reads all of /proc/kallsyms to see
 * whether the kernel has them, once for every call: half of the compile time.
 */
static long (*kv_probe_read_user)(void *to, u32 size, const void *from) = (void *)112;
static long (*kv_probe_read_user_str)(void *to, u32 size, const void *from) = (void *)114;
#define bpf_probe_read_user kv_probe_read_user
#define bpf_probe_read_user_str kv_probe_read_user_str

#define PER_LOADER(core, bcc) bcc

#define RAW_HOOK(program, ...) int program(struct bpf_raw_tracepoint_args *ctx)
#define ARG(n) (ctx->args[n])
#define SYSCALL_ENTER(program, call) int program(u64 *ctx)
#define SYSCALL_EXIT(program, ...) int program(u64 *ctx)
#define SYSCALL_ARG(n) (ctx[2 + (n)])
#define SYSCALL_RESULT ((s64)ctx[2])
#define FUNCTION_ENTER(program, ...) int program(struct pt_regs *ctx)
#define FUNCTION_EXIT(program, ...) int program(struct pt_regs *ctx)
#define LIBRARY_ENTER(program, ...) int program(struct pt_regs *ctx)
#define LIBRARY_EXIT(program, ...) int program(struct pt_regs *ctx)
#define FUNCTION_ARG(n) KV_ARGUMENT_##n
#define FUNCTION_RESULT ((u64)PT_REGS_RC(ctx))
#define KV_ARGUMENT_0 ((u64)PT_REGS_PARM1(ctx))
#define KV_ARGUMENT_1 ((u64)PT_REGS_PARM2(ctx))
#define KV_ARGUMENT_2 ((u64)PT_REGS_PARM3(ctx))
#define KV_ARGUMENT_3 ((u64)PT_REGS_PARM4(ctx))
#define KV_ARGUMENT_4 ((u64)PT_REGS_PARM5(ctx))
#define KV_ARGUMENT_5 ((u64)PT_REGS_PARM6(ctx))

/*
 * From the running kernel's BTF the loader defines, per field, its offset O_structure_field, its
 * size S_ and whether it is there, H_; per structure its size T_structure, 0 if it is not there.
 */
#define READ_AT(type, address)                                                                 \
	({                                                                                     \
		type kv_value = 0;                                                             \
		bpf_probe_read_kernel(&kv_value, sizeof(kv_value), (void *)(u64)(address));    \
		kv_value;                                                                      \
	})
#define READ_USER(type, address)                                                               \
	({                                                                                     \
		type kv_value = 0;                                                             \
		bpf_probe_read_user(&kv_value, sizeof(kv_value), (void *)(u64)(address));      \
		kv_value;                                                                      \
	})
#define READ(structure, field, pointer)                                                        \
	({                                                                                     \
		typedef typeof(((struct structure *)0)->field) kv_field;                       \
		_Static_assert(!H_##structure##_##field ||                                     \
				       sizeof(kv_field) == S_##structure##_##field,            \
			       "in this kernel the size of " #structure "." #field " differs"); \
		READ_AT(kv_field, (u64)(pointer) + O_##structure##_##field);                   \
	})
#define READ_MODULE(structure, field, pointer) READ(structure, field, pointer)
#define VIEW(structure, pointer) ((const struct structure *)(u64)(pointer))
#define ADDRESS(structure, field, pointer) ((u64)(pointer) + O_##structure##_##field)
#define CONTAINER(structure, field, address) ((u64)(address)-O_##structure##_##field)
#define HAS_FIELD(structure, field) (H_##structure##_##field)
#define HAS_TYPE(structure) (T_##structure != 0)
#define TYPE_SIZE(structure) (T_##structure)

/*
 * bcc writes and optimises code that prints the value of each map, member by member, which takes
 * longer than compiling the probes. Values are therefore declared as bytes.
 */
#define KV_TABLE(kind, map, key, value, entries)                                               \
	struct map##_bytes {                                                                   \
		char bytes[sizeof(value)];                                                     \
	};                                                                                     \
	BPF_TABLE(kind, key, struct map##_bytes, map, entries)
#define HASH(map, key, value, entries) KV_TABLE("hash", map, key, value, entries)
#define LRU_HASH(map, key, value, entries) KV_TABLE("lru_hash", map, key, value, entries)
#define ARRAY(map, value, entries) KV_TABLE("array", map, u32, value, entries)
#define PER_CPU_ARRAY(map, value, entries) KV_TABLE("percpu_array", map, u32, value, entries)
#define RING(table) BPF_RINGBUF_OUTPUT(table, KV_RING_PAGES_##table)

#define LOOKUP(map, key) map##_lookup(key)
#define UPDATE(map, key, value) map##_update(key, value)
#define DELETE(map, key) map##_delete(key)
#define RESERVE(table) table##_reserve()
#define SUBMIT(table, row) table##_submit(row)

#define KV_CONSTANT(name) ((u64)KV_##name)

/*
 * bcc compiles for the first BPF instruction set, where the compiler has no atomic operation that
 * returns the old value, and its assembler cannot parse one. The kernel knows them (5.12), so the
 * instruction is written as bytes: operation code, destination and source register, no offset,
 * operation. The names of registers become their numbers for that.
 */
#define KV_REGISTERS                                                                           \
	".set r0, 0\n.set r1, 1\n.set r2, 2\n.set r3, 3\n.set r4, 4\n"                         \
	".set r5, 5\n.set r6, 6\n.set r7, 7\n.set r8, 8\n.set r9, 9\n"
#define KV_ATOMIC(code, operation, value, pointer)                                             \
	asm volatile(KV_REGISTERS ".byte " code ", %1 | %0 << 4, 0, 0\n.long " operation        \
		     : "+r"(value)                                                             \
		     : "r"(pointer)                                                            \
		     : "memory")
#define KV_FETCH(operation, pointer, n)                                                        \
	({                                                                                     \
		u64 kv_old = (n);                                                              \
		if (sizeof(*(pointer)) == 8)                                                   \
			KV_ATOMIC("0xdb", operation, kv_old, pointer);                         \
		else                                                                           \
			KV_ATOMIC("0xc3", operation, kv_old, pointer);                         \
		(typeof(*(pointer))) kv_old;                                                   \
	})
#define FETCH_ADD(pointer, n) KV_FETCH("0x01", pointer, n)
#define EXCHANGE(pointer, n) KV_FETCH("0xe1", pointer, n)

#else
/* ------------------------------------------------------------------------------------ core */

#define SEC(name) __attribute__((section(name), used))
#define KERNEL_STRUCT __attribute__((preserve_access_index))
#define SUBPROGRAM __attribute__((noinline))
#define PER_LOADER(core, bcc) core

char LICENSE[] SEC("license") = "GPL";

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value,
				   u64 flags) = (void *)2;
static long (*bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static u32 (*bpf_get_prandom_u32)(void) = (void *)7;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static u64 (*bpf_get_current_task)(void) = (void *)35;
static long (*bpf_probe_read_user)(void *to, u32 size, const void *from) = (void *)112;
static long (*bpf_probe_read_kernel)(void *to, u32 size, const void *from) = (void *)113;
static long (*bpf_probe_read_user_str)(void *to, u32 size, const void *from) = (void *)114;
static long (*bpf_probe_read_kernel_str)(void *to, u32 size, const void *from) = (void *)115;
static void *(*bpf_ringbuf_reserve)(void *ring, u64 size, u64 flags) = (void *)131;
static void (*bpf_ringbuf_submit)(void *row, u64 flags) = (void *)132;

#define RAW_HOOK(program, event, ...) SEC("raw_tp/" #event) int program(u64 *ctx)
#define ARG(n) (ctx[n])
#define SYSCALL_ENTER(program, call) SEC("tp/syscalls/sys_enter_" #call) int program(u64 *ctx)
#define SYSCALL_EXIT(program, ...) SEC("tp/syscalls/sys_exit") int program(u64 *ctx)
#define SYSCALL_ARG(n) (ctx[2 + (n)])
#define SYSCALL_RESULT ((s64)ctx[2])

/* The registers that carry arguments; one object serves both architectures. */
struct pt_regs { /* x86_64 */
	unsigned long di, si, dx, cx, r8, r9, ax;
} KERNEL_STRUCT;
struct user_pt_regs { /* arm64: how its struct pt_regs begins */
	u64 regs[31];
} KERNEL_STRUCT;

#define FUNCTION_ENTER(program, function, ...)                                                 \
	SEC("kprobe/" #function) int program(struct pt_regs *ctx)
#define FUNCTION_EXIT(program, function, ...)                                                  \
	SEC("kretprobe/" #function) int program(struct pt_regs *ctx)
#define LIBRARY_ENTER(program, ...) SEC("uprobe") int program(struct pt_regs *ctx)
#define LIBRARY_EXIT(program, ...) SEC("uretprobe") int program(struct pt_regs *ctx)
#define FUNCTION_ARG(n) KV_REGISTER(n, KV_ARGUMENT_##n)
#define FUNCTION_RESULT KV_REGISTER(0, ax)
/* The compiler must not make one load of two: the verifier wants constant offsets from ctx. */
#define KV_LOADED(value, which) asm volatile("" : "+r"(value) : "i"(which))
#define KV_REGISTER(arm64, x86_64)                                                             \
	({                                                                                     \
		u64 kv_register;                                                               \
		if (HAS_TYPE(user_pt_regs)) {                                                  \
			kv_register = ((struct user_pt_regs *)ctx)->regs[arm64];               \
			KV_LOADED(kv_register, 0);                                             \
		} else {                                                                       \
			kv_register = ctx->x86_64;                                             \
			KV_LOADED(kv_register, 1);                                             \
		}                                                                              \
		kv_register;                                                                   \
	})
#define KV_ARGUMENT_0 di
#define KV_ARGUMENT_1 si
#define KV_ARGUMENT_2 dx
#define KV_ARGUMENT_3 cx
#define KV_ARGUMENT_4 r8
#define KV_ARGUMENT_5 r9

#define KV_FIELD(structure, field) (((struct structure *)0)->field)
#define KV_OFFSET(structure, field)                                                            \
	__builtin_preserve_field_info(KV_FIELD(structure, field), 0)
#define ADDRESS(structure, field, pointer) ((u64)(pointer) + KV_OFFSET(structure, field))
#define CONTAINER(structure, field, address) ((u64)(address)-KV_OFFSET(structure, field))
#define HAS_FIELD(structure, field)                                                            \
	__builtin_preserve_field_info(KV_FIELD(structure, field), 2)
#define HAS_TYPE(structure) __builtin_preserve_type_info(*(struct structure *)0, 0)
#define TYPE_SIZE(structure) __builtin_preserve_type_info(*(struct structure *)0, 1)

/* Never reads more than the kernel's field has: what lies behind it is another one. */
#define READ_MODULE(structure, field, pointer)                                                 \
	({                                                                                     \
		typeof(KV_FIELD(structure, field)) kv_value = 0;                               \
		u32 kv_size = __builtin_preserve_field_info(KV_FIELD(structure, field), 1);    \
		bpf_probe_read_kernel(                                                         \
			&kv_value, kv_size < sizeof(kv_value) ? kv_size : sizeof(kv_value),    \
			(const void *)ADDRESS(structure, field, pointer));                     \
		kv_value;                                                                      \
	})

#ifdef KV_PLAIN
#define VIEW(structure, pointer) ((const struct structure *)(u64)(pointer))
#define READ(structure, field, pointer) READ_MODULE(structure, field, pointer)
#else
extern void *bpf_rdonly_cast(const void *pointer, u32 type_id) __attribute__((section(".ksyms")));

/*
 * bpf_rdonly_cast knows the kernel's own types only, no module's. It costs one move; the load
 * after it is a plain one that cannot fault. Eight bytes are loaded as a number, also where they
 * are a pointer: the verifier forbids arithmetic on pointers. Any kernel structure that begins
 * with a 64-bit number serves for that.
 */
struct timespec64 {
	s64 tv_sec;
} KERNEL_STRUCT;

#define KV_AS(structure, pointer)                                                              \
	((struct structure *)bpf_rdonly_cast((const void *)(pointer),                          \
					     __builtin_btf_type_id(*(struct structure *)0, 1)))
#define VIEW(structure, pointer) ((const struct structure *)KV_AS(structure, pointer))
#define KV_IS_VIEW(structure, pointer)                                                         \
	__builtin_types_compatible_p(typeof(pointer), const struct structure *)
#define READ(structure, field, pointer)                                                        \
	__builtin_choose_expr(                                                                 \
		KV_IS_VIEW(structure, pointer),                                                \
		((const struct structure *)(pointer))->field,                                  \
		__builtin_choose_expr(sizeof(KV_FIELD(structure, field)) == 8,                 \
				      (typeof(KV_FIELD(structure, field)))KV_AS(               \
					      timespec64, ADDRESS(structure, field, pointer))  \
					      ->tv_sec,                                        \
				      KV_AS(structure, pointer)->field))
#endif
#define READ_AT(type, address)                                                                 \
	({                                                                                     \
		type kv_value = 0;                                                             \
		bpf_probe_read_kernel(&kv_value, sizeof(kv_value), (const void *)(address));   \
		kv_value;                                                                      \
	})
#define READ_USER(type, address)                                                               \
	({                                                                                     \
		type kv_value = 0;                                                             \
		bpf_probe_read_user(&kv_value, sizeof(kv_value), (const void *)(address));     \
		kv_value;                                                                      \
	})

#define KV_MAP(map, map_type, key_type, value_type, entries)                                   \
	struct {                                                                               \
		int (*type)[map_type];                                                         \
		int (*max_entries)[entries];                                                   \
		key_type *key;                                                                 \
		value_type *value;                                                             \
	} map SEC(".maps")
#define HASH(map, key, value, entries) KV_MAP(map, 1, key, value, entries)
#define ARRAY(map, value, entries) KV_MAP(map, 2, u32, value, entries)
#define PER_CPU_ARRAY(map, value, entries) KV_MAP(map, 6, u32, value, entries)
#define LRU_HASH(map, key, value, entries) KV_MAP(map, 9, key, value, entries)
#define RING(table)                                                                            \
	struct {                                                                               \
		int (*type)[27];                                                               \
		int (*max_entries)[1 << 20]; /* set at load */                                 \
	} table SEC(".maps")

#define LOOKUP(map, k) ((typeof(map.value))bpf_map_lookup_elem(&map, k))
#define UPDATE(map, k, v) bpf_map_update_elem(&map, k, v, KV_ANY)
#define DELETE(map, k) bpf_map_delete_elem(&map, k)
#define RESERVE(table)                                                                         \
	({                                                                                     \
		struct kv_##table *kv_row =                                                    \
			bpf_ringbuf_reserve(&table, sizeof(struct kv_##table), 0);             \
		if (!kv_row)                                                                   \
			COUNT(lost_##table, 1);                                                \
		kv_row;                                                                        \
	})
#define SUBMIT(table, row) bpf_ringbuf_submit(row, KV_NO_WAKEUP)

#define KV_CONSTANT(name) (kv_constants.name)

/* These return the old value and need BPF atomics, 5.12. */
#define FETCH_ADD(pointer, n) __sync_fetch_and_add(pointer, n)
#define EXCHANGE(pointer, n) __sync_lock_test_and_set(pointer, n)

#endif
/* ------------------------------------------------------------------------------------ both */

#define CONFIG(name) KV_CONSTANT(config_##name)
#define SYMBOL(name) KV_CONSTANT(symbol_##name)
#define ENUMERATOR(name) KV_CONSTANT(enumerator_##name)
#define ARGUMENTS(event) KV_CONSTANT(arguments_##event)
#define COUNT(counter, n) kv_count(KV_COUNTER_##counter, n)

/* Without the old value; works everywhere. */
#define ATOMIC_ADD(pointer, n) (void)__sync_fetch_and_add(pointer, n)
