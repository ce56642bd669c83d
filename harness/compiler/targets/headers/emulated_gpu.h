// The threads of a GPU on one CPU thread.
//
// A launch runs block after block. Where a kernel never synchronizes, the threads of a block are a loop; elsewhere each
// thread has a stack of its own and runs until it waits, for its block at a barrier or for its warp at a shuffle.
// Included once, by what harness/compiler/execution/emulation/device.py writes; needs no library but the C runtime.
#pragma once

extern "C" {
void* malloc(unsigned long);
int TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
}

namespace emulated {

constexpr unsigned WARP = 32, MAX_THREADS = 1024, STACK_BYTES = 256 * 1024;
constexpr unsigned BUFFER_ALIGNMENT = 64;  // kAllocAlignment of tvm/runtime/device_api.h
constexpr long MAX_DYNAMIC_BYTES = 227 * 1024;  // shared memory of a block, on sm_90 (CUDA Programming Guide)

struct Index {
  unsigned x, y, z;
};

/* TVM's packed argument (TVMFFIAny of tvm/ffi/c_api.h). */
struct Any {
  int type_index;
  unsigned padding;
  union {
    long v_int64;
    double v_float64;
    void* v_ptr;
  };
};

#define CHANGING __attribute__((visibility("hidden")))
// Visible to the linker, so that the compiler expects them to change wherever a thread waits.
CHANGING Index thread_index, block_index, block_size, grid_size;
CHANGING unsigned current;  // the thread that runs

enum State { READY, AT_BARRIER, AT_SHUFFLE, FINISHED };

struct Thread {
  void* stack_pointer;
  Index index;
  State state;
};

struct Warp {
  alignas(16) unsigned char values[2][WARP][16];
  unsigned valid[2];  // lanes that took part in the last exchange through each of the two buffers
  unsigned phase;     // the buffer of the next exchange
};

static Thread threads[MAX_THREADS];
static Warp warps[MAX_THREADS / WARP];
static unsigned thread_count, stacks_made;
static unsigned first_lane, lane_count, turns_taken;  // of the warp that runs
static void* scheduler_stack;
static void (*body)();
static bool synchronizes;

#define INLINE static inline __attribute__((always_inline))

// Leaves the stack pointer in *save and goes on with another stack, on which every register may be another.
#if defined(__x86_64__)
#ifdef __AVX512F__
#define MORE_REGISTERS                                                                                              \
  , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27",    \
      "xmm28", "xmm29", "xmm30", "xmm31", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#else
#define MORE_REGISTERS
#endif
// It jumps: a processor predicts where `ret` goes from the calls before it, which were another thread's. The red zone
// below the stack pointer may be in use.
INLINE void switch_stack(void** save, void* to) {
  asm volatile(R"(
  subq $128, %%rsp
  pushq %%rbp
  pushq %%rbx
  leaq 1f(%%rip), %%rax
  pushq %%rax
  movq %%rsp, (%%rdi)
  movq %%rsi, %%rsp
  popq %%rax
  jmpq *%%rax
1:
  popq %%rbx
  popq %%rbp
  addq $128, %%rsp
)"
               : "+D"(save), "+S"(to)
               :
               : "memory", "cc", "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
                 "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
                 "xmm13", "xmm14", "xmm15" MORE_REGISTERS);
}
constexpr unsigned SAVED_WORDS = 2, RETURN_WORD = 0;  // where to go on, the caller's frame
#elif defined(__aarch64__)
void switch_stack(void** save, void* to) asm("sam3_tvm_switch_stack");
asm(R"(
.text
.balign 4
sam3_tvm_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr unsigned SAVED_WORDS = 20, RETURN_WORD = 11;
#else
#error "threads can be emulated on x86-64 and on arm64"
#endif

// In which order the threads of a warp, and the warps of a block, take turns: a kernel that lacks a barrier computes
// something else in the other order.
#ifdef EMULATED_DESCENDING
INLINE unsigned turn(unsigned i, unsigned count) { return count - 1 - i; }
#else
INLINE unsigned turn(unsigned i, unsigned) { return i; }
#endif

// The stack of the next thread of the warp whose turn it is, which is then the one that runs; null if there is none.
INLINE void* next_stack() {
  while (++turns_taken < lane_count) {
    unsigned thread = first_lane + turn(turns_taken, lane_count);
    if (threads[thread].state != READY) continue;
    current = thread;
    thread_index = threads[thread].index;
    return threads[thread].stack_pointer;
  }
  return nullptr;
}

INLINE void wait_as(State state) {
  Thread& waiting = threads[current];
  waiting.state = state;
  void* next = next_stack();
  switch_stack(&waiting.stack_pointer, next ? next : scheduler_stack);
}

static void run_forever() {
  for (;;) {
    body();
    wait_as(FINISHED);
  }
}

static void make_stacks(unsigned count) {
  for (; stacks_made < count; ++stacks_made) {
    unsigned long top = (unsigned long)malloc(STACK_BYTES) + STACK_BYTES;
    void** frame = (void**)(top & ~15ul) - SAVED_WORDS;
    for (unsigned i = 0; i < SAVED_WORDS; ++i) frame[i] = nullptr;
    frame[RETURN_WORD] = (void*)run_forever;
    threads[stacks_made].stack_pointer = frame;
  }
}

// Runs the threads of a warp until each is finished or waits for the block.
static void run_warp(unsigned warp) {
  unsigned first = warp * WARP, lanes = thread_count - first < WARP ? thread_count - first : WARP;
  first_lane = first;
  lane_count = lanes;
  for (;;) {
    unsigned exchanging = 0;
    turns_taken = -1u;
    if (void* next = next_stack()) switch_stack(&scheduler_stack, next);
    for (unsigned lane = 0; lane < lanes; ++lane) {
      if (threads[first + lane].state != AT_SHUFFLE) continue;
      exchanging |= 1u << lane;
      threads[first + lane].state = READY;
    }
    if (!exchanging) return;
    Warp& state = warps[warp];
    state.valid[state.phase] = exchanging;
    state.phase ^= 1;
  }
}

// Null, or what is wrong with the kernel.
static const char* run_block() {
  unsigned warp_count = (thread_count + WARP - 1) / WARP;
  for (unsigned thread = 0; thread < thread_count; ++thread) threads[thread].state = READY;
  for (;;) {
    unsigned finished = 0;
    for (unsigned i = 0; i < warp_count; ++i) run_warp(turn(i, warp_count));
    for (unsigned thread = 0; thread < thread_count; ++thread) finished += threads[thread].state == FINISHED;
    if (finished == thread_count) return nullptr;
    if (finished) return "some threads of a block are at a barrier that others have left out";
    for (unsigned thread = 0; thread < thread_count; ++thread) threads[thread].state = READY;
  }
}

static const char* run_grid() {
  unsigned count = block_size.x * block_size.y * block_size.z;
  thread_count = count;
  if (synchronizes) make_stacks(count);
  for (unsigned thread = 0; thread < count; ++thread) {
    unsigned row = thread / block_size.x;
    threads[thread].index = {thread % block_size.x, row % block_size.y, row / block_size.y};
  }
  for (unsigned z = 0; z < grid_size.z; ++z)
    for (unsigned y = 0; y < grid_size.y; ++y)
      for (unsigned x = 0; x < grid_size.x; ++x) {
        block_index = {x, y, z};
        if (synchronizes) {
          if (const char* problem = run_block()) return problem;
          continue;
        }
        for (unsigned i = 0; i < count; ++i) {
          thread_index = threads[turn(i, count)].index;
          body();
        }
      }
  return nullptr;
}

static unsigned append(char* text, unsigned length, const char* more) {
  while (*more && length < 511) text[length++] = *more++;
  text[length] = 0;
  return length;
}

// Whether some of the first arguments are places inside of a buffer: Metal takes buffers from their beginning, which
// TVM's allocator aligns.
static bool some_inside(const Any* arguments, unsigned count) {
  for (unsigned i = 0; i < count; ++i)
    if ((unsigned long)arguments[i].v_ptr % BUFFER_ALIGNMENT) return true;
  return false;
}

// Args: the first `whole` of the host's arguments are whole buffers; those from `first_extent` on are extents in the
// order of `tags`: b, g for block and grid, x, y, z; last, for s, the bytes of dynamic shared memory.
static int launch(const char* name, void (*kernel)(), bool waits, const Any* values, unsigned whole,
                  unsigned first_extent, const char* tags) {
  const Any* extents = values + first_extent;
  block_size = grid_size = {1, 1, 1};
  long dynamic_bytes = 0;
  for (unsigned i = 0; tags[2 * i]; ++i) {
    if (tags[2 * i] == 's') {
      dynamic_bytes = extents[i].v_int64;
      break;
    }
    Index& size = tags[2 * i] == 'b' ? block_size : grid_size;
    (tags[2 * i + 1] == 'x' ? size.x : tags[2 * i + 1] == 'y' ? size.y : size.z) = (unsigned)extents[i].v_int64;
  }
  body = kernel;
  synchronizes = waits;
  unsigned long count = (unsigned long)block_size.x * block_size.y * block_size.z;
  const char* problem = count > MAX_THREADS                 ? "a block has more than 1024 threads"
                        : dynamic_bytes > MAX_DYNAMIC_BYTES ? "a block has more than 227 KiB of dynamic shared memory"
                        : some_inside(values, whole)        ? "an argument is a place inside of a buffer"
                                                            : run_grid();
  if (!problem) return 0;
  char message[512];
  unsigned length = append(message, 0, "emulated kernel ");
  length = append(message, length, name);
  length = append(message, length, ": ");
  append(message, length, problem);
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}

template <typename T>
struct Exact {
  static T of(const Any& any) { return (T)any.v_int64; }
};
template <>
struct Exact<float> {
  static float of(const Any& any) { return (float)any.v_float64; }
};
template <typename T>
struct Exact<T*> {
  static T* of(const Any& any) { return (T*)any.v_ptr; }
};

// A scalar as TVM hands it to Metal: in the first bytes of a cell of 64 bits (ArgUnion64 of TVM's runtime/pack_args.h).
template <typename T>
static unsigned long cell(const Any& any) {
  T value = Exact<T>::of(any);
  unsigned long result = 0;
  __builtin_memcpy(&result, &value, sizeof(T));
  return result;
}

// The struct that a kernel reads cells as.
template <typename T, unsigned COUNT>
static T fields(const unsigned long (&cells)[COUNT]) {
  static_assert(sizeof(T) == sizeof(cells), "a kernel's scalars lie where the host puts them");
  return __builtin_bit_cast(T, cells);
}

}  // namespace emulated

