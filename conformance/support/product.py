"""Defines a component small enough to be compiled in a second."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax import op


def product_module(*returned: int) -> tvm.IRModule:
    """Builds x [6, 4], weight [4, 4], table [3] → x · weight, and those of the three whose numbers are given."""
    builder = relax.BlockBuilder()
    shapes = ((6, 4), (4, 4), (3,))
    parameters = [relax.Var(f"x{n}", relax.TensorType(list(shape), "float32")) for n, shape in enumerate(shapes)]
    with builder.function("main", parameters, attrs={"num_input": 1}):
        with builder.dataflow():
            product = builder.emit(op.matmul(parameters[0], parameters[1]))
            result = builder.emit_output(relax.Tuple([product, *(parameters[n] for n in returned)]))
        builder.emit_func_output(result)
    return builder.get()
