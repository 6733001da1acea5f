/*
 * A stand-in for libnvidia-ml.so.1 that answers from a script. Tests build it and let the real
 * pynvml load it; it is no part of kvprobe.
 *
 * The file that NVML_STANDIN_SCRIPT names is read by the first nvmlInit. One line each; times are
 * seconds since `epoch`, a device is its index or * for all:
 *
 *   epoch NS                        CLOCK_MONOTONIC at which the script begins
 *   count T N                       from T on there are N devices
 *   text DEVICE KEY WORDS..         name, uuid, serial, busid; driver and nvml with DEVICE *
 *   value DEVICE KEY T NUMBER       from T on, in NVML's own unit
 *   mig DEVICE INSTANCE             the device has this GPU instance
 *   gpmcode DEVICE METRIC CODE      nvmlReturn of one GPM metric
 *   error DEVICE FUNCTION T T2 CODE the function (or *) returns this from T until T2
 *   slow DEVICE FUNCTION T T2 MS    the function takes so long
 *   xid DEVICE T NUMBER             an Xid error
 *
 * `value` lines may also come from the file that NVML_STANDIN_LOG names, which begins with an `epoch`
 * of its own and may grow while it is read: what a load does as it does it.
 *
 * What begins at 0 has always been so. A GPM value is the exact mean of its value over the time
 * between the two samples. Layouts and codes are those of nvml.h; with -DOLD_DRIVER it is a driver
 * before GPM.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10,
       VERSION = 25 };
enum { ANY = -1, MOST = 1 << 20 };
#define ALWAYS -1e9

typedef struct { int device; char key[64]; double at, value; } step_t;
typedef struct { int device; char key[64]; char text[96]; } text_t;
typedef struct { int device; char function[64]; double from, to, value; int is_error; } rule_t;
typedef struct { int device; double at; unsigned number; int done; } xid_t;
typedef struct { double at; int device, instance; } sample_t;
typedef struct { unsigned id, code; double value; const char *names[3]; } metric_t;
typedef struct { unsigned version, count; sample_t *first, *second; metric_t metrics[]; } question_t;
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_t;

static step_t steps[MOST];
static text_t texts[256];
static rule_t rules[256];
static xid_t xids[256];
static struct { int device, instance; } parts[64];
static struct { int device; unsigned metric, code; } codes[64];
static int step_count, text_count, rule_count, xid_count, part_count, code_count;
static long long epoch;
static FILE *growing;
static long long growing_epoch;
static pthread_mutex_t growing_lock = PTHREAD_MUTEX_INITIALIZER;
static int started, generation, registered[64];

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return ((long long)t.tv_sec * 1000000000LL + t.tv_nsec - epoch) / 1e9;
}

static int device_of(const char *word) { return *word == '*' ? ANY : atoi(word); }

static void read_script(void)
{
	const char *path = getenv("NVML_STANDIN_SCRIPT");
	FILE *file = path ? fopen(path, "r") : NULL;
	char line[512], d[16], k[64], rest[96];
	double t, t2, v;
	unsigned u, c;
	int i;

	while (file && fgets(line, sizeof(line), file)) {
		if (sscanf(line, "epoch %lld", &epoch) == 1)
			continue;
		if (sscanf(line, "count %lf %lf", &t, &v) == 2)
			steps[step_count++] = (step_t){ANY, "count", t > 0 ? t : ALWAYS, v};
		else if (sscanf(line, "text %15s %63s %95[^\n]", d, k, rest) == 3) {
			text_t *x = &texts[text_count++];
			x->device = device_of(d);
			snprintf(x->key, sizeof(x->key), "%s", k);
			snprintf(x->text, sizeof(x->text), "%s", rest);
		} else if (sscanf(line, "value %15s %63s %lf %lf", d, k, &t, &v) == 4) {
			step_t *s = &steps[step_count++];
			*s = (step_t){device_of(d), "", t > 0 ? t : ALWAYS, v};
			snprintf(s->key, sizeof(s->key), "%s", k);
		} else if (sscanf(line, "mig %15s %d", d, &i) == 2) {
			parts[part_count].device = device_of(d);
			parts[part_count++].instance = i;
		} else if (sscanf(line, "gpmcode %15s %u %u", d, &u, &c) == 3) {
			codes[code_count].device = device_of(d);
			codes[code_count].metric = u;
			codes[code_count++].code = c;
		} else if (sscanf(line, "xid %15s %lf %u", d, &t, &u) == 3)
			xids[xid_count++] = (xid_t){device_of(d), t, u, 0};
		else if (sscanf(line, "%95s %15s %63s %lf %lf %lf", rest, d, k, &t, &t2, &v) == 6) {
			rule_t *r = &rules[rule_count++];
			*r = (rule_t){device_of(d), "", t > 0 ? t : ALWAYS, t2, v, !strcmp(rest, "error")};
			snprintf(r->function, sizeof(r->function), "%s", k);
		}
	}
	if (file)
		fclose(file);
}

/* Takes in whole lines that were written since the last time. */
static void read_on(void)
{
	const char *path = getenv("NVML_STANDIN_LOG");
	char line[512], d[16], k[64];
	double t, v;

	if (!path)
		return;
	pthread_mutex_lock(&growing_lock);
	if (!growing)
		growing = fopen(path, "r");
	while (growing) {
		long begin = ftell(growing);
		if (!fgets(line, sizeof(line), growing) || !strchr(line, '\n')) {
			clearerr(growing);
			fseek(growing, begin, SEEK_SET);
			break;
		}
		if (sscanf(line, "epoch %lld", &growing_epoch) == 1)
			continue;
		if (sscanf(line, "value %15s %63s %lf %lf", d, k, &t, &v) == 4) {
			if (step_count == MOST)
				abort(); /* a lost line would be a wrong truth */
			step_t *s = &steps[step_count];
			*s = (step_t){device_of(d), "", t + (growing_epoch - epoch) / 1e9, v};
			snprintf(s->key, sizeof(s->key), "%s", k);
			__sync_synchronize();
			step_count++;
		}
	}
	pthread_mutex_unlock(&growing_lock);
}

