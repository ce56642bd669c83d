"""Runs small programs through ONNX and TVM, for the defects' reproductions and the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.compiler.lowering.frontends.onnx import import_module
from harness.compiler.lowering.frontends.onnx.exporting import OPSET, silence_exporter
from harness.compiler.lowering.frontends.running import Arrays, repaired_pipeline, run_module

if TYPE_CHECKING:
    import tvm


def run_tvm(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Arrays:
    """Exports, imports with every workaround, builds and runs a module."""
    imported, parameters = import_module(module, args)
    arguments = [*(arg.numpy() for arg in args), *parameters.values()]
    return run_module(imported, arguments, pipeline=repaired_pipeline())


def import_raw(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tvm.IRModule:
    """Exports a module and imports it as TVM's documentation does, without workarounds."""
    from tvm.relax.frontend.onnx import from_onnx

    with torch.no_grad(), silence_exporter():
        exported = torch.onnx.export(module, args, dynamo=True, opset_version=OPSET, verbose=False)
        assert exported is not None
        return from_onnx(exported.model_proto)


def run_raw(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Arrays:
    """Runs a module without workarounds; TVM's importer returns a single output without a tuple."""
    import tvm
    from tvm import relax

    machine = relax.VirtualMachine(relax.build(import_raw(module, args), "llvm"), tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(arg.numpy()) for arg in args))
    return [result.numpy() for result in ([results] if isinstance(results, tvm.runtime.Tensor) else results)]
