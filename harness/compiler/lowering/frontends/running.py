"""Runs small programs in PyTorch and imported modules in TVM, for the defects' reproductions and the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import tvm
from numpy.typing import NDArray
from tvm import relax

from harness.compiler.schedules.common import resizing
from harness.compiler.schedules.common.code_generation import generate
from harness.compiler.schedules.common.nan import keep_nan
from harness.compiler.schedules.common.ordering import order_nan

Arrays = list[NDArray[np.generic]]
Inputs = tuple[torch.Tensor, ...]


def run_module(
    module: tvm.IRModule,
    arguments: Sequence[NDArray[Any]],
    target: str | tvm.target.Target = "llvm",
    pipeline: tvm.transform.Pass | None = None,
) -> Arrays:
    """Builds a module, with TVM's default pipeline unless another pipeline is given, and runs `main` on the CPU.

    Args:
        module: Imported module.
        arguments: One array for each parameter of `main`.
        target: The target.
        pipeline: Takes the imported module and returns a module that is ready for code generation.
    """
    if pipeline is None:
        executable = relax.build(module, target)
    else:
        with tvm.target.Target(target):
            lowered = pipeline(module)
        executable = generate(
            lambda target_: relax.build(lowered, target_, relax_pipeline=None), tvm.target.Target(target)
        )
    machine = relax.VirtualMachine(executable, tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(np.asarray(a)) for a in arguments))
    # TVM's importer of ONNX models returns a single output without a tuple
    return [result.numpy() for result in ([results] if isinstance(results, tvm.runtime.Tensor) else results)]


def run_torch(module: torch.nn.Module, args: Inputs) -> Arrays:
    """Runs a module in PyTorch, and returns its outputs as a list."""
    with torch.no_grad():
        result = module(*args)
    return [output.numpy() for output in (result if isinstance(result, tuple | list) else (result,))]


def run_raw(
    import_raw: Callable[[torch.nn.Module, Inputs], tvm.IRModule], module: torch.nn.Module, args: Inputs
) -> Arrays:
    """Exports, imports without a frontend's workarounds, builds and runs a module."""
    return run_module(import_raw(module, args), [arg.numpy() for arg in args])


def run_repaired(
    import_module: Callable[[torch.nn.Module, Inputs], tuple[tvm.IRModule, Mapping[str, NDArray[Any]]]],
    module: torch.nn.Module,
    args: Inputs,
    target: str | tvm.target.Target = "llvm",
) -> Arrays:
    """Exports, imports with every workaround of a frontend, builds and runs a module."""
    imported, parameters = import_module(module, args)
    arrays = [*(arg.numpy() for arg in args), *parameters.values()]
    return run_module(imported, arrays, target, repaired_pipeline())


def repaired_pipeline() -> tvm.transform.Pass:
    """Returns TVM's default CPU pipeline with the repairs of its backend that both of this project's pipelines have."""
    return tvm.transform.Sequential(
        [
            relax.backend.DispatchSampling(),
            order_nan(),
            relax.backend.DispatchSortScan(),
            relax.transform.LegalizeOps(resizing.LEGALIZE),
            keep_nan,
            relax.get_pipeline("default"),
        ]
    )
