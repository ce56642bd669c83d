"""Schedules parallel loops dynamically: a library hands out the parts of a loop to free threads.

TVM's pool gives each thread one equal part of a loop, which ends with its slowest thread: a thread on an efficiency
core, or on a core that another process also uses. The code that TVM compiles from a loop can run any one of any number
of equal parts. Therefore a library cuts a long loop into more parts than there are threads, and each thread takes the
next part until none is left. `harness.runtime.loading` switches this on when it loads a library.

In a long loop each thread is bound to its own CPU, if there is a CPU for each. A busy neighbour then takes its share of
one CPU, and the other threads take the parts that the slowed thread does not reach. Without binding, systems migrate
threads, or give a process with two threads one CPU and a process with one thread the other CPU. The calling thread's
affinity is restored when the loop ends.

A short loop does not need all threads of a large machine, because each woken thread costs time. A library records the
work of a loop's last run, and wakes as many threads as shorten the loop.
"""

from __future__ import annotations

from harness.runtime.loading import HAND_OUT_PARTS
from harness.runtime.threads import BINDING_VARIABLE

PARTS_PER_THREAD = 4
"""Parts of a loop per thread; smaller parts would lose the data that a thread keeps from one task to the next."""
LEAST_PARTS = 16
"""Least number of parts, because on few threads a late thread would delay the others for longer."""
LONG_SECONDS = 8e-3
"""Duration of the last run from which on a loop is long; systems preempt a thread about as often."""

LAUNCH_NANOSECONDS, LAUNCH_NANOSECONDS_PER_THREAD = 2000, 100
"""Assumed cost of launching a loop on awake threads: the calling thread fills one queue after another."""


def parts_of_loop(threads: int) -> int:
    """Returns the number of parts of a long loop; one thread runs a loop as a whole."""
    return 1 if threads == 1 else max(LEAST_PARTS, PARTS_PER_THREAD * threads)


def launch_nanoseconds(threads: int) -> int:
    """Returns the cost of launching a loop on threads; one thread runs the loop itself."""
    return 0 if threads == 1 else LAUNCH_NANOSECONDS + LAUNCH_NANOSECONDS_PER_THREAD * threads


def threads_for(work: int, threads: int) -> int:
    """Returns the number of a pool's threads for a short loop, doubled as long as that saves time.

    `SOURCE` has the same function in C.

    Args:
        work: Nanoseconds of all threads in the last run.
        threads: Threads of the pool.
    """
    count = 1
    while count < threads:
        doubled = min(2 * count, threads)
        if work // count - work // doubled <= launch_nanoseconds(doubled) - launch_nanoseconds(count):
            break
        count = doubled
    return count


