"""The plain data between recognizing an operator on Relax and emitting its kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import ir, relax, tirx

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.schedules.common.graph import is_call, permutation
from harness.compiler.schedules.common.scope import Scope
from harness.compiler.schedules.cpu.bf16 import multiplies_half
from harness.compiler.schedules.cpu.emit import FP32, Arithmetic
from harness.compiler.schedules.cpu.epilogue import Epilogue, ResultLayout
from harness.compiler.schedules.cpu.key_projection import KeyLayer
from harness.compiler.schedules.cpu.product import Blocking, Extents, Pack
from harness.compiler.schedules.cpu.schedule import Workload, decided
from harness.compiler.schedules.cpu.tile import VectorUnit

Build = Callable[[relax.BlockBuilder, Sequence[relax.Expr], Epilogue], relax.Expr]
"""(builder, the lowering's inputs and then the epilogue's operands, epilogue) → the call of the kernel."""


@dataclass(frozen=True)
class LinearLayer:
    """A product with weights, for a kernel that does more than that.

    Attributes:
        extents: Its extents, of one matrix.
        blocking: Its blocking.
        layout: How its result is laid out.
        shape: Shape of what it reads.
        packing: Emits the packing of its weight; returns the panels.
        pack_rows: How a kernel packs what it reads.
        in_order: Whether the rows that it reads lie one after the other.
    """

    extents: Extents
    blocking: Blocking
    layout: ResultLayout
    shape: tuple[int, ...]
    packing: Callable[[relax.BlockBuilder, relax.Expr], relax.Var]
    pack_rows: Callable[[tirx.Buffer], Pack]
    in_order: bool


@dataclass(frozen=True)
class Lowering:
    """How one operator becomes a kernel.

    Attributes:
        inputs: The expressions that the kernel reads; not necessarily the operator's own arguments.
        layout: How the result is laid out; None if no epilogue may be attached.
        build: Emits packing and kernel.
        permuted: Takes the axes of a `permute_dims` that follows; returns the lowering that does it as well.
        linear: The product, if it is one with weights on the right and rows on the left.
        rounds: Whether the kernel rounds its first input to bfloat16, and takes it rounded as well.
        rounded: Makes the lowering whose kernel stores the result in bfloat16; None if only an epilogue can.
    """

    inputs: tuple[relax.Expr, ...]
    layout: ResultLayout | None
    build: Build
    permuted: Callable[[tuple[int, ...]], Lowering | None] | None = None
    linear: LinearLayer | None = None
    rounds: bool = False
    rounded: Callable[[], Lowering] | None = None


@dataclass(frozen=True, kw_only=True)
class Context(Scope):
    """The function around an operator, as lowerings ask about it.

    Attributes:
        unit: The target's vector registers.
        bf16: How the target multiplies bfloat16 with vectors.
        bf16_tiles: How its instructions for whole panels do; None if it has none, or if code may not use them.
        schedules: What tuning found, by key of the kernel's workload.
        workloads: What schedules were asked for, call by call.
        projected_afterwards: Variables of linear layers that follow the attention whose values they are.
        key_layers: Linear layers that the kernel of an attention computes, by the attention's key.
    """

    unit: VectorUnit
    bf16: Arithmetic
    bf16_tiles: Arithmetic | None = None
    schedules: Schedules = field(default_factory=lambda: UNTUNED)
    workloads: list[Workload] = field(default_factory=list)
    projected_afterwards: frozenset[relax.Var] = frozenset()
    key_layers: Mapping[relax.Var, KeyLayer] = field(default_factory=dict)

    def decide(self, workload: Workload) -> dict[str, int]:
        """Completes the schedule of a workload, and notes the workload.

        Raises:
            HarnessError: Tuning found one that cannot be used.
        """
        self.workloads.append(workload)
        return decided(workload, self.unit, self.schedules.get(workload.key, {}))

    def rounds(self, operator: relax.Expr, terms: int) -> bool:
        """Returns whether the kernel of an operator rounds its fp32 operands, and multiplies pairs of terms.

        That takes the note of `with_half_products`, an even number of terms, and an instruction for pairs.
        """
        return self.bf16.shapes is None and terms % self.bf16.terms == 0 and multiplies_half(operator)

    def in_tiles(self, rows: int, terms: int, taps: int = 1) -> Arithmetic | None:
        """Returns the arithmetic of whole panels for a rounded product of so many rows and terms, if it is worth it.

        Args:
            rows: Rows of the product.
            terms: Those among which the terms of an element are chosen.
            taps: How often there are so many in a sum: pixels of a convolution's kernel.
        """
        arithmetic = self.bf16_tiles
        if arithmetic is None or arithmetic.tiles is None or terms % arithmetic.terms:
            return None
        return arithmetic if arithmetic.tiles.takes(rows, terms * taps // arithmetic.terms) else None

    def multiplied(self, operator: ir.Call, rows: int, terms: int, taps: int = 1, *, panels: bool = True) -> Arithmetic:
        """Returns what the kernel of an operator of fp32 operands multiplies, which it may round: see `rounds`.

        Elements that are scaled are those of linear layers alone. Products of weights alone are fp32: they are computed
        where weights are packed, once, which may be a machine without the target's instructions.

        Args:
            operator: The operator.
            rows: Rows of the product.
            terms: As for `in_tiles`, and taps likewise.
            taps: Pixels of a convolution's kernel.
            panels: Whether the kernel can multiply whole panels.
        """
        if all(map(self.is_parameter, operator.args)):
            return FP32
        tiled = self.in_tiles(rows, terms, taps) if panels and multiplies_half(operator) else None
        if tiled is not None and tiled.scaled is None:
            return tiled
        return self.bf16 if self.rounds(operator, terms) else FP32

    def transposed(self, value: relax.Expr) -> relax.Expr | None:
        """Returns the source of a swap of the last two dimensions, or None."""
        definition = self.definition(value)
        if not is_call(definition, "relax.permute_dims"):
            return None
        order = permutation(definition)
        rank = len(order)
        return definition.args[0] if rank >= 2 and order == (*range(rank - 2), rank - 1, rank - 2) else None
