"""Float constants in Metal source, bit by bit.

TVM's code generator for Metal writes a constant with seven digits, where a float needs nine: 1/9 becomes 0.1111111,
which is another float. Those that would change are given by their bits instead, as `as_type<float>(…)`. Not so the
largest float and its negative: minima and maxima begin with them, and TVM spreads these over threads only then.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm


def survives(value: float) -> bool:
    """Returns whether a float is still the same after it was written with seven digits."""
    return struct.pack("<f", value) == struct.pack("<f", float(f"{value:e}"))


_LARGEST = struct.unpack("<f", bytes.fromhex("ffff7f7f"))[0]


def exact_constants() -> tvm.transform.Pass:
    """Gives float32 constants of kernels that TVM would round by their bits."""
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
