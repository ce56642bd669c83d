"""Runs small programs through torch.export and TVM."""

from __future__ import annotations

import torch
import tvm

from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.running import Arrays, repaired_pipeline, run_module
from harness.compiler.lowering.frontends.torch_export.importing import import_program


def run_tvm(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Arrays:
    """Exports, imports with every workaround, builds and runs a module."""
    imported, parameters = import_program(export_program(module, args))
    arguments = [*(arg.numpy() for arg in args), *parameters.values()]
    return run_module(imported, arguments, pipeline=repaired_pipeline())


def import_raw(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tvm.IRModule:
    """Exports a module and imports it as TVM's documentation does, without workarounds."""
    from tvm.relax.frontend.torch import from_exported_program

    with torch.no_grad():
        return from_exported_program(torch.export.export(module, args, strict=False))


def run_raw(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Arrays:
    """Exports, imports without workarounds, builds and runs a module."""
    return run_module(import_raw(module, args), [arg.numpy() for arg in args])