INLINE void synchronize_block() {
  if (!emulated::synchronizes) __builtin_trap();  // the translation overlooked it
  emulated::wait_as(emulated::AT_BARRIER);
}

INLINE unsigned lane_in_warp() { return emulated::current % emulated::WARP; }

// The value of another lane; its own where that lane is out of the warp, all bits set where it takes no part.
template <typename T>
INLINE T exchange_in_warp(T value, unsigned source_lane) {
  static_assert(sizeof(T) <= 16, "a shuffle moves 16 bytes at most");
  if (!emulated::synchronizes) __builtin_trap();
  emulated::Warp& warp = emulated::warps[emulated::current / emulated::WARP];
  unsigned phase = warp.phase;
  __builtin_memcpy(warp.values[phase][lane_in_warp()], &value, sizeof(T));
  emulated::wait_as(emulated::AT_SHUFFLE);
  if (source_lane >= emulated::WARP) return value;
  T result;
  __builtin_memset(&result, 0xff, sizeof(T));
  if (warp.valid[phase] >> source_lane & 1) __builtin_memcpy(&result, warp.values[phase][source_lane], sizeof(T));
  return result;
}

INLINE void synchronize_warp() { exchange_in_warp(0, lane_in_warp()); }

// Lanes that are not finished and do not wait for the block.
static inline unsigned active_lanes() {
  unsigned first = emulated::current / emulated::WARP * emulated::WARP, mask = 0;
  for (unsigned lane = 0; lane < emulated::WARP && first + lane < emulated::thread_count; ++lane) {
    emulated::State state = emulated::threads[first + lane].state;
    if (state == emulated::READY || state == emulated::AT_SHUFFLE) mask |= 1u << lane;
  }
  return mask;
}
