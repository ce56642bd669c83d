// CUDA's built-ins as far as TVM's code generator uses them, for emulation on a CPU; half types are in cuda_fp16.h and
// cuda_bf16.h. mma.h has tensor cores. Asynchronous copies and inline PTX are missing, and do not compile.
#pragma once
#include "../emulated_gpu.h"

#define __global__ __attribute__((visibility("hidden")))
#define __device__ inline
#define __host__
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define alignas(n) __attribute__((aligned(n)))

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define blockDim emulated::block_size
#define gridDim emulated::grid_size

#define VECTORS(T, NAME)                                                                                     \
  struct __attribute__((aligned(2 * sizeof(T)))) NAME##2 { T x, y; };                                        \
  struct NAME##3 { T x, y, z; };                                                                             \
  struct __attribute__((aligned(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16))) NAME##4 { T x, y, z, w; };        \
  static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                          \
  static inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                                  \
  static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(signed char, char)
VECTORS(unsigned char, uchar)
VECTORS(short, short)
VECTORS(unsigned short, ushort)
VECTORS(int, int)
VECTORS(unsigned int, uint)
VECTORS(long, long)
VECTORS(unsigned long, ulong)
VECTORS(long, longlong)
VECTORS(float, float)
#undef VECTORS

static inline void __syncthreads() { synchronize_block(); }
static inline void __syncwarp(unsigned = ~0u) { synchronize_warp(); }
static inline unsigned __activemask() { return active_lanes(); }

// A shuffle stays in the segment of `width` lanes; beyond it a lane gets its own value back (CUDA Programming Guide,
// warp shuffle functions). 64-bit values are moved too.
template <typename T>
static inline T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return exchange_in_warp(value, (lane_in_warp() & ~(unsigned)(width - 1)) | ((unsigned)lane & (unsigned)(width - 1)));
}
template <typename T>
static inline T __shfl_down_sync(unsigned, T value, unsigned delta, int width = 32) {
  unsigned own = lane_in_warp(), inside = own & (unsigned)(width - 1);
  return exchange_in_warp(value, inside + delta < (unsigned)width ? own + delta : own);
}
template <typename T>
static inline T __shfl_up_sync(unsigned, T value, unsigned delta, int width = 32) {
  unsigned own = lane_in_warp(), inside = own & (unsigned)(width - 1);
  return exchange_in_warp(value, delta <= inside ? own - delta : own);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  unsigned own = lane_in_warp(), other = own ^ (unsigned)mask;
  return exchange_in_warp(value, other / (unsigned)width == own / (unsigned)width ? other : own);
}

#define UNARY(F) \
  static inline float F##f(float x) { return __builtin_##F##f(x); }
UNARY(acos) UNARY(asin) UNARY(atan) UNARY(cbrt) UNARY(ceil) UNARY(cos) UNARY(cosh) UNARY(erf) UNARY(exp) UNARY(exp2)
UNARY(fabs) UNARY(floor) UNARY(log) UNARY(log10) UNARY(log1p) UNARY(log2) UNARY(nearbyint) UNARY(rint) UNARY(round)
UNARY(sin) UNARY(sinh) UNARY(sqrt) UNARY(tan) UNARY(tanh) UNARY(trunc)
#undef UNARY
static inline float erf(float x) { return __builtin_erff(x); }
static inline float exp10f(float x) { return __builtin_powf(10.0f, x); }
static inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
static inline float powf(float x, float y) { return __builtin_powf(x, y); }
static inline float fmodf(float x, float y) { return __builtin_fmodf(x, y); }
static inline float atan2f(float y, float x) { return __builtin_atan2f(y, x); }
static inline float copysignf(float x, float y) { return __builtin_copysignf(x, y); }
static inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline bool isnan(float x) { return x != x; }
static inline bool isinf(float x) { return __builtin_isinf(x); }
static inline bool isfinite(float x) { return __builtin_isfinite(x); }
static inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
static inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }

#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")

// As on the device, the largest of floats passes over NaN.
#define EXTREMES(T)                                       \
  static inline T max(T a, T b) { return a < b ? b : a; } \
  static inline T min(T a, T b) { return b < a ? b : a; }
EXTREMES(int) EXTREMES(unsigned int) EXTREMES(long) EXTREMES(unsigned long)
#undef EXTREMES
static inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
static inline float min(float a, float b) { return __builtin_fminf(a, b); }
static inline int abs(int x) { return x < 0 ? -x : x; }
static inline long abs(long x) { return x < 0 ? -x : x; }
