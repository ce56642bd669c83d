"""Folds operations into the reads of a kernel: permutations, slices, windows and rotations that nothing computes first.

A kernel that copies an operand into its workspace anyway can compute each element on the way: from the operand's
definition on Relax, followed through operations that only move elements (permutation, reshape, slice, selection,
concatenation) and through a little arithmetic (as in rotary position encoding). What remains is a function from the
index of an element to its value in terms of tensors that are in memory.

Extents may be symbolic where the scope says so (`Scope.symbolic`); a reshape then counts elements within the static
dimensions before the first symbolic one, and within that one and the static dimensions after it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tvm import ir, relax, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import argument, extents, is_call, permutation, same, static_shape
from harness.compiler.schedules.common.kernel import Argument
from harness.compiler.schedules.common.scope import Scope

BINARY: dict[str, Callable[[T.Expr, T.Expr], T.Expr]] = {
    "relax.add": lambda a, b: a + b,
    "relax.subtract": lambda a, b: a - b,
    "relax.multiply": lambda a, b: a * b,
    "relax.divide": lambda a, b: a / b,
}
"""Arithmetic on two elements that every kernel may do while it reads or writes, by Relax operator."""

_FLOATS = ("float32", "float16", "bfloat16")
"""Element types of folded tensors; arithmetic is folded in fp32 alone."""

_RESHAPES = ("relax.reshape", "relax.expand_dims", "relax.squeeze")

_MOST_OPERATIONS = 16
"""Largest number of arithmetic operations per element that cost less in the read than in a pass over memory."""

ROTATES_PAIRS = "rotate_pairs"
"""Attribute of a function that rotates tensors [..., n·L, D] by cosines and sines [L, D/2].

It takes the tensors, the cosines and the sines, and returns the tensors with their pairs of neighbours rotated.
"""

Shape = tuple[Any, ...]
"""Extents of a tensor: integers, and expressions of symbolic ones."""
Index = Sequence[T.Index]
Element = Callable[["Reader", Index], T.Expr]
"""Takes a reader and the index of an element, and returns the element's value."""


class Readable(Protocol):
    """A buffer, or its stand-in, whose elements are read."""

    def __getitem__(self, index: tuple[T.Index, ...], /) -> T.Expr: ...


@dataclass(frozen=True)
class Recorder:
    """Stands in for a buffer: notes the index of every element that is read, which is zero.

    Attributes:
        note: Takes the index.
        dtype: Type of the elements.
    """

    note: Callable[[tuple[T.Index, ...]], None]
    dtype: str = "float32"

    def __getitem__(self, index: tuple[T.Index, ...]) -> T.Expr:
        self.note(index)
        return T.const(0.0, self.dtype)


@dataclass(frozen=True)
class Reader:
    """The buffers and the analyzer for the computation of an element.

    Attributes:
        buffers: The buffer of each tensor in memory.
        analyzer: Knows the ranges of the loop variables.
    """

    buffers: Mapping[relax.Expr, Readable]
    analyzer: sym.Analyzer


@dataclass(frozen=True)
class Folded:
    """A tensor as a function of its index.

    Attributes:
        inputs: The tensors in memory that are read.
        shape: Shape of the tensor.
        element: Computes an element.
        operations: Arithmetic operations per element.
        period: Number of kinds of neighbours along the last dimension (real and imaginary parts: 2); a loop unrolled by
            it needs no conditions.
    """

    inputs: tuple[relax.Expr, ...]
    shape: Shape
    element: Element
    operations: int = 0
    period: int = 1

    @property
    def arguments(self) -> list[Argument]:
        """Returns the kernel's parameters for the inputs."""
        return [argument(f"input{n}", value) for n, value in enumerate(self.inputs)]

    def reader(self, buffers: Sequence[Readable], analyzer: sym.Analyzer) -> Reader:
        """Returns the reader of elements from a buffer for each of the inputs."""
        return Reader(dict(zip(self.inputs, buffers, strict=True)), analyzer)

    def placeholders(self, analyzer: sym.Analyzer) -> Reader:
        """Returns the reader for elements that are examined, and not emitted."""
        return self.reader([T.buffer(argument.shape, argument.dtype) for argument in self.arguments], analyzer)


