// CUDA's bfloat16 type as far as TVM's code generator uses it: the upper half of a float, rounded to nearest even.
// clang's own type is not used: without instructions for it it needs functions of a runtime library.
#pragma once

struct nv_bfloat16 {
  unsigned short bits;
  nv_bfloat16() = default;
  nv_bfloat16(float x) {
    unsigned wide = __builtin_bit_cast(unsigned, x);
    bits = x != x ? 0x7fff : (unsigned short)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  operator float() const { return __builtin_bit_cast(float, (unsigned)bits << 16); }
};
typedef nv_bfloat16 __nv_bfloat16;
struct alignas(4) nv_bfloat162 {
  nv_bfloat16 x, y;
  nv_bfloat162() = default;
  nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) : x(x), y(y) {}
};
typedef nv_bfloat162 __nv_bfloat162;

static inline float __bfloat162float(nv_bfloat16 x) { return x; }
static inline nv_bfloat16 __float2bfloat16(float x) { return x; }
static inline nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static inline bool __hgt(nv_bfloat16 a, nv_bfloat16 b) { return (float)a > (float)b; }
static inline bool __hlt(nv_bfloat16 a, nv_bfloat16 b) { return (float)a < (float)b; }
