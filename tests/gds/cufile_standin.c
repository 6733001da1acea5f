/*
 * Stands in for NVIDIA's libcufile.so.0 in tests: the ABI of cufile.h, buffers in host memory.
 * CUFILE_STANDIN says which data path it imitates:
 *
 *   compat     compatibility mode: worker threads of the library read and write the file with
 *              preads and pwrites of CHUNK bytes
 *   inline     the same, in the thread that calls
 *   invisible  the driver's path, as a machine without the driver sees it: no system call; bytes
 *              come from memory that was filled when the handle was registered
 *
 * A transfer at a negative offset fails. Each handle is a small heap block, freed at deregistering,
 * so that addresses are used again.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define CHUNK 65536
#define WORKERS 3

typedef struct { int err, cu_err; } CUfileError_t;
typedef struct {
	int type;
	union { int fd; void *handle; } handle;
	const void *fs_ops;
} CUfileDescr_t;
typedef void *CUfileHandle_t;
typedef void *CUfileBatchHandle_t;
typedef struct {
	int mode;
	struct { void *devPtr_base; off_t file_offset, devPtr_offset; size_t size; } batch;
	CUfileHandle_t fh;
	int opcode;
	void *cookie;
} CUfileIOParams_t;
typedef struct { void *cookie; int status; size_t ret; } CUfileIOEvents_t;

struct batch { CUfileIOEvents_t *events; unsigned count, told; };
struct handle { int fd; char *memory; off_t size; };
struct job { struct handle *file; char *buffer; size_t size; off_t offset; int write; ssize_t done; };

enum { INVALID_FILE = 5013, PENDING = 0x2, COMPLETE = 0x10, FAILED = 0x40 };
static const CUfileError_t OK;

static int is(const char *mode)
{
	const char *asked = getenv("CUFILE_STANDIN");
	return asked && !strcmp(asked, mode);
}

static void *work(void *argument)
{
	struct job *job = argument;
	size_t at;

	for (at = 0; at < job->size; at += CHUNK) {
		size_t part = job->size - at < CHUNK ? job->size - at : CHUNK;
		ssize_t done = job->write
			? pwrite(job->file->fd, job->buffer + at, part, job->offset + at)
			: pread(job->file->fd, job->buffer + at, part, job->offset + at);
		if (done < 0)
			return NULL;
		job->done += done;
		if ((size_t)done < part)
			break;
	}
	return NULL;
}

static ssize_t from_memory(struct handle *file, char *buffer, size_t size, off_t offset, int write)
{
	size_t left = offset < file->size ? file->size - offset : 0;

	size = size < left ? size : left;
	if (write)
		memcpy(file->memory + offset, buffer, size);
	else
		memcpy(buffer, file->memory + offset, size);
	return size;
}

static ssize_t transfer(CUfileHandle_t fh, char *buffer, size_t size, off_t offset, int write)
{
	struct handle *file = fh;
	struct job jobs[WORKERS];
	pthread_t threads[WORKERS];
	size_t share = (size / WORKERS + CHUNK - 1) / CHUNK * CHUNK, at = 0;
	ssize_t sum = 0;
	int n = 0, i;

	if (offset < 0) {
		errno = EINVAL;
		return -1;
	}
	if (is("invisible"))
		return from_memory(file, buffer, size, offset, write);
	if (is("inline")) {
		struct job job = {file, buffer, size, offset, write, 0};
		work(&job);
		return job.done;
	}
	for (; at < size && n < WORKERS; n++) {
		size_t part = n == WORKERS - 1 || size - at < share ? size - at : share;
		jobs[n] = (struct job){file, buffer + at, part, offset + at, write, 0};
		pthread_create(&threads[n], NULL, work, &jobs[n]);
		at += part;
	}
	for (i = 0; i < n; i++) {
		pthread_join(threads[i], NULL);
		sum += jobs[i].done;
	}
	return sum;
}

CUfileError_t cuFileHandleRegister(CUfileHandle_t *fh, CUfileDescr_t *descr)
{
	struct handle *file;
	struct stat status;

	if (fstat(descr->handle.fd, &status))
		return (CUfileError_t){INVALID_FILE, 0};
	file = calloc(1, sizeof(*file));
	file->fd = descr->handle.fd;
	file->size = status.st_size;
	if (is("invisible"))
		file->memory = calloc(1, file->size);
	*fh = file;
	return OK;
}

void cuFileHandleDeregister(CUfileHandle_t fh)
{
	struct handle *file = fh;
	free(file->memory);
	free(file);
}

ssize_t cuFileRead(CUfileHandle_t fh, void *base, size_t size, off_t offset, off_t base_offset)
{
	return transfer(fh, (char *)base + base_offset, size, offset, 0);
}

ssize_t cuFileWrite(CUfileHandle_t fh, const void *base, size_t size, off_t offset, off_t base_offset)
{
	return transfer(fh, (char *)base + base_offset, size, offset, 1);
}

CUfileError_t cuFileReadAsync(CUfileHandle_t fh, void *base, size_t *size, off_t *offset,
			      off_t *base_offset, ssize_t *done, void *stream)
{
	(void)stream;
	*done = transfer(fh, (char *)base + *base_offset, *size, *offset, 0);
	return OK;
}

CUfileError_t cuFileWriteAsync(CUfileHandle_t fh, void *base, size_t *size, off_t *offset,
			       off_t *base_offset, ssize_t *done, void *stream)
{
	(void)stream;
	*done = transfer(fh, (char *)base + *base_offset, *size, *offset, 1);
	return OK;
}

/* A batch is done when it is submitted, and its events are handed out in order, one time each. */
CUfileError_t cuFileBatchIOSetUp(CUfileBatchHandle_t *batch, unsigned nr)
{
	struct batch *made = calloc(1, sizeof(*made));

	made->events = calloc(nr, sizeof(CUfileIOEvents_t));
	*batch = made;
	return OK;
}

CUfileError_t cuFileBatchIOSubmit(CUfileBatchHandle_t handle, unsigned nr, CUfileIOParams_t *io,
				  unsigned flags)
{
	struct batch *batch = handle;
	unsigned i;

	if (flags)
		return (CUfileError_t){INVALID_FILE, 0};
	batch->told = 0;
	batch->count = nr;
	for (i = 0; i < nr; i++) {
		ssize_t done = transfer(io[i].fh,
					(char *)io[i].batch.devPtr_base + io[i].batch.devPtr_offset,
					io[i].batch.size, io[i].batch.file_offset, io[i].opcode);
		batch->events[i].cookie = io[i].cookie;
		batch->events[i].status = done < 0 ? FAILED : COMPLETE;
		batch->events[i].ret = done;
	}
	return OK;
}

/* Also tells of the next event that it is under way, as the real one may. */
CUfileError_t cuFileBatchIOGetStatus(CUfileBatchHandle_t handle, unsigned min_nr, unsigned *nr,
				     CUfileIOEvents_t *events, struct timespec *timeout)
{
	struct batch *batch = handle;
	unsigned room = *nr;

	(void)min_nr, (void)timeout;
	for (*nr = 0; *nr < room && batch->told < batch->count; (*nr)++, batch->told++)
		events[*nr] = batch->events[batch->told];
	if (*nr && batch->told < batch->count) {
		events[*nr - 1].status = PENDING;
		batch->told--;
	}
	return OK;
}

void cuFileBatchIODestroy(CUfileBatchHandle_t handle)
{
	struct batch *batch = handle;
	free(batch->events);
	free(batch);
}
