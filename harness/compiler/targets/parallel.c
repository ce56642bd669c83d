/* The launcher of parallel loops that each library brings along; `parallel.py` says why, and defines its constants. */

#ifdef __linux__
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>
#endif
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

/* TVMParallelGroupEnv, FTVMParallelLambda and TVMBackendParallelLaunch of TVM's c_backend_api.h. */
typedef struct {
  void *sync_handle;
  int num_task;
} Group;
typedef int (*Body)(int, Group *, void *);
typedef int (*Launch)(Body, void *, int);

/* Through this variable of the library its loops find what runs them; TVM sets it to its own function on loading. */
__attribute__((weak)) Launch __TVMBackendParallelLaunch = 0;
static Launch launch_of_tvm = 0;

/* Nanoseconds that loops took last, and of all threads together; two loops that share a place are cut alike. */
static struct {
  int64_t taken, work;
} last[256];

/* Threads of the pool of the calling thread; 0 until it has run a loop. */
static __thread int pool = 0;

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int threads_for(int64_t work, int threads) {
  int count = 1;
  while (count < threads) {
    int more = 2 * count < threads ? 2 * count : threads;
    int64_t costs = (int64_t)LAUNCH_NANOSECONDS_PER_THREAD * (count == 1 ? more : more - count);
    if (count == 1) costs += LAUNCH_NANOSECONDS;
    if (work / count - work / more <= costs) break;
    count = more;
  }
  return count;
}

#ifdef __linux__
typedef cpu_set_t Cpus;

/* The CPUs that the calling thread may use, if there is one for each of the threads and binding is not forbidden. */
static int cpu_for_each(int threads, Cpus *cpus) {
  const char *asked = getenv(BINDING_VARIABLE);
  if (threads < 2 || (asked && strcmp(asked, "0") == 0)) return 0;
  return sched_getaffinity(0, sizeof *cpus, cpus) == 0 && CPU_COUNT(cpus) == threads;
}

static void bind_to_one(int thread, const Cpus *cpus) {
  Cpus own;
  int cpu;
  CPU_ZERO(&own);
  for (cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, cpus) && thread-- == 0) CPU_SET(cpu, &own);
  sched_setaffinity(0, sizeof own, &own);
}

static void bind_to_all(const Cpus *cpus) { sched_setaffinity(0, sizeof *cpus, cpus); }
#else
typedef int Cpus;

static int cpu_for_each(int threads, Cpus *cpus) { return (void)threads, (void)cpus, 0; }
static void bind_to_one(int thread, const Cpus *cpus) { (void)thread, (void)cpus; }
static void bind_to_all(const Cpus *cpus) { (void)cpus; }
#endif

typedef struct {
  Body body;
  void *data;
  int is_long;
  const Cpus *cpus;
  int threads;
  int next;
  int64_t work;
} Loop;

static int take_parts(int thread, Group *group, void *data) {
  Loop *loop = (Loop *)data;
  int64_t start = now();
  int threads = group->num_task, wanted = PARTS_PER_THREAD * threads;
  Group parts = {group->sync_handle, wanted < LEAST_PARTS ? LEAST_PARTS : wanted};
  int part, status = 0;
  if (loop->cpus) bind_to_one(thread, loop->cpus);
  if (!loop->is_long || threads == 1) {
    status = loop->body(thread, group, loop->data);
  } else {
    while (status == 0 && (part = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED)) < parts.num_task)
      status = loop->body(part, &parts, loop->data);
  }
  if (thread == 0) loop->threads = threads;
  __atomic_fetch_add(&loop->work, now() - start, __ATOMIC_RELAXED);
  return status;
}

static int launch(Body body, void *data, int count) {
  int place = ((uintptr_t)body >> 4) % 256;
  int64_t start = now(), taken = __atomic_load_n(&last[place].taken, __ATOMIC_RELAXED);
  int64_t work = __atomic_load_n(&last[place].work, __ATOMIC_RELAXED);
  Loop loop = {body, data, taken >= LONG_NANOSECONDS, 0, 0, 0, 0};
  Group alone = {0, 1};
  Cpus cpus;
  int all = count == 0, status;
  if (all && work && pool && !loop.is_long) {
    int fewer = threads_for(work, pool);
    if (fewer < pool) count = fewer;
  }
  if (all && loop.is_long && cpu_for_each(pool, &cpus)) loop.cpus = &cpus;
  status = all && count == 1 ? take_parts(0, &alone, &loop) : launch_of_tvm(take_parts, &loop, count);
  if (loop.cpus) bind_to_all(loop.cpus);
  if (count == 0) pool = loop.threads;
  __atomic_store_n(&last[place].taken, now() - start, __ATOMIC_RELAXED);
  __atomic_store_n(&last[place].work, loop.work, __ATOMIC_RELAXED);
  return status;
}

/* TVMFFISafeCallType of tvm/ffi/c_api.h; a library that is loaded twice is one. */
int HAND_OUT_PARTS(void *self, const void *arguments, int number, void *result) {
  (void)self, (void)arguments, (void)number, (void)result;
  if (__TVMBackendParallelLaunch != launch) {
    launch_of_tvm = __TVMBackendParallelLaunch;
    __TVMBackendParallelLaunch = launch;
  }
  return 0;
}

#ifdef __cplusplus
}
#endif
