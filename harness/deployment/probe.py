"""A linear layer in fp32, compiled for each CPU of a folder, so that the fastest can be found where it is loaded.

A matrix unit multiplies fp32 numbers in six products (`harness.schedules.cpu.bf16x6`). Whether that is faster than
vectors is up to the host, which may throttle it: `harness.runtime.probing` asks the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.precision import DEFAULT_PRECISION
from harness.runtime.manifest import PROBE_LIBRARY
from harness.runtime.probing import COLUMNS, DEPTH, ENTRY, ROWS

if TYPE_CHECKING:
    import tvm


def needs_probe(precision: str, targets: Iterable[tvm.target.Target]) -> bool:
    """Returns whether a folder is in fp32 and has code for a matrix unit, which need not be faster there."""
    from harness.schedules.cpu.amx import matrix_unit

    return precision == DEFAULT_PRECISION and any(map(matrix_unit, targets))


def write_probe(folder: Path, target: tvm.target.Target) -> None:
    """Writes the library of the layer into the folder of a variant.

    Args:
        folder: The folder of the variant.
        target: TVM's target that it is compiled for.
    """
    from harness.targets import HOST
    from harness.targets.compiling import build_library, lower_module

    build_library(lower_module(layer(), HOST, target), target, folder / PROBE_LIBRARY)


def layer() -> tvm.IRModule:
    """Returns the layer, as an imported module."""
    from tvm import relax

    x, weight = (
        relax.Var(name, relax.TensorType([extent, DEPTH], "float32"))
        for name, extent in (("x", ROWS), ("weight", COLUMNS))
    )
    builder = relax.BlockBuilder()
    with builder.function(ENTRY, [x, weight], attrs={"num_input": 1}):
        with builder.dataflow():
            result = builder.emit(relax.op.matmul(x, relax.op.permute_dims(weight)))
            result = builder.emit_output(result)
        builder.emit_func_output(result)
    return builder.get()
