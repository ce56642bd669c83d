"""Compiles small modules in half precision by TVM's own loops."""

from __future__ import annotations

import numpy as np
import tvm
from torch import nn
from tvm import relax

from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.importing import import_program
from harness.compiler.lowering.precision import lower_precision, parameters_for
from harness.compiler.schedules.gpu.legalization import LEGALIZE
from harness.core.precision import PRECISIONS


def lowered(module: nn.Module, args: tuple, precision: str) -> tuple[tvm.IRModule, list[np.ndarray]]:
    """Imports a module in a half precision, with its parameters."""
    imported, parameters = import_program(export_program(module, args))
    result = lower_precision(imported, PRECISIONS[precision])
    return result, parameters_for(result, list(parameters.values()))


def run(module: tvm.IRModule, inputs: list, parameters: list) -> list[np.ndarray]:
    """Computes the module by TVM's own loops for this CPU."""
    with tvm.target.Target("llvm"):
        module = relax.transform.LegalizeOps(LEGALIZE)(module)
        machine = relax.VirtualMachine(relax.build(module, "llvm"), tvm.cpu())
    tensors = [tvm.runtime.tensor(np.asarray(array), tvm.cpu()) for array in [*inputs, *parameters]]
    return [result.numpy() for result in machine["main"](*tensors)]