def fold(scope: Scope, value: relax.Expr) -> Folded:
    """Follows a tensor, fp32 or half, back as far as that pays; elements keep its type.

    Raises:
        ValueError: It is of another type, or has symbolic extents where the scope allows none.
    """
    shape = _shape(scope, value)
    if shape is None:
        raise ValueError("only floating-point tensors of static shape can be folded")
    if value in scope.known:
        return scope.known[value]  # type: ignore[no-any-return]
    definition = scope.definition(value)
    folded = None
    if value not in scope.results and not scope.is_parameter(value):
        if isinstance(definition, relax.TupleGetItem):
            folded = _rotated(scope, scope.definition(definition.tuple_value), int(definition.index), shape)
        elif isinstance(definition, ir.Call):
            rule = _RULES.get(getattr(definition.op, "name", ""))
            folded = rule(scope, definition, shape) if rule is not None else None
    if folded is None or folded.operations > _MOST_OPERATIONS:
        return stored(value)
    return folded


def can_fold(value: relax.Expr) -> bool:
    """Returns whether `fold` takes a value: a tensor of static shape, fp32 or half."""
    return static_shape(value, None) is not None and str(value.ty.dtype) in _FLOATS


def _shape(scope: Scope, value: relax.Expr) -> Shape | None:
    """Returns the shape of a tensor of one of `_FLOATS`; None where it has symbolic extents that the scope excludes."""
    shape = extents(value) if scope.symbolic else static_shape(value, None)
    return shape if shape is not None and str(value.ty.dtype) in _FLOATS else None


def stored(value: relax.Expr) -> Folded:
    """Returns a tensor that is read from memory as it is."""
    return Folded((value,), extents(value) or (), lambda reader, position: reader.buffers[value][tuple(position)])


def moved(scope: Scope, value: relax.Expr) -> Folded:
    """Follows a tensor like `fold`, but only through operations that move elements."""
    folded = fold(scope, value)
    if folded.operations == 0 and len(folded.inputs) == 1:
        return folded
    return stored(value)


def row_starts(folded: Folded, rows: int, depth: int) -> Callable[[T.Index], T.Expr] | None:
    """Returns a function from a row of a matrix [rows, depth] to its start in the input; None if rows are split."""
    if len(folded.inputs) != 1 or folded.operations:
        return None
    source = static_shape(folded.inputs[0]) or ()

    def place(analyzer: sym.Analyzer, row: T.Index, k: T.Index) -> T.Expr:
        position = index_before(folded, analyzer, unravel(analyzer, row * depth + k, folded.shape))
        number: T.Expr = analyzer.simplify(T.convert(ravel(position, source)))
        return number

    analyzer = sym.Analyzer()
    row, k = T.Var("row", "int32"), T.Var("k", "int32")
    analyzer.bind(row, ir.Range(0, rows))
    analyzer.bind(k, ir.Range(0, depth))
    if not analyzer.can_prove_equal(place(analyzer, row, k), place(analyzer, row, 0) + k):
        return None
    return lambda i: place(sym.Analyzer(), i, 0)


def index_before(folded: Folded, analyzer: sym.Analyzer, position: Index) -> list[T.Index]:
    """Returns the index in its only input of an element of a tensor that is nothing but moved."""
    element = folded.element(folded.placeholders(analyzer), position)
    assert isinstance(element, T.TensorLoad)
    return list(element.indices)


def unravel(analyzer: sym.Analyzer, flat: T.Index, shape: Sequence[T.Index]) -> list[T.Index]:
    """Returns the index of element number `flat` of a tensor of that shape, whose first extent may be symbolic."""
    result: list[T.Index] = []
    inner = math.prod(shape[1:])
    for n, extent in enumerate(shape):
        inner //= extent if n else 1
        position = flat // inner if inner > 1 else flat
        result.append(analyzer.simplify(position % extent) if n else analyzer.simplify(T.convert(position)))
    return result


def ravel(index: Index, shape: Sequence[T.Index]) -> T.Index:
    """Returns the number of an element, counted row by row; the first extent of the shape may be symbolic."""
    flat: T.Index = 0
    for n, (position, extent) in enumerate(zip(index, shape, strict=True)):
        flat = flat * extent + position if n or isinstance(extent, int) else position
    return flat


def _through(source: Folded, shape: Shape, index: Callable[[Reader, Index], Index], period: int) -> Folded:
    def element(reader: Reader, position: Index) -> T.Expr:
        return source.element(reader, index(reader, position))

    return Folded(source.inputs, shape, element, source.operations, period)