/*
 * The value of a step function, or its mean between two times; 0 where the script has none. The
 * steps of one key are in the order of time: from the last one back, so that a long log is cheap.
 */
static double mean(int device, const char *key, double from, double to)
{
	double sum = 0, until = to;

	for (int i = step_count - 1; i >= 0; i--) {
		const step_t *s = &steps[i];
		if (s->at > until || (s->device != ANY && s->device != device) || strcmp(s->key, key))
			continue;
		if (to <= from)
			return s->value;
		sum += s->value * (until - (s->at > from ? s->at : from));
		until = s->at;
		if (until <= from)
			break;
	}
	return to > from ? sum / (to - from) : 0;
}

static double value_of(int device, const char *key)
{
	double t = now();
	return mean(device, key, t, t);
}

static int has(int device, const char *key)
{
	for (int i = 0; i < step_count; i++)
		if ((steps[i].device == ANY || steps[i].device == device) && !strcmp(steps[i].key, key))
			return 1;
	return 0;
}

/* What every function does first: be slow, then fail, as the script says. */
static int enter(int device, const char *function)
{
	double t = now();

	read_on();
	for (int i = 0; i < rule_count; i++) {
		const rule_t *r = &rules[i];
		if ((r->device != ANY && r->device != device) || t < r->from || t >= r->to)
			continue;
		if (strcmp(r->function, "*") && strcmp(r->function, function))
			continue;
		if (r->is_error)
			return (int)r->value;
		struct timespec pause = {(time_t)(r->value / 1000),
					 (long)(r->value * 1e6) % 1000000000L};
		nanosleep(&pause, NULL);
	}
	return started ? OK : UNINITIALIZED;
}

/* A handle holds generation, device and MIG instance; one from before a shutdown is no good. */
static void *handle_of(int device, int instance)
{
	return (void *)(uintptr_t)(0x10000000UL + ((unsigned long)generation << 16) +
				   ((unsigned long)device << 8) + (instance + 1));
}

static int open_handle(void *handle, int *device, int *instance, const char *function)
{
	uintptr_t bits = (uintptr_t)handle - 0x10000000UL;
	int result;

	*device = (bits >> 8) & 255;
	*instance = (int)(bits & 255) - 1;
	if ((result = enter(*device, function)))
		return result;
	return (int)(bits >> 16) == generation ? OK : INVALID;
}