SOURCE = f"""\
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
extern "C" {{
#endif

/* TVMParallelGroupEnv, FTVMParallelLambda and TVMBackendParallelLaunch of TVM's c_backend_api.h. */
typedef struct {{
  void *sync_handle;
  int num_task;
}} Group;
typedef int (*Body)(int, Group *, void *);
typedef int (*Launch)(Body, void *, int);

/* Through this variable of the library its loops find what runs them; TVM sets it to its own function on loading. */
__attribute__((weak)) Launch __TVMBackendParallelLaunch = 0;
static Launch launch_of_tvm = 0;

/* Nanoseconds that loops took last, and of all threads together; two loops that share a place are cut alike. */
static struct {{
  int64_t taken, work;
}} last[256];

/* Threads of the pool of the calling thread; 0 until it has run a loop. */
static __thread int pool = 0;

static int64_t now(void) {{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}}

static int threads_for(int64_t work, int threads) {{
  int count = 1;
  while (count < threads) {{
    int more = 2 * count < threads ? 2 * count : threads;
    int64_t costs = (int64_t){LAUNCH_NANOSECONDS_PER_THREAD} * (count == 1 ? more : more - count);
    if (count == 1) costs += {LAUNCH_NANOSECONDS};
    if (work / count - work / more <= costs) break;
    count = more;
  }}
  return count;
}}

#ifdef __linux__
typedef cpu_set_t Cpus;

/* The CPUs that the calling thread may use, if there is one for each of the threads and binding is not forbidden. */
static int cpu_for_each(int threads, Cpus *cpus) {{
  const char *asked = getenv("{BINDING_VARIABLE}");
  if (threads < 2 || (asked && strcmp(asked, "0") == 0)) return 0;
  return sched_getaffinity(0, sizeof *cpus, cpus) == 0 && CPU_COUNT(cpus) == threads;
}}

static void bind_to_one(int thread, const Cpus *cpus) {{
  Cpus own;
  int cpu;
  CPU_ZERO(&own);
  for (cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, cpus) && thread-- == 0) CPU_SET(cpu, &own);
  sched_setaffinity(0, sizeof own, &own);
}}

static void bind_to_all(const Cpus *cpus) {{ sched_setaffinity(0, sizeof *cpus, cpus); }}
#else
typedef int Cpus;

static int cpu_for_each(int threads, Cpus *cpus) {{ return (void)threads, (void)cpus, 0; }}
static void bind_to_one(int thread, const Cpus *cpus) {{ (void)thread, (void)cpus; }}
static void bind_to_all(const Cpus *cpus) {{ (void)cpus; }}
#endif

typedef struct {{
  Body body;
  void *data;
  int is_long;
  const Cpus *cpus;
  int threads;
  int next;
  int64_t work;
}} Loop;

static int take_parts(int thread, Group *group, void *data) {{
  Loop *loop = (Loop *)data;
  int64_t start = now();
  int threads = group->num_task, wanted = {PARTS_PER_THREAD} * threads;
  Group parts = {{group->sync_handle, wanted < {LEAST_PARTS} ? {LEAST_PARTS} : wanted}};
  int part, status = 0;
  if (loop->cpus) bind_to_one(thread, loop->cpus);
  if (!loop->is_long || threads == 1) {{
    status = loop->body(thread, group, loop->data);
  }} else {{
    while (status == 0 && (part = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED)) < parts.num_task)
      status = loop->body(part, &parts, loop->data);
  }}
  if (thread == 0) loop->threads = threads;
  __atomic_fetch_add(&loop->work, now() - start, __ATOMIC_RELAXED);
  return status;
}}

static int launch(Body body, void *data, int count) {{
  int place = ((uintptr_t)body >> 4) % 256;
  int64_t start = now(), taken = __atomic_load_n(&last[place].taken, __ATOMIC_RELAXED);
  int64_t work = __atomic_load_n(&last[place].work, __ATOMIC_RELAXED);
  Loop loop = {{body, data, taken >= {round(LONG_SECONDS * 1e9)}, 0, 0, 0, 0}};
  Group alone = {{0, 1}};
  Cpus cpus;
  int all = count == 0, status;
  if (all && work && pool && !loop.is_long) {{
    int fewer = threads_for(work, pool);
    if (fewer < pool) count = fewer;
  }}
  if (all && loop.is_long && cpu_for_each(pool, &cpus)) loop.cpus = &cpus;
  status = all && count == 1 ? take_parts(0, &alone, &loop) : launch_of_tvm(take_parts, &loop, count);
  if (loop.cpus) bind_to_all(loop.cpus);
  if (count == 0) pool = loop.threads;
  __atomic_store_n(&last[place].taken, now() - start, __ATOMIC_RELAXED);
  __atomic_store_n(&last[place].work, loop.work, __ATOMIC_RELAXED);
  return status;
}}

/* TVMFFISafeCallType of tvm/ffi/c_api.h; a library that is loaded twice is one. */
int __tvm_ffi_{HAND_OUT_PARTS}(void *self, const void *arguments, int number, void *result) {{
  (void)self, (void)arguments, (void)number, (void)result;
  if (__TVMBackendParallelLaunch != launch) {{
    launch_of_tvm = __TVMBackendParallelLaunch;
    __TVMBackendParallelLaunch = launch;
  }}
  return 0;
}}

#ifdef __cplusplus
}}
#endif
"""
"""C source of the launcher. A failing thread takes no further part, and TVM reports the error of one of them."""