def _permute_dims(scope: Scope, value: ir.Call, shape: Shape) -> Folded | None:
    source = fold(scope, value.args[0])
    axes = permutation(value)

    def index(_: Reader, position: Index) -> Index:
        return [position[axes.index(d)] for d in range(len(axes))]

    return _through(source, shape, index, source.period if axes[-1] == len(axes) - 1 else 1)


def _reshape(scope: Scope, value: ir.Call, shape: Shape) -> Folded | None:
    operand = value.args[0]
    # One reshape instead of several: the shapes between cut indices in ways that the analyzer cannot mend.
    while operand not in scope.results and not scope.is_parameter(operand):
        definition = scope.definition(operand)
        if not is_call(definition, *_RESHAPES):
            break
        operand = definition.args[0]
    parts = None if _shape(scope, operand) is None else _matching_parts(extents(operand) or (), shape)
    if parts is None:
        return None
    source = fold(scope, operand)
    period = source.period if shape and isinstance(shape[-1], int) and shape[-1] % source.period == 0 else 1

    def index(reader: Reader, position: Index) -> Index:
        result: list[T.Index] = []
        for source_part, result_part in parts:
            flat = ravel(position[: len(result_part)], result_part)
            result += unravel(reader.analyzer, reader.analyzer.simplify(T.convert(flat)), source_part)
            position = position[len(result_part) :]
        return result

    return _through(source, shape, index, period)


def _matching_parts(source: Shape, result: Shape) -> list[tuple[Shape, Shape]] | None:
    """Cuts two shapes of one tensor into parts whose elements are numbered alike; None if there are no such parts.

    Static shapes are one part. Others are cut before their only symbolic extent: the number of an element within a part
    does not depend on the part's first extent.
    """
    source_cut, result_cut = (sum(1 for _ in itertools.takewhile(_is_static, shape)) for shape in (source, result))
    source_parts, result_parts = (source[:source_cut], source[source_cut:]), (result[:result_cut], result[result_cut:])
    if bool(source_parts[1]) != bool(result_parts[1]) or math.prod(source_parts[0]) != math.prod(result_parts[0]):
        return None
    if not all(map(_is_static, (*source_parts[1][1:], *result_parts[1][1:]))):
        return None
    return [(tuple(part), tuple(counterpart)) for part, counterpart in zip(source_parts, result_parts, strict=True)]


def _is_static(extent: T.Index) -> bool:
    return isinstance(extent, int)


def _strided_slice(scope: Scope, value: ir.Call, shape: Shape) -> Folded | None:
    operands = [_numbers(scope, argument) for argument in value.args[1:]]
    source_shape = _shape(scope, value.args[0])
    if source_shape is None or any(operand is None for operand in operands):
        return None
    axes, begin, _end, *rest = (list(operand or ()) for operand in operands)
    strides = rest[0] if rest else [1] * len(axes)
    if not all(isinstance(stride, int) and stride >= 1 for stride in strides):
        return None
    first, step = [0] * len(source_shape), [1] * len(source_shape)
    for axis, start, stride in zip(axes, begin, strides, strict=True):
        extent = source_shape[axis]
        if isinstance(start, int) and isinstance(extent, int):
            first[axis] = min(max(start + extent if start < 0 else start, 0), extent)
        elif value.attrs.assume_inbound or (isinstance(start, int) and start == 0):
            first[axis] = start
        else:
            return None
        step[axis] = stride
    source = fold(scope, value.args[0])
    return _through(
        source, shape, lambda _, position: [f + s * i for f, s, i in zip(first, step, position, strict=True)], 1
    )


def _take(scope: Scope, value: ir.Call, shape: Shape) -> Folded | None:
    source_shape = _shape(scope, value.args[0])
    indices = _numbers(scope, value.args[1])
    if source_shape is None or indices is None or static_shape(value.args[1], None) != () or value.attrs.axis is None:
        return None
    axis, (index,) = int(value.attrs.axis) % len(source_shape), indices
    if not isinstance(source_shape[axis], int) or not isinstance(index, int) or not 0 <= index < source_shape[axis]:
        return None
    source = fold(scope, value.args[0])
    return _through(source, shape, lambda _, position: [*position[:axis], index, *position[axis:]], 1)


