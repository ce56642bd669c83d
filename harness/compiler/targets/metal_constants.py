"""Writes float constants in Metal source by their bits, so that they stay exact.

TVM's code generator for Metal writes a constant with seven digits, although a float needs nine: 1/9 becomes 0.1111111,
which is another float. Constants that would change are written by their bits instead, as `as_type<float>(…)`. The
largest float and its negative are left, because minima and maxima start with them, and TVM distributes only such
reductions over threads.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm


def survives(value: float) -> bool:
    """Returns whether a float is unchanged after it was written with seven digits."""
    return struct.pack("<f", value) == struct.pack("<f", float(f"{value:e}"))


_LARGEST = struct.unpack("<f", bytes.fromhex("ffff7f7f"))[0]


def exact_constants() -> tvm.transform.Pass:
    """Returns the pass that writes float32 constants of kernels by their bits if TVM would round them."""
    import tvm
    import tvm_ffi
    from tvm import tirx

    def by_bits(constant: Any) -> Any:
        value = float(constant.value)
        if str(constant.ty) != "float32" or survives(value) or abs(value) == _LARGEST:
            return constant
        (bits,) = struct.unpack("<i", struct.pack("<f", value))
        return tirx.reinterpret("float32", tirx.IntImm("int32", bits))

    @tvm.transform.module_pass(opt_level=0, name="ExactConstants")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        exact = module.clone()
        for variable, function in module.functions_items():
            if isinstance(function, tirx.PrimFunc):
                exact[variable] = function.with_body(tvm_ffi.structural_map(function.body, (tirx.FloatImm, by_bits)))
        return exact

    return run
