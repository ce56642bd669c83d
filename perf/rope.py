"""Compiles what the benchmarks of the strategies measure: the rotation alone, before attention, and no rotation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tvm
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprVisitor, visitor

from harness.compiler.lowering.rope import Strategy
from harness.compiler.lowering.rotation import Rotation, use_rotation
from harness.compiler.lowering.route import Route, lower
from harness.compiler.targets import TARGETS
from harness.core.processors import THIS_MACHINE, Processors
from harness.runtime.executable import TRANSFORM_PARAMETERS

HEADS, HEAD_SIZE = 16, 64
"""Of the ViT's attention."""

UNROTATED = Strategy(
    name="no rotation",
    summary="queries and keys as they are: what a program costs before any rotation",
    apply=lambda module: use_rotation(module, Rotation((), lambda _: (), lambda *_: (), lambda x, _repeat: x)),
)


class Rotate(torch.nn.Module):
    """Upstream's rotation of queries and keys [B, heads, width·height, 64]."""

    def __init__(self, width: int, height: int, scale: float) -> None:
        """Takes the grid, and the factor on its positions (24/72 in global blocks)."""
        super().__init__()
        from sam3.model import vitdet

        self.attention = vitdet.Attention(HEAD_SIZE, 1, use_rope=True, input_size=(1, 1))
        self.attention.freqs_cis = vitdet.compute_axial_cis(dim=HEAD_SIZE, end_x=width, end_y=height, scale_pos=scale)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns both rotated."""
        rotated: tuple[torch.Tensor, torch.Tensor] = self.attention._apply_rope(q, k)
        return rotated


class RotateAndAttend(Rotate):
    """The same, and the attention that follows, to values [B, heads, width·height, 64]."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns what the queries attend to."""
        return torch.nn.functional.scaled_dot_product_attention(*super().forward(q, k), v)


@dataclass(frozen=True)
class Compiled:
    """A module compiled with one strategy.

    Attributes:
        call: Runs it on its inputs.
        kernels: How many kernels one run calls.
        moved: Bytes of all tensors that they read or write, each tensor counted once per kernel.
    """

    call: Callable[[], Any]
    kernels: int
    moved: int


class Pool:
    """Parameters that several compiled modules have in common, each in memory once."""

    def __init__(self) -> None:
        """Empty."""
        self._known: dict[tuple[Any, ...], Any] = {}

    def shared(self, tensor: Any) -> Any:
        """Returns an equal tensor of TVM that was asked for before, or this one."""
        array = np.from_dlpack(tensor)
        digest = hashlib.sha256(array.view(np.uint8).data if array.ndim else array.tobytes()).digest()
        return self._known.setdefault((array.shape, str(array.dtype), digest), tensor)


def compiled(
    strategy: Strategy,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    pool: Pool,
    processors: Processors = THIS_MACHINE,
) -> Compiled:
    """Lowers a module with a strategy, compiles it for the CPU among the processors and packs its weights."""
    llvm = TARGETS["llvm"]
    imported = lower(module, inputs, Route(strategy=strategy))
    target = llvm.tvm_target(processors)
    with target, tvm.transform.PassContext(opt_level=3):
        lowered = llvm.pipeline(target)(imported.module)
        machine = relax.VirtualMachine(relax.build(lowered, target, relax_pipeline=None), llvm.device())
    arguments = [tvm.runtime.tensor(np.ascontiguousarray(tensor.numpy())) for tensor in inputs]
    packed = [tvm.runtime.tensor(weight) for weight in imported.parameters().values()]
    del imported
    if machine.module.implements_function(TRANSFORM_PARAMETERS):
        packed = list(machine[TRANSFORM_PARAMETERS](packed))
    packed = [pool.shared(tensor) for tensor in packed]
    main = machine["main"]
    calls = bytes_by_call(lowered)
    return Compiled(lambda: main(*arguments, *packed), len(calls), sum(calls))


def bytes_by_call(lowered: tvm.IRModule) -> list[int]:
    """Counts the bytes of the distinct tensors of every call of a kernel in `main`, by the shapes of its parameters."""
    calls: list[int] = []
    functions = dict(lowered.functions_items())

    @visitor
    class Calls(PyExprVisitor):  # type: ignore[misc]
        def visit_call_(self, op: ir.Call) -> None:
            function = functions.get(op.op) if isinstance(op.op, ir.GlobalVar) else None
            if isinstance(function, tirx.PrimFunc):
                tensors = dict(zip(op.args, function.params, strict=True))
                shapes = [([int(extent) for extent in buffer.shape], str(buffer.dtype)) for buffer in tensors.values()]
                calls.append(sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes))

    Calls().visit_expr(lowered["main"])
    return calls