def _broadcast_to(scope: Scope, value: ir.Call, shape: Shape) -> Folded | None:
    """Folds a broadcast that keeps the shape, as PyTorch's `expand` often does."""
    source_shape = _shape(scope, value.args[0])
    return fold(scope, value.args[0]) if source_shape is not None and same(source_shape, shape) else None


def _slice_scatter(scope: Scope, value: ir.Call, shape: Shape) -> Folded | None:
    """Folds the replacement of a run of indices along one axis."""
    axis = int(value.attrs.axis) % len(shape)
    run = static_shape(value.args[1], None)
    if run is None or not can_fold(value.args[0]) or not all(isinstance(n, T.IntImm) for n in value.args[2:]):
        return None
    start, _, step = (int(number) for number in value.args[2:])
    if step != 1 or not 0 <= start <= shape[axis] - run[axis]:
        return None
    outer_part, inner_part = parts = [fold(scope, argument) for argument in value.args[:2]]

    def element(reader: Reader, position: Index) -> T.Expr:
        inner_position = [*position[:axis], position[axis] - start, *position[axis + 1 :]]
        outer, inside = outer_part.element(reader, position), inner_part.element(reader, inner_position)
        return T.if_then_else(T.all(position[axis] >= start, position[axis] < start + run[axis]), inside, outer)

    period = math.lcm(*(part.period for part in parts)) if axis < len(shape) - 1 else 1
    # Choosing between the two counts as an operation.
    return Folded(_inputs_of(parts), shape, element, 1 + max(part.operations for part in parts), period)


def _concat(scope: Scope, value: ir.Call, shape: Shape) -> Folded | None:
    parts = _fields(scope, value)
    if parts is None or value.attrs.axis is None:
        return None
    return _concatenate(parts, shape, int(value.attrs.axis) % len(shape))


def _stack(scope: Scope, value: ir.Call, shape: Shape) -> Folded | None:
    parts = _fields(scope, value)
    if parts is None:
        return None
    axis = int(value.attrs.axis or 0) % len(shape)
    part_shape = (*shape[:axis], 1, *shape[axis + 1 :])
    expanded = [
        _through(part, part_shape, lambda _, position: [*position[:axis], *position[axis + 1 :]], part.period)
        for part in parts
    ]
    return _concatenate(expanded, shape, axis)


def _fields(scope: Scope, value: ir.Call) -> list[Folded] | None:
    """Folds the tensors of a tuple of at most four."""
    fields = scope.definition(value.args[0])
    if not isinstance(fields, relax.Tuple) or len(fields.fields) > 4:
        return None
    if any(_shape(scope, field) is None for field in fields.fields):
        return None
    return [fold(scope, field) for field in fields.fields]


def _concatenate(parts: Sequence[Folded], shape: Shape, axis: int) -> Folded:
    """Concatenates folded tensors along an axis."""
    starts = [sum(part.shape[axis] for part in parts[:n]) for n in range(len(parts))]

    def element(reader: Reader, position: Index) -> T.Expr:
        def read_part(n: int) -> T.Expr:
            # Where it is read, the index is known to be one of the part's own.
            with reader.analyzer.constraint_scope(T.convert(position[axis]) >= starts[n]):
                return parts[n].element(reader, [*position[:axis], position[axis] - starts[n], *position[axis + 1 :]])

        for n in range(len(parts) - 1):
            if not reader.analyzer.can_prove(T.convert(position[axis]) >= starts[n + 1]):
                if reader.analyzer.can_prove(T.convert(position[axis]) < starts[n + 1]):
                    return read_part(n)
                break
        else:
            return read_part(len(parts) - 1)
        result = read_part(len(parts) - 1)
        for n in range(len(parts) - 2, -1, -1):
            result = T.if_then_else(position[axis] < starts[n + 1], read_part(n), result)
        return result

    if axis < len(shape) - 1:
        period = math.lcm(*(part.period for part in parts))
    else:
        period = len(parts) if shape[axis] == len(parts) else 1
    # Choosing between the parts counts as an operation.
    return Folded(_inputs_of(parts), shape, element, 1 + max(part.operations for part in parts), period)


