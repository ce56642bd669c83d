"""Compiles a PyTorch module for the CPU, as a component is, and makes it ready to be called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tvm
from tvm import relax

from harness.compiler.lowering.route import Route, lower
from harness.compiler.targets import HOST
from harness.compiler.targets.compiling import compile_module
from harness.core.processors import THIS_MACHINE, Processors
from harness.runtime.executable import TRANSFORM_PARAMETERS
from harness.runtime.loading import open_library


def compiled(
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    library: Path,
    processors: Processors = THIS_MACHINE,
    route: Route | None = None,
) -> Callable[[], list[Any]]:
    """Lowers a module, compiles it for the CPU and packs its weights; returns what runs it on these inputs."""
    imported = lower(module, inputs, route)
    compile_module(imported.module, HOST, library, processors=processors)
    machine = relax.VirtualMachine(open_library(library), HOST.device())
    arguments = [tvm.runtime.tensor(tensor.numpy()) for tensor in inputs]
    packed = [tvm.runtime.tensor(weight) for weight in imported.parameters().values()]
    if machine.module.implements_function(TRANSFORM_PARAMETERS):
        packed = list(machine[TRANSFORM_PARAMETERS](packed))
    main = machine["main"]
    return lambda: main(*arguments, *packed)
