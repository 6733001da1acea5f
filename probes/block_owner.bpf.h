/* SPDX-License-Identifier: GPL-2.0 */
/*
 * block, part: the file that a request belongs to, found from its first bio.
 */

struct bvec_iter {
	u32 bi_idx;
	u32 bi_bvec_done;
} KERNEL_STRUCT;

struct page {
	unsigned long compound_head;
} KERNEL_STRUCT;

struct address_space {
	struct inode *host;
} KERNEL_STRUCT;

struct folio {
	struct address_space *mapping;
	unsigned long index;
} KERNEL_STRUCT;

struct bio_vec {
	struct page *bv_page;
	u32 bv_offset;
} KERNEL_STRUCT;

struct bio {
	struct bio *bi_next;
	struct block_device *bi_bdev;
	u32 bi_opf;
	u16 bi_flags;
	struct bvec_iter bi_iter;
	void *bi_end_io;
	void *bi_private;
	struct bio_vec *bi_io_vec;
} KERNEL_STRUCT;

struct iomap_dio {
	struct kiocb *iocb;
} KERNEL_STRUCT;

struct blkdev_dio {
	struct kiocb *iocb;
	struct bio bio;
} KERNEL_STRUCT;

enum { KV_PAGE_SHIFT = 12 };

/* BlockMethod in kvprobe/schema.py */
enum { KV_METHOD_NONE = 0, KV_METHOD_DIRECT = 1, KV_METHOD_PAGE = 2, KV_METHOD_RAW_DEVICE = 3 };

struct kv_owner {
	u64 inode;
	u64 offset;
	u64 dentry;
	u32 device;
	u32 method;
};

/* File, and place in it, of a page: buffered reads, read-ahead, write-back, mapped files. */
inline_always void block_page_owner(u64 bio, struct kv_owner *owner)
{
	u64 iter = ADDRESS(bio, bi_iter, bio), vector, page, head, mapping, inode;
	u32 tail = 0;

	vector = (u64)READ(bio, bi_io_vec, bio) +
		 16ULL * READ(bvec_iter, bi_idx, iter);
	page = (u64)READ(bio_vec, bv_page, vector);
	if (!page)
		return;
	head = READ(page, compound_head, page);
	if (head & 1) {
		tail = (u32)(page - (head - 1)) / (u32)TYPE_SIZE(page);
		page = head - 1;
	}
	mapping = (u64)READ(folio, mapping, page);
	if (!mapping || (mapping & 3)) /* anonymous or movable */
		return;
	inode = (u64)READ(address_space, host, mapping);
	owner->offset = ((READ(folio, index, page) + tail) << KV_PAGE_SHIFT) +
			READ(bio_vec, bv_offset, vector) + READ(bvec_iter, bi_bvec_done, iter);
	if ((READ(inode, i_mode, inode) & S_IFMT) == S_IFBLK) { /* file system metadata, too */
		owner->method = KV_METHOD_RAW_DEVICE;
		return;
	}
	owner->method = KV_METHOD_PAGE;
	owner->inode = READ(inode, i_ino, inode);
	owner->device = kv_inode_device(inode);
	if (CONFIG(root_inode))
		owner->dentry = kv_inode_dentry(inode);
}

/* A bio that was split off points to the one it came from. */
inline_always u64 block_whole(u64 bio)
{
	u32 i;

	for (i = 0; i < 4; i++) {
		u64 end = (u64)READ(bio, bi_end_io, bio);

		if (!end || end != SYMBOL(bio_chain_endio))
			break;
		bio = (u64)READ(bio, bi_private, bio);
	}
	return bio;
}

/* File of a direct operation and where that operation starts. */
inline_always void block_owner(u64 bio, struct kv_owner *owner)
{
	u64 whole = block_whole(bio), end, address, file;
	const struct bio *view = VIEW(bio, whole);

	end = (u64)READ(bio, bi_end_io, view);
	if (end && end == SYMBOL(iomap_dio_bio_end_io)) {
		address = (u64)READ(iomap_dio, iocb, READ(bio, bi_private, view));
		owner->method = KV_METHOD_DIRECT;
	} else if (end && end == SYMBOL(blkdev_bio_end_io_async)) {
		address = (u64)READ(blkdev_dio, iocb, CONTAINER(blkdev_dio, bio, whole));
		owner->method = KV_METHOD_RAW_DEVICE;
	} else {
		block_page_owner(bio, owner);
		return;
	}
	const struct kiocb *iocb = VIEW(kiocb, address);

	file = (u64)READ(kiocb, ki_filp, iocb);
	owner->offset = READ(kiocb, ki_pos, iocb);
	const struct inode *inode = VIEW(inode, READ(file, f_inode, file));

	owner->inode = READ(inode, i_ino, inode);
	owner->device = READ(super_block, s_dev, READ(inode, i_sb, inode));
	if (CONFIG(root_inode))
		owner->dentry = kv_file_dentry(file);
}