def _astype(scope: Scope, value: ir.Call, shape: Shape) -> Folded | None:
    if _shape(scope, value.args[0]) is None:
        return None
    source, dtype = fold(scope, value.args[0]), str(value.ty.dtype)

    def element(reader: Reader, position: Index) -> T.Expr:
        return T.Cast(dtype, source.element(reader, position))

    return Folded(source.inputs, shape, element, 1 + source.operations, source.period)


def _binary(scope: Scope, value: ir.Call, shape: Shape) -> Folded | None:
    if any(_shape(scope, argument) is None or str(argument.ty.dtype) != "float32" for argument in value.args):
        return None
    parts = [fold(scope, argument) for argument in value.args]
    operation = BINARY[value.op.name]

    def element(reader: Reader, position: Index) -> T.Expr:
        return operation(*(broadcast(part, reader, position) for part in parts))

    period = max(part.period for part in parts)
    return Folded(_inputs_of(parts), shape, element, 1 + sum(part.operations for part in parts), period)


def broadcast(part: Folded, reader: Reader, position: Index) -> T.Expr:
    """Returns the element of a tensor for an index of the larger shape that it is broadcast to."""
    part_position = position[len(position) - len(part.shape) :]
    index = [
        0 if isinstance(extent, int) and extent == 1 else i for extent, i in zip(part.shape, part_position, strict=True)
    ]
    return part.element(reader, index)


def _rotated(scope: Scope, value: relax.Expr, result: int, shape: Shape) -> Folded | None:
    """Folds result number `result` of a call of a function that rotates pairs."""
    if not is_call(value, "relax.call_tir"):
        return None
    attributes = getattr(scope.functions.get(value.args[0]), "attrs", None) or {}
    if ROTATES_PAIRS not in attributes:
        return None
    *tokens, cos, sin = value.args[1].fields
    if any(static_shape(operand) is None for operand in (tokens[result], cos, sin)):
        return None
    token_part, *angles = parts = [fold(scope, operand) for operand in (tokens[result], cos, sin)]
    positions = angles[0].shape[0]

    def element(reader: Reader, position: Index) -> T.Expr:
        *outer, token, feature = position
        simplify = reader.analyzer.simplify
        pair, member = (simplify(T.convert(number)) for number in (feature // 2, feature % 2))
        place = [simplify(T.convert(token % positions)), pair]
        re, im = (token_part.element(reader, [*outer, token, pair * 2 + n]) for n in range(2))
        c, s = (angle.element(reader, place) for angle in angles)
        if isinstance(member, T.IntImm):
            return re * s + im * c if int(member) else re * c - im * s
        return T.if_then_else(T.EQ(member, 0), re * c - im * s, re * s + im * c)

    # Each element reads both of its pair; choosing which of the two it is counts as an operation.
    operations = 4 + 2 * token_part.operations + sum(angle.operations for angle in angles)
    return Folded(_inputs_of(parts), shape, element, operations, 2)


def _inputs_of(parts: Sequence[Folded]) -> tuple[relax.Expr, ...]:
    """Returns the distinct inputs of some tensors."""
    return tuple(dict.fromkeys(value for part in parts for value in part.inputs))


def _numbers(scope: Scope, value: relax.Expr) -> list[Any] | None:
    """Returns the values of a constant of integers, or of a tuple or shape, of which some may be symbolic."""
    definition = scope.definition(value)
    if isinstance(definition, relax.Tuple | relax.ShapeExpr):
        fields = definition.fields if isinstance(definition, relax.Tuple) else definition.values
        return [int(field) if isinstance(field, T.IntImm) else field for field in fields]
    if isinstance(definition, ir.GenericConst):
        return [int(number) for number in definition.value.numpy().reshape(-1)]
    return None


_RULES: dict[str, Callable[[Scope, ir.Call, Shape], Folded | None]] = {
    "relax.permute_dims": _permute_dims,
    **dict.fromkeys(_RESHAPES, _reshape),
    "relax.strided_slice": _strided_slice,
    "relax.take": _take,
    "relax.broadcast_to": _broadcast_to,
    "relax.slice_scatter": _slice_scatter,
    "relax.concat": _concat,
    "relax.stack": _stack,
    "relax.astype": _astype,
    "relax.call_tir": lambda scope, value, shape: _rotated(scope, value, 0, shape),
    **dict.fromkeys(BINARY, _binary),
}
"""Rules that fold the result of an operator, by Relax operator."""

FOLDED = frozenset(_RULES)
"""Names of the Relax operators whose results can be folded."""
