/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The kernel structures that more than one probe looks at: only the fields that are read. Order
 * and place do not matter, they come from the running kernel's BTF. A probe that needs another
 * field of one of these declares a flavour (struct request___mine) in its own file.
 */

struct hlist_node {
	struct hlist_node *next;
} KERNEL_STRUCT;

struct hlist_head {
	struct hlist_node *first;
} KERNEL_STRUCT;

struct super_block {
	u32 s_dev;
} KERNEL_STRUCT;

struct inode {
	u16 i_mode;
	u32 i_rdev;
	s64 i_size;
	unsigned long i_ino;
	struct super_block *i_sb;
	struct hlist_head i_dentry;
} KERNEL_STRUCT;

union kv_dentry_alias {
	struct hlist_node d_alias;
};

struct dentry {
	struct dentry *d_parent;
	struct inode *d_inode;
	union kv_dentry_alias d_u;
} KERNEL_STRUCT;

struct path {
	struct dentry *dentry;
} KERNEL_STRUCT;

struct file {
	u32 f_flags;
	s64 f_pos;
	struct inode *f_inode;
	struct path f_path;
} KERNEL_STRUCT;

struct fdtable {
	u32 max_fds;
	struct file **fd;
} KERNEL_STRUCT;

struct files_struct {
	struct fdtable *fdt;
} KERNEL_STRUCT;

struct fs_struct {
	struct path pwd;
} KERNEL_STRUCT;

typedef struct {
	int counter;
} atomic_t;

struct signal_struct {
	atomic_t live;
} KERNEL_STRUCT;

struct task_struct {
	u32 flags;
	int pid;
	int tgid;
	char comm[16];
	struct files_struct *files;
	struct fs_struct *fs;
	struct signal_struct *signal;
} KERNEL_STRUCT;

struct kiocb {
	struct file *ki_filp;
	s64 ki_pos;
} KERNEL_STRUCT;

struct block_device {
	u32 bd_dev;
	struct gendisk *bd_disk;
} KERNEL_STRUCT;

struct gendisk {
	u64 diskseq;
	void *private_data;
	struct block_device *part0;
} KERNEL_STRUCT;

struct request_queue {
	void *queuedata;
	struct gendisk *disk;
} KERNEL_STRUCT;

struct blk_mq_hw_ctx {
	u32 queue_num;
	void *driver_data;
} KERNEL_STRUCT;

struct request {
	struct request_queue *q;
	struct blk_mq_hw_ctx *mq_hctx;
	u32 cmd_flags;
	u32 __data_len;
	u64 __sector;
	u64 start_time_ns;
	struct bio *bio;
	struct bio *biotail;
} KERNEL_STRUCT;

/* Of the module nvme_core: a namespace as one path shows it, and what all its paths share. */
struct nvme_ns_head {
	struct gendisk *disk;
} KERNEL_STRUCT;

struct nvme_ns {
	struct nvme_ctrl *ctrl;
	struct gendisk *disk;
	struct nvme_ns_head *head;
} KERNEL_STRUCT;

#define S_IFMT 0170000
#define S_IFREG 0100000
#define S_IFBLK 0060000
#define PF_WQ_WORKER 0x00000020
#define PF_KTHREAD 0x00200000
#define O_APPEND 02000