#define BEGIN(handle) \
	int device, instance, result = open_handle(handle, &device, &instance, __func__); \
	(void)instance; \
	if (result) return result

/* A function that returns one number of the script. */
#define NUMBER(type, name, key) \
	int name(void *handle, type *out) \
	{ \
		BEGIN(handle); \
		if (!has(device, key)) return NOT_SUPPORTED; \
		*out = (type)value_of(device, key); \
		return OK; \
	}

#define TEXT(name, key) \
	int name(void *handle, char *out, unsigned size) \
	{ \
		BEGIN(handle); \
		return copy_text(device, key, out, size); \
	}

static int copy_text(int device, const char *key, char *out, unsigned size)
{
	for (int i = 0; i < text_count; i++)
		if ((texts[i].device == ANY || texts[i].device == device) &&
		    !strcmp(texts[i].key, key)) {
			snprintf(out, size, "%s", texts[i].text);
			return OK;
		}
	return NOT_SUPPORTED;
}

int nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	if (!epoch)
		read_script();
	int before = started;
	started = 1;
	int result = enter(ANY, __func__);
	started = result ? before : before + 1;
	if (!before && !result)
		generation++;
	return result;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void)
{
	if (!started)
		return UNINITIALIZED;
	started--;
	memset(registered, 0, sizeof(registered));
	return OK;
}
const char *nvmlErrorString(int code) { (void)code; return "scripted error"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size)
{
	int result = enter(ANY, __func__);
	return result ? result : copy_text(ANY, "driver", out, size);
}
int nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
	int result = enter(ANY, __func__);
	return result ? result : copy_text(ANY, "nvml", out, size);
}
int nvmlDeviceGetCount_v2(unsigned *out)
{
	int result = enter(ANY, __func__);
	*out = (unsigned)value_of(ANY, "count");
	return result;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out)
{
	int result = enter((int)index, __func__);
	if (!result && index >= (unsigned)value_of(ANY, "count"))
		return INVALID;
	*out = handle_of((int)index, -1);
	return result;
}

TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetSerial, "serial")
NUMBER(unsigned, nvmlDeviceGetMemoryBusWidth, "bus_bits")
NUMBER(unsigned, nvmlDeviceGetPowerUsage, "power_mw")
NUMBER(unsigned, nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
NUMBER(unsigned, nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation")
NUMBER(unsigned, nvmlDeviceGetMaxPcieLinkWidth, "pcie_lanes")
NUMBER(unsigned long long, nvmlDeviceGetCurrentClocksThrottleReasons, "clock_events")
#ifndef OLD_DRIVER
NUMBER(unsigned long long, nvmlDeviceGetCurrentClocksEventReasons, "clock_events")
NUMBER(unsigned, nvmlDeviceGetNumGpuCores, "cores")
#endif

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
	BEGIN(handle);
	if (!has(device, "capability"))
		return NOT_SUPPORTED;
	*major = (int)value_of(device, "capability") / 10;
	*minor = (int)value_of(device, "capability") % 10;
	return OK;
}

int nvmlDeviceGetPciInfo_v3(void *handle, char *out)
{
	BEGIN(handle);
	memset(out, 0, 68); /* busIdLegacy[16], five unsigned, busId[32] */
	return copy_text(device, "busid", out + 36, 32);
}
int nvmlDeviceGetMaxClockInfo(void *handle, int domain, unsigned *out)
{
	BEGIN(handle);
	const char *key = domain == 2 ? "max_memory_mhz" : domain == 1 ? "max_sm_mhz" : "";
	if (!has(device, key))
		return NOT_SUPPORTED;
	*out = (unsigned)value_of(device, key);
	return OK;
}
int nvmlDeviceGetClockInfo(void *handle, int domain, unsigned *out)
{
	BEGIN(handle);
	*out = (unsigned)value_of(device, domain == 2 ? "memory_mhz" : "sm_mhz");
	return OK;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *out)
{
	BEGIN(handle);
	out[0] = (unsigned long long)value_of(device, "memory_total");
	out[2] = (unsigned long long)value_of(device, "memory_used");
	out[1] = out[0] - out[2];
	return OK;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *out)
{
	BEGIN(handle);
	out[0] = (unsigned)value_of(device, "util_gpu");
	out[1] = (unsigned)value_of(device, "util_memory");
	return OK;
}
int nvmlDeviceGetPcieThroughput(void *handle, int counter, unsigned *out)
{
	BEGIN(handle);
	*out = (unsigned)value_of(device, counter ? "pcie_rx_kib" : "pcie_tx_kib");
	return OK;
}
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *out)
{
	BEGIN(handle);
	if (!has(device, "ecc_corrected") || counter != 0)
		return NOT_SUPPORTED;
	*out = (unsigned long long)value_of(device, kind ? "ecc_uncorrected" : "ecc_corrected");
	return OK;
}

