"""How a library hands out the parts of a parallel loop: to whichever thread is free.

TVM's pool gives each thread one equal part of a loop, which ends with its slowest thread: one whose core another
process uses, too, or an efficiency core. The code that TVM compiles from a loop does any one of any number of equal
parts. So a library cuts a long loop into more parts than there are threads, and each thread takes the next part until
none is left. `harness.runtime.loading` asks a library for that when it is loaded.
"""

from __future__ import annotations

from harness.runtime.loading import HAND_OUT_PARTS

PARTS_PER_THREAD = 4
"""Parts of a loop for each thread; more would be smaller than what a thread keeps from one task to the next."""
LEAST_PARTS = 16
"""Parts on few threads, where one that is late would keep the others waiting for longer."""
LONG_SECONDS = 8e-3
"""A loop is long that took so long when it last ran; systems take a core from a thread about as often."""


def parts_of_loop(threads: int) -> int:
    """Returns how many parts a long loop is cut into; one thread does all of a loop at once."""
    return 1 if threads == 1 else max(LEAST_PARTS, PARTS_PER_THREAD * threads)


SOURCE = f"""\
#include <stdint.h>
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

typedef struct {{
  Body body;
  void *data;
  int is_long;
  int next;
}} Loop;

/* Nanoseconds that loops took last; two loops that share a place are only cut as the other would be. */
static int64_t taken[256];

static int64_t now(void) {{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}}

static int take_parts(int thread, Group *group, void *data) {{
  Loop *loop = (Loop *)data;
  int threads = group->num_task, wanted = {PARTS_PER_THREAD} * threads;
  Group parts = {{group->sync_handle, wanted < {LEAST_PARTS} ? {LEAST_PARTS} : wanted}};
  int part, status = 0;
  if (!loop->is_long || threads == 1) return loop->body(thread, group, loop->data);
  while (status == 0 && (part = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED)) < parts.num_task)
    status = loop->body(part, &parts, loop->data);
  return status;
}}

static int launch(Body body, void *data, int count) {{
  int64_t *last = &taken[((uintptr_t)body >> 4) % 256], start = now();
  Loop loop = {{body, data, __atomic_load_n(last, __ATOMIC_RELAXED) >= {round(LONG_SECONDS * 1e9)}, 0}};
  int status = launch_of_tvm(take_parts, &loop, count);
  __atomic_store_n(last, now() - start, __ATOMIC_RELAXED);
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
"""In C. A thread that fails takes no further part, and TVM tells the error of any of them."""
