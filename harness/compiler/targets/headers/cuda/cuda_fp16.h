// CUDA's half type as far as TVM's code generator uses it: clang's, which is rounded to nearest even as on the device.
#pragma once

typedef _Float16 half;
typedef _Float16 __half;
struct alignas(4) half2 {
  half x, y;
  half2() = default;
  half2(half x, half y) : x(x), y(y) {}
};
typedef half2 __half2;
static inline half2 make_half2(half x, half y) { return {x, y}; }

static inline float __half2float(half x) { return (float)x; }
static inline half __float2half(float x) { return (half)x; }
static inline half __float2half_rn(float x) { return (half)x; }
static inline bool __hgt(half a, half b) { return a > b; }
static inline bool __hlt(half a, half b) { return a < b; }
