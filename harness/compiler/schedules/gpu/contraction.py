"""Recognizes a sum of products in the loops of a kernel, for any operands and any epilogue.

    result[place(b, i, j)] = finish(Σ_k left(b, i, k) · right(b, k, j))

Linear layers, matrix products, convolutions and transposed convolutions are such sums: an operand's element is an
expression of the loop variables, with a condition where an image is padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym

from harness.compiler import tir as T

Values = dict[T.Var, T.Index]
_Node = TypeVar("_Node")
"""Expressions by the loop variables that they replace."""

_REDUCTION = 2
"""`tirx.IterVar.CommReduce`."""


@dataclass(frozen=True)
class Group:
    """Loop variables that form one index, the last one fastest."""

    variables: tuple[T.Var, ...]
    extents: tuple[int, ...]

    @property
    def size(self) -> int:
        """Returns the number of values of the index."""
        return math.prod(self.extents)

    def values(self, index: T.Index) -> Values:
        """Returns the variables' values for a value of the index."""
        values: Values = {}
        stride = self.size
        for variable, extent in zip(self.variables, self.extents, strict=True):
            stride //= extent
            value = T.floordiv(index, stride) if stride > 1 else index
            values[variable] = T.floormod(value, extent) if stride * extent < self.size else value
        return values


@dataclass(frozen=True)
class Element:
    """An element of a tensor for each value of the loop variables, which is loaded or stored.

    Attributes:
        tensor: The tensor.
        index: Its index in terms of loop variables.
        value: The stored value, or the loaded element.
    """

    tensor: T.Buffer
    index: tuple[T.Expr, ...]
    value: T.Expr


@dataclass(frozen=True)
class Strides:
    """The offsets of a tensor's elements, as sums of multiples of the digits of each group's index.

    Attributes:
        start: Offset of the first element.
        digits: For each group, extent and stride of each digit, the last one fastest.
    """

    start: int
    digits: tuple[tuple[tuple[int, int], ...], ...]

    def offset(self, indices: Sequence[T.Index]) -> T.Expr:
        """Returns the offset of an element, by the index of each group."""
        offset: T.Expr = _number(self.start)
        for index, digits in zip(indices, self.digits, strict=True):
            size = rest = math.prod(extent for extent, _ in digits)
            for extent, stride in digits:
                rest //= extent
                digit = T.floordiv(index, rest) if rest > 1 else index
                offset += (T.floormod(digit, extent) if rest * extent < size else digit) * stride
        return offset

    def runs_along(self, group: int, lanes: int = 1) -> bool:
        """Returns whether neighbours of a group are neighbours in memory, in aligned runs of `lanes`."""
        if not self.digits[group] or self.digits[group][-1][1] != 1:
            return False
        others = [d for g, digits in enumerate(self.digits) for d in (digits[:-1] if g == group else digits)]
        return not any(n % lanes for n in (self.start, self.digits[group][-1][0], *(stride for _, stride in others)))


def strides(element: Element, groups: Sequence[Group]) -> Strides | None:
    """Returns the offsets of a tensor's elements; None if they are not linear in the loop variables."""
    offset: T.Expr = _number(0)
    for index, size in zip(element.index, element.tensor.ty.shape, strict=True):
        offset = offset * int(size) + index
    analyzer = sym.Analyzer()
    for group in groups:
        for variable, extent in zip(group.variables, group.extents, strict=True):
            analyzer.bind(variable, ir.Range(0, extent))
    rest, digits_of_groups = offset, []
    for group in groups:
        digits: list[tuple[int, int]] = []
        for variable, extent in zip(group.variables, group.extents, strict=True):
            first, second = (substituted(offset, {variable: _number(n)}) for n in range(2))
            step = _constant(analyzer.simplify(second - first))
            if step is None:
                return None
            rest = rest - variable * step
            # Two digits are one where the second starts again a whole stride of the first further on.
            if digits and digits[-1][1] == step * extent:
                digits[-1] = (digits[-1][0] * extent, step)
            else:
                digits.append((extent, step))
        digits_of_groups.append(tuple(digits))
    start = _constant(analyzer.simplify(rest))
    return None if start is None else Strides(start, tuple(digits_of_groups))


@dataclass(frozen=True)
class Contraction:
    """A sum of products.

    Attributes:
        parameters: Parameters of the kernel.
        batch, rows, columns: Loop variables that both operands depend on, the left one alone, the right one alone.
        terms: Loop variables of the sum.
        left, right: Expressions for an element of the operands.
        total: Variable for the sum in the stored value.
        result: The element that is stored.
    """

    parameters: tuple[T.Var, ...]
    batch: Group
    rows: Group
    columns: Group
    terms: Group
    left: T.Expr
    right: T.Expr
    total: T.Var
    result: Element

    def transposed(self) -> Contraction:
        """Returns the contraction with left and right exchanged."""
        return replace(self, rows=self.columns, columns=self.rows, left=self.right, right=self.left)


def substituted(expression: _Node, values: Mapping[T.Var, T.Index]) -> _Node:
    """Returns an expression, or a list of them, with variables replaced."""
    replaced: _Node = tvm_ffi.structural_map(expression, (T.Var, lambda variable: values.get(variable, variable)))
    return replaced


def stored(operand: T.Expr) -> T.Expr:
    """Returns an operand before its conversion to the type of the sum."""
    return operand.value if isinstance(operand, T.Cast) else operand


