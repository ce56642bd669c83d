"""Emits warp-wide instructions on fragments of known layout: products of half operands, and loads of operands.

TVM's `tvm_mma_sync` hides the layout of a fragment. Here it is known (PTX ISA, matrix fragments for mma.m16n8k16), so
that the result of a product can be changed in registers and be an operand of the next product. With row = lane / 4 and
pair = 2 · (lane % 4), a lane holds

    sums [16, 8]:     (row, pair) (row, pair + 1) (row + 8, pair) (row + 8, pair + 1), fp32
    left [16, 16]:    (row, pair…) (row + 8, pair…) (row, pair + 8…) (row + 8, pair + 8…), two neighbours in 32 bits
    right [16, 8]:    (pair…, row) (pair + 8…, row), likewise, neighbours along the terms

The instructions need sm_80 or later. Without a CUDA compiler, `harness/compiler/targets/headers/cuda/mma.h` has the
functions.
"""

from __future__ import annotations

from tvm.backend.cuda.op import cuda_func_call

from harness.compiler import tir as T

SHORT = {"float16": "f16", "bfloat16": "bf16"}
"""PTX's names of the element types."""
_TYPES = {"float16": "half", "bfloat16": "nv_bfloat16"}
_PACKING = {"float16": "__half2 pair = __floats2half2_rn", "bfloat16": "__nv_bfloat162 pair = __floats2bfloat162_rn"}


def multiply(
    dtype: str, sums: T.Buffer, sum_register: int, left: T.Buffer, first: int, right: T.Buffer, n: int
) -> None:
    """Emits sums += left · right, for 16 rows, 8 columns and 16 terms of a warp.

    Args:
        dtype: Element type of the operands.
        sums: fp32 registers.
        sum_register: First of the four registers of the sums.
        left: Registers of 32 bits.
        first: First of the four registers of the left operand.
        right: Registers of 32 bits.
        n: First of the two registers of the right operand.
    """
    kind, name = SHORT[dtype], f"multiply_{SHORT[dtype]}_matrix_sync"
    source = f"""
#ifdef __CUDACC__
__device__ __forceinline__ void {name}(float* d, const unsigned* a, const unsigned* b) {{
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
      "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}}
#else
#include <mma.h>
static inline void {name}(float* d, const unsigned* a, const unsigned* b) {{
  emulated::multiply<{_TYPES[dtype]}>(d, a, b);
}}
#endif
"""
    pointers = (
        sums.access_ptr("rw", offset=sum_register),
        left.access_ptr("r", offset=first),
        right.access_ptr("r", offset=n),
    )
    T.evaluate(cuda_func_call(name, *pointers, source_code=source))


def load(dtype: str, registers: T.Buffer, first: int, row: T.Index, *, transposed: bool = False) -> None:
    """Emits the load of four matrices [8, 8] from shared memory, the register from `first` on for each.

    Args:
        dtype: Element type.
        registers: Registers of 32 bits.
        first: First of the four registers.
        row: Pointer to 16 bytes: row `lane % 8` of matrix `lane / 8`.
        transposed: Whether a lane gets neighbours along the columns of a matrix, not along its rows.
    """
    name = f"load_{SHORT[dtype]}{'_transposed' if transposed else ''}_matrix_sync"
    transposition = ".trans" if transposed else ""
    source = f"""
#ifdef __CUDACC__
__device__ __forceinline__ void {name}(unsigned* d, const void* row) {{
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4{transposition}.shared.b16 {{%0, %1, %2, %3}}, [%4];"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(address) : "memory");
}}
#else
#include <mma.h>
static inline void {name}(unsigned* d, const void* row) {{
  emulated::load_matrices(d, (const {_TYPES[dtype]}*)row, {str(transposed).lower()});
}}
#endif
"""
    T.evaluate(cuda_func_call(name, registers.access_ptr("w", offset=first), row, source_code=source))


def packed(dtype: str, low: T.Expr, high: T.Expr) -> T.Expr:
    """Rounds two fp32 values and packs them into 32 bits."""
    name = f"pack_{SHORT[dtype]}"
    source = f"""
#ifdef __CUDACC__
__device__ __forceinline__ unsigned {name}(float low, float high) {{
  {_PACKING[dtype]}(low, high);
  return *reinterpret_cast<unsigned*>(&pair);
}}
#else
#include <mma.h>
static inline unsigned {name}(float low, float high) {{
  return emulated::pack<{_TYPES[dtype]}>(low, high);
}}
#endif
"""
    bits: T.Expr = cuda_func_call(name, low, high, source_code=source, return_type="uint32")
    return bits