/* ---- MIG */

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
	BEGIN(handle);
	if (!has(device, "mig"))
		return NOT_SUPPORTED;
	*current = *pending = (unsigned)value_of(device, "mig");
	return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *out)
{
	BEGIN(handle);
	*out = 7;
	return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned place, void **out)
{
	BEGIN(handle);
	for (int i = 0, seen = 0; i < part_count; i++)
		if (parts[i].device == device && seen++ == (int)place) {
			*out = handle_of(device, parts[i].instance);
			return OK;
		}
	return NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *out)
{
	BEGIN(handle);
	*out = (unsigned)instance;
	return OK;
}

/* ---- events */

int nvmlEventSetCreate(void **out) { *out = xids; return enter(ANY, __func__); }
int nvmlEventSetFree(void *set) { (void)set; return enter(ANY, __func__); }
int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set)
{
	(void)set;
	BEGIN(handle);
	registered[device] = (types & 8) != 0;
	return OK;
}
int nvmlEventSetWait_v2(void *set, event_t *out, unsigned timeout_ms)
{
	int result = enter(ANY, __func__);
	(void)set;
	if (result)
		return result;
	for (int i = 0; i < xid_count; i++)
		if (!xids[i].done && registered[xids[i].device] && xids[i].at <= now()) {
			xids[i].done = 1;
			*out = (event_t){handle_of(xids[i].device, -1), 8, xids[i].number,
					 0xFFFFFFFFu, 0xFFFFFFFFu};
			return OK;
		}
	struct timespec pause = {0, (long)timeout_ms * 1000000L};
	nanosleep(&pause, NULL);
	return TIMEOUT;
}

/* ---- GPM */
#ifndef OLD_DRIVER

int nvmlGpmQueryDeviceSupport(void *handle, unsigned *out)
{
	BEGIN(handle);
	if (out[0] != 1)
		return VERSION;
	out[1] = (unsigned)value_of(device, "gpm");
	return OK;
}
int nvmlGpmSampleAlloc(void **out)
{
	*out = calloc(1, sizeof(sample_t));
	return enter(ANY, __func__);
}
int nvmlGpmSampleFree(sample_t *sample)
{
	free(sample);
	return enter(ANY, __func__);
}
int nvmlGpmSampleGet(void *handle, sample_t *sample)
{
	BEGIN(handle);
	*sample = (sample_t){now(), device, -1};
	return OK;
}
int nvmlGpmMigSampleGet(void *handle, unsigned part, sample_t *sample)
{
	BEGIN(handle);
	*sample = (sample_t){now(), device, (int)part};
	return OK;
}
int nvmlGpmMetricsGet(question_t *question)
{
	int device = question->first->device, result = enter(device, __func__);
	char key[64];

	if (result)
		return result;
	if (question->version != 1)
		return VERSION;
	if (question->first->at >= question->second->at || device != question->second->device)
		return INVALID;
	for (unsigned i = 0; i < question->count; i++) {
		metric_t *m = &question->metrics[i];
		if (question->first->instance < 0)
			snprintf(key, sizeof(key), "gpm%u", m->id);
		else
			snprintf(key, sizeof(key), "gpm%u.%d", m->id, question->first->instance);
		m->value = mean(device, key, question->first->at, question->second->at);
		m->code = OK;
		for (int c = 0; c < code_count; c++)
			if ((codes[c].device == ANY || codes[c].device == device) &&
			    codes[c].metric == m->id)
				m->code = codes[c].code;
	}
	return OK;
}
#endif