def plain_load(operand: T.Expr) -> Element | None:
    """Returns the element that an operand loads; None if it computes more."""
    return Element(operand.source, tuple(operand.indices), operand) if isinstance(operand, T.TensorLoad) else None


def recognized(function: T.PrimFunc) -> Contraction | None:
    """Returns the sum of products that a kernel computes; None if it computes anything else or has symbolic extents.

    Args:
        function: A fused function: one reduction, with computations of its operands before and of its result after it.
    """
    try:
        module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        narrow = T.transform.ForceNarrowIndexToInt32()(module)
        blocks = _two_blocks(s_tir.Schedule(narrow))
    except (RuntimeError, ValueError):
        return None
    if blocks is None:
        return None
    reduction, last = blocks
    product = _product(reduction)
    if product is None:
        return None
    left, right = product
    variables = [v for v in reduction.iter_vars if isinstance(v.dom.extent, T.IntImm)]
    if len(variables) < len(reduction.iter_vars):
        return None
    total = T.Var("total", str(reduction.body.value.ty))
    result = _result(reduction, last, total)
    if result is None:
        return None
    of_left, of_right = _variables(left), _variables(right)

    def group(among: Iterable[T.IterVar]) -> Group:
        chosen = [v for v in among if int(v.dom.extent) > 1]
        return Group(tuple(v.var for v in chosen), tuple(int(v.dom.extent) for v in chosen))

    spatial = [v for v in variables if v.iter_type != _REDUCTION]
    units: Values = {v.var: _number(0) for v in variables if int(v.dom.extent) == 1}
    left, right = substituted(left, units), substituted(right, units)
    result = Element(result.tensor, tuple(substituted(list(result.index), units)), substituted(result.value, units))
    contraction = Contraction(
        parameters=tuple(narrow["main"].params),
        batch=group(v for v in spatial if v.var in of_left and v.var in of_right),
        rows=group(v for v in spatial if v.var not in of_right),
        columns=group(v for v in spatial if v.var in of_right and v.var not in of_left),
        terms=group(v for v in variables if v.iter_type == _REDUCTION),
        left=left,
        right=right,
        total=total,
        result=result,
    )
    # Neighbouring threads take neighbouring columns: they should store what lies together.
    stored = strides(result, (contraction.batch, contraction.rows, contraction.columns))
    return contraction.transposed() if stored is not None and stored.runs_along(1) else contraction


def _two_blocks(schedule: s_tir.Schedule) -> tuple[s_tir.SBlock, s_tir.SBlock | None] | None:
    """Inlines all blocks but the reduction and the block that stores the result (None: the reduction stores it)."""
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    kinds = [any(v.iter_type == _REDUCTION for v in schedule.get(block).iter_vars) for block in blocks]
    if kinds.count(True) != 1:
        return None
    reduction_number = kinds.index(True)
    for block in [*blocks[:reduction_number], *blocks[reduction_number + 1 : -1]]:
        schedule.compute_inline(block)
    reduction = schedule.get(blocks[reduction_number])
    last = None if reduction_number == len(blocks) - 1 else schedule.get(blocks[-1])
    return reduction, last


def _product(block: s_tir.SBlock) -> tuple[T.Expr, T.Expr] | None:
    """Returns the factors of the products that a block sums, beginning with zero."""
    store, init = block.body, block.init
    if not isinstance(store, T.BufferStore) or not isinstance(init, T.BufferStore):
        return None
    if not isinstance(init.value, T.FloatImm) or init.value.value != 0 or not isinstance(store.value, T.Add):
        return None
    for sum_so_far, term in ((store.value.a, store.value.b), (store.value.b, store.value.a)):
        if isinstance(sum_so_far, T.TensorLoad) and sum_so_far.source.same_as(store.buffer):
            return (term.a, term.b) if isinstance(term, T.Mul) else None
    return None


def _result(reduction: s_tir.SBlock, last: s_tir.SBlock | None, total: T.Var) -> Element | None:
    """Returns the value stored for a sum, in the variables of its loops; None if it is not recognized."""
    place = tuple(reduction.body.indices)
    if last is None:
        return Element(reduction.body.buffer, place, total)
    store = last.body
    if not isinstance(store, T.BufferStore):
        return None
    loads: list[T.TensorLoad] = []

    def visit(node: object) -> None:
        if isinstance(node, T.TensorLoad) and node.source.same_as(reduction.body.buffer):
            loads.append(node)

    tvm_ffi.structural_walk(store.value, visit)
    if not loads or any(not tvm_ffi.structural_equal(load.indices, loads[0].indices) for load in loads):
        return None
    value = tvm_ffi.structural_map(
        store.value,
        (T.TensorLoad, lambda load: total if load.source.same_as(reduction.body.buffer) else load),
    )
    # From the loops of the last block to those of the sum, and back.
    variables = [v.var for v in last.iter_vars]
    try:
        back = T.IndexMap(variables, list(loads[0].indices), None).inverse([v.dom for v in last.iter_vars])
    except (RuntimeError, ValueError):
        return None
    values: Values = dict(zip(variables, back.map_indices(list(place)), strict=True))
    return Element(store.buffer, tuple(substituted(list(store.indices), values)), substituted(value, values))


def _variables(expression: T.Expr) -> set[T.Var]:
    variables: list[T.Var] = []
    tvm_ffi.structural_walk(expression, lambda node: variables.append(node) if isinstance(node, T.Var) else None)
    return set(variables)


def _number(value: int) -> T.Expr:
    return T.const(value, "int32")


def _constant(value: T.Expr) -> int | None:
    return int(value) if isinstance(value, T.IntImm) else None
