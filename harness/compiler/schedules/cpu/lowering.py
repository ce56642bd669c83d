"""Defines the plain data between recognizing an operator on Relax and emitting its kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import ir, relax

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.schedules.common.scope import Scope
from harness.compiler.schedules.cpu.bf16 import allows_bf16
from harness.compiler.schedules.cpu.blocking import Blocking
from harness.compiler.schedules.cpu.contraction import Contraction
from harness.compiler.schedules.cpu.epilogue import Epilogue, ResultLayout
from harness.compiler.schedules.cpu.microkernels.choice import choose
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.operand_layer import OperandLayer
from harness.compiler.schedules.cpu.schedule import ProductWorkload, Workload, blocking_of, decided
from harness.compiler.schedules.cpu.tile import VectorUnit

Build = Callable[[relax.BlockBuilder, Sequence[relax.Expr], Epilogue], relax.Expr]
"""Takes a builder, the lowering's inputs and then the epilogue's operands, and the epilogue; returns the kernel's call.
"""


@dataclass(frozen=True)
class Lowering:
    """The lowering of one operator to a kernel.

    Attributes:
        inputs: The expressions that the kernel reads; not necessarily the operator's own arguments.
        layout: Layout of the result; None if no epilogue may be attached.
        build: Emits packing and kernel.
        permuted: Takes the axes of a following `permute_dims` and returns the lowering that includes it.
        contraction: The product that `build` emits; None if it is another kernel.
        rounds: Whether the kernel rounds its first input to bfloat16, and takes it rounded as well.
        rounded: Makes the lowering whose kernel stores the result in bfloat16; None if only an epilogue can.
    """

    inputs: tuple[relax.Expr, ...]
    layout: ResultLayout | None
    build: Build
    permuted: Callable[[tuple[int, ...]], Lowering | None] | None = None
    contraction: Contraction | None = None
    rounds: bool = False
    rounded: Callable[[], Lowering] | None = None


def contracted(contraction: Contraction, *, rounds: bool = False) -> Lowering:
    """Returns the lowering to the kernel of a contraction."""
    inputs = contraction.streaming.value, contraction.resident.value
    return Lowering(inputs, contraction.layout, contraction.build, contraction=contraction, rounds=rounds)


@dataclass(frozen=True, kw_only=True)
class Context(Scope):
    """The function around an operator, with the target and its schedules.

    Attributes:
        unit: The target's vector registers.
        kernels: Micro-kernels of the target, the fastest first.
        schedules: Tuned schedules by key of the kernel's workload.
        workloads: Workloads whose schedules were requested, call by call.
        projected_afterwards: Variables of linear layers that follow the attention whose values they are.
        key_layers: Linear layers that the kernel of an attention computes, by the attention's key.
    """

    unit: VectorUnit
    kernels: Sequence[MicroKernel]
    schedules: Schedules = field(default_factory=lambda: UNTUNED)
    workloads: list[Workload] = field(default_factory=list)
    projected_afterwards: frozenset[relax.Var] = frozenset()
    key_layers: Mapping[relax.Var, OperandLayer] = field(default_factory=dict)

    def decide(self, workload: Workload, micro_kernel: MicroKernel = FP32) -> dict[str, int]:
        """Returns the complete schedule of a workload, and records it; none if the micro-kernel chooses its tile.

        Raises:
            HarnessError: Tuning found one that cannot be used.
        """
        if micro_kernel.choose_tile is not None:
            return {}
        self.workloads.append(workload)
        return decided(workload, self.unit, self.schedules.get(workload.key, {}))

    def blocking(
        self, workload: ProductWorkload, micro_kernel: MicroKernel, schedule: dict[str, int] | None = None
    ) -> Blocking:
        """Returns the blocking of a product, which tuning decides unless the micro-kernel chooses its tile.

        Args:
            workload: The product.
            micro_kernel: Its micro-kernel.
            schedule: Its complete schedule; `decide` is asked if None.

        Raises:
            HarnessError: Tuning found a schedule that cannot be used.
        """
        extents, streaming = workload.direct
        if schedule is None:
            schedule = self.decide(workload, micro_kernel)
        return blocking_of(micro_kernel, self.unit, extents.packed(micro_kernel.terms), streaming, schedule)

    def micro_kernel(
        self, operator: ir.Call, rows: int, terms: int, repeats: int = 1, *, row_major: bool = True
    ) -> MicroKernel:
        """Returns the micro-kernel of an operator with fp32 operands, which are rounded if it has that note.

        Products of weights alone are fp32: they are computed where weights are packed, once, which may be a machine
        without the target's instructions.

        Args:
            operator: The operator.
            rows: Rows of the product.
            terms: Terms among which the terms of an element are chosen.
            repeats: Number of times that a sum has these terms: pixels of a convolution's kernel.
            row_major: Whether panels of the left operand can lie row by row.
        """
        if not allows_bf16(operator) or all(map(self.is_parameter, operator.args)):
            return FP32
        return choose(self.kernels, rows, terms, repeats, row_major=row_major)
