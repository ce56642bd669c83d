"""Small programs through TVM and back: what the defects' reproductions and the operators' tests run on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import tvm
from tvm import relax

from harness.lowering.frontends.torch_export.exporting import export_program
from harness.lowering.frontends.torch_export.importing import import_program
from harness.schedules.common.code_generation import generate

if TYPE_CHECKING:
    from numpy.typing import NDArray

Arrays = list["NDArray[np.generic]"]


def run_module(
    module: tvm.IRModule,
    arguments: Sequence[NDArray[Any]],
    target: str | tvm.target.Target = "llvm",
    pipeline: tvm.transform.Pass | None = None,
) -> Arrays:
    """Builds a module, with TVM's default pipeline unless another is given, and runs `main` on the CPU.

    Args:
        module: Imported module.
        arguments: One array for each parameter of `main`.
        target: What to compile for.
        pipeline: Takes the module as imported, returns one that is ready for code generation.
    """
    if pipeline is None:
        executable = relax.build(module, target)
    else:
        lowered = pipeline(module)
        executable = generate(
            lambda chosen: relax.build(lowered, chosen, relax_pipeline=None), tvm.target.Target(target)
        )
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return [output.numpy() for output in machine["main"](*(tvm.runtime.tensor(np.asarray(a)) for a in arguments))]


def run_tvm(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Arrays:
    """Exports, imports with every workaround, builds and runs."""
    imported, parameters = import_program(export_program(module, args))
    return run_module(imported, [*(arg.numpy() for arg in args), *parameters.values()])


def import_raw(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tvm.IRModule:
    """Exports, and imports as TVM's own documentation does it, without a workaround."""
    from tvm.relax.frontend.torch import from_exported_program

    with torch.no_grad():
        return from_exported_program(torch.export.export(module, args, strict=False))


def run_raw(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Arrays:
    """Exports, imports without a workaround, builds and runs."""
    return run_module(import_raw(module, args), [arg.numpy() for arg in args])


def run_torch(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Arrays:
    """Returns what PyTorch returns, as a list."""
    with torch.no_grad():
        result = module(*args)
    return [output.numpy() for output in (result if isinstance(result, tuple | list) else (result,))]
