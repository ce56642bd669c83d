"""Converts the operands of products in an imported module to half precision, before any target's pipeline.

These are half:

- the operands of matrix products, convolutions and attention, whose sums are float32 (attention's result is half: TVM's
  operator has no other result type, and only products read it);
- parameters that only these products read: they have half the size on the device;
- tables of at least `LARGE_TABLE` elements of which only rows are taken, such as word embeddings: they are a tenth of
  the text encoder, and a product that reads a row rounds it in any case;
- activations that are moved or selected (reshaped, transposed, sliced, gathered, `relu`) and then multiplied: they are
  rounded where they are computed. Rounding commutes with moving, so that this changes no value;
- results of products, with their bias, that are moved before any other operator reads them: they go through memory, and
  upstream under autocast also rounds them.

These stay float32:

- normalization, softmax, sums and every other elementwise function (exponentials, GELU, logarithms, rotations, sine
  embeddings), and the residual stream: their results are rounded where a product reads them, and not before;
- coordinates: box refinement, positions, `grid_sample` and `roi_align` are no products, and products of fewer than
  `SHORTEST_SUM` terms, which project points and boxes, are not converted. bfloat16 has steps of 1/256 between 0.5
  and 1, which is four pixels of a photograph's 1008;
- results of fewer than `NARROWEST_RESULT` columns (boxes, scores), which would save no memory;
- attention's bias, which holds infinities and, in the decoder, logarithms of distances;
- biases, scales and small tables such as positions: they are added, not multiplied;
- inputs and outputs of the function.

TVM's `ToMixedPrecision` is not used: it supports float16 alone, computes elementwise functions in float16 wherever
their operands are, keeps all parameters in float32, and lets attention sum in float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Flag, auto

import ml_dtypes
import numpy as np
import tvm
from tvm import ir, relax, tirx

from harness.core.errors import HarnessError
from harness.core.precision import ROUNDED_OPERANDS, Precision
from harness.core.program import Array

SHORTEST_SUM = 16
"""Terms of one step of a matrix unit, in both half types (PTX ISA, mma.m16n8k16): shorter sums would not be faster."""

NARROWEST_RESULT = 64
"""Columns from which on a result is stored in half precision."""

LARGE_TABLE = 1 << 20
"""Elements from which on a table is half; tables of positions are smaller."""

_OPERANDS = {
    "relax.matmul": 2,
    "relax.nn.conv2d": 2,
    "relax.nn.conv2d_transpose": 2,
    "relax.nn.attention": 3,
    "relax.nn.attention_bias": 3,
}
"""Name of a product → the number of its first arguments that are multiplied."""

_MOVES = frozenset(
    f"relax.{name}"
    for name in (
        "broadcast_to",
        "concat",
        "expand_dims",
        "flip",
        "permute_dims",
        "repeat",
        "reshape",
        "slice_scatter",
        "split",
        "squeeze",
        "stack",
        "strided_slice",
        "take",
        "tile",
    )
)
"""Operators whose results are elements of their floating-point arguments."""

_COPIES = _MOVES - {"relax.reshape", "relax.expand_dims", "relax.squeeze"}
"""Those that copy elements in memory; the others only change the shape."""

_SELECTS = frozenset(("relax.nn.relu", "relax.nn.max_pool2d", "relax.where"))
"""Operators whose results are elements of their arguments or zero, with arithmetic that fuses."""


_SCALINGS = frozenset(("relax.add", "relax.multiply", "relax.divide"))
"""Operators on the result of a product before it leaves its kernel: a bias, a factor."""


class _Need(Flag):
    """The uses of an activation."""

    NOTHING = 0
    HALF = auto()
    """A product multiplies it."""
    FLOAT = auto()
    """An operator reads it in float32."""
    OUTPUT = auto()
    """The function returns it."""


def lower_precision(module: tvm.IRModule, precision: Precision, float32: Collection[str] = ()) -> tvm.IRModule:
    """Converts the operands of products in an imported module, and parameters of `main`, to the precision's type.

    Args:
        module: Module of `torch_export.import_program`: `main` is one dataflow block, and its parameters after the
            first `num_input` are weights.
        precision: fp32 leaves the module unchanged.
        float32: Names of the variables that stay float32: products with their operands, or rows of tables.
    """
    if not precision.is_half:
        return module
    lowered = module.clone()
    lowered["main"] = _Lowering(module["main"], precision.dtype, frozenset(float32)).function()
    return lowered


def parameters_for(module: tvm.IRModule, parameters: Sequence[Array]) -> list[Array]:
    """Returns the parameters in the types of `main`, rounded to nearest even.

    Args:
        module: Module of `lower_precision`.
        parameters: Imported values of the parameters of `main` after its inputs, in order.

    Raises:
        HarnessError: A weight is beyond the range of the half type.
    """
    function = module["main"]
    weights = list(function.params)[int(function.attrs["num_input"]) :]
    return [_round(array, parameter) for array, parameter in zip(parameters, weights, strict=True)]


def _round(array: Array, parameter: relax.Var) -> Array:
    """Rounds the value of a parameter to the parameter's type."""
    name = str(parameter.ty.dtype)
    if name == array.dtype.name:
        return array
    with np.errstate(over="ignore"):
        rounded = array.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    if not np.array_equal(np.isfinite(rounded), np.isfinite(array)):
        raise HarnessError(f"the weight {parameter.name} has values beyond {name}: choose another --precision")
    return rounded


class _Lowering:
    """One function, whose activations' uses are collected from its end before it is rewritten."""

    def __init__(self, function: relax.Function, dtype: str, float32: Collection[str]) -> None:
        self._function = function
        self._dtype = dtype
        self._float32 = float32
        (block,) = function.body.blocks
        self._bindings: list[relax.VarBinding] = list(block.bindings)
        self._output: relax.Var = function.body.body
        self._inputs = int(function.attrs["num_input"])
        self._builder = relax.BlockBuilder()
        # A table is half if none of its rows stays float32.
        self._rows = {
            row: not any(other_row.name in float32 for other_row in rows)
            for rows in rows_of_tables(function)
            for row in rows
        }
        self._results = self._wide_results()
        self._half = self._half_variables()
        self._replacements: dict[relax.Var, relax.Expr] = {}
        self._casts: dict[relax.Var, relax.Expr] = {}

    def function(self) -> relax.Function:
        """Returns the function with half operands."""
        for position, parameter in enumerate(self._function.params):
            weight = position >= self._inputs
            ty = (
                relax.TensorType(parameter.ty.shape, self._dtype)
                if weight and parameter in self._half
                else parameter.ty
            )
            self._replacements[parameter] = relax.Var(parameter.name, ty)
        parameters = [self._replacements[parameter] for parameter in self._function.params]
        attributes = dict(self._function.attrs.items()) | {ROUNDED_OPERANDS: self._dtype}
        with self._builder.function("main", parameters, attrs=attributes):
            with self._builder.dataflow():
                for parameter in self._function.params:
                    if parameter in self._half:
                        self._replacements[parameter] = self._as_half(parameter)
                for binding in self._bindings:
                    self._replacements[binding.var] = self._rewrite(binding)
                result = self._builder.emit_output(self._as_float(self._output))
            self._builder.emit_func_output(result)
        return self._builder.get()["main"]

    def _wide_results(self) -> set[relax.Var]:
        """Returns the wide enough results of products, also moved, scaled, or with weights and constants added."""
        results: set[relax.Var] = set()
        weights = set(self._function.params[self._inputs :])
        for binding in self._bindings:
            name, operands = _operator(binding.value), list(_tensors(_arguments(binding.value)))
            if operands and all(_is_constant(operand) or operand in weights for operand in operands):
                weights.add(binding.var)
            elif self._rounds(binding):
                if (_extents(binding.var)[-1] or 0) >= NARROWEST_RESULT:
                    results.add(binding.var)
            elif name in _MOVES | _SELECTS | _SCALINGS:
                further_operands = [operand for operand in operands if operand not in results]
                fixed = all(_is_constant(operand) or operand in weights for operand in further_operands)
                if len(further_operands) < len(operands) and (fixed or name in _MOVES):
                    results.add(binding.var)
        return results

    def _half_variables(self) -> set[relax.Var]:
        """Returns the activations and parameters that are computed in half precision."""
        needs: dict[relax.Var, _Need] = {self._output: _Need.OUTPUT}
        half: set[relax.Var] = set()

        def require(operands: Iterable[relax.Expr], need: _Need) -> None:
            for operand in operands:
                if isinstance(operand, relax.Var):
                    needs[operand] = needs.get(operand, _Need.NOTHING) | need

        for binding in reversed(self._bindings):
            variable, value, name = binding.var, binding.value, _operator(binding.value)
            need = needs.get(variable, _Need.NOTHING)
            if variable in self._rows and _Need.OUTPUT not in need:
                need = _Need.HALF if self._rows[variable] else _Need.FLOAT
            elif name in _COPIES and variable in self._results and need and _Need.OUTPUT not in need:
                need = _Need.HALF
            if need == _Need.HALF and _is_floating(variable):
                half.add(variable)
            if self._rounds(binding):
                multiplied = _OPERANDS[name]
                require(value.args[:multiplied], _Need.HALF)
                require(value.args[multiplied:], _Need.FLOAT)
            elif name in _MOVES | _SELECTS or not name:
                require(_tensors(_arguments(value)), need)
            else:
                require(_tensors(_arguments(value)), _Need.FLOAT)
        return half | {parameter for parameter in self._function.params if needs.get(parameter) == _Need.HALF}

    def _rewrite(self, binding: relax.VarBinding) -> relax.Expr:
        """Emits the value of a binding on converted operands, and returns its new variable."""
        value, name = binding.value, _operator(binding.value)
        var_name = binding.var.name  # identifies the node of the exported program
        if isinstance(value, relax.TupleGetItem):
            return self._builder.emit(relax.TupleGetItem(self._replacements[value.tuple_value], value.index), var_name)
        if not isinstance(value, relax.Call):
            is_inner_tuple = isinstance(value, relax.Tuple) and binding.var != self._output
            convert = self._replacement if is_inner_tuple else self._as_float
            return self._builder.emit(_convert_tensors(value, convert), var_name)
        if self._rounds(binding):
            multiplied = _OPERANDS[name]
            operands = [self._as_half(operand) for operand in value.args[:multiplied]]
            further_operands = [_convert_tensors(operand, self._as_float) for operand in value.args[multiplied:]]
            result = _product(value, [*operands, *further_operands])
        else:
            exact = name in _MOVES | _SELECTS and binding.var in self._half
            convert = self._as_half if exact else self._as_float
            arguments = [_convert_tensors(argument, convert) for argument in value.args]
            result = relax.Call(value.op, arguments, value.attrs, value.ty_args)
        result = self._builder.normalize(result)
        # Readers round the elements of tuples.
        rounds = binding.var in self._half and isinstance(result.ty, relax.TensorType)
        if rounds and _is_floating(result, "float32"):
            result = relax.op.astype(self._builder.emit(result, "exact"), self._dtype)
        return self._builder.emit(result, var_name)

    def _rounds(self, binding: relax.VarBinding) -> bool:
        """Returns whether a binding is a product with half operands."""
        return is_product(binding.value) and binding.var.name not in self._float32

    def _replacement(self, operand: relax.Expr) -> relax.Expr:
        """Returns the new variable of an operand; a constant or a shape is its own."""
        return self._replacements.get(operand, operand)

    def _as_half(self, operand: relax.Expr) -> relax.Expr:
        """Returns the operand in the half type; an operand is rounded once for all its readers."""
        replacement = self._replacement(operand)
        if not _is_floating(replacement, "float32"):
            return replacement
        if operand not in self._casts:
            self._casts[operand] = self._builder.emit(relax.op.astype(replacement, self._dtype), "half")
        return self._casts[operand]

    def _as_float(self, operand: relax.Expr) -> relax.Expr:
        """Returns the operand in float32, widened for each call so that the call's kernel includes the widening."""
        replacement = self._replacement(operand)
        wide = relax.op.astype(replacement, "float32")
        return self._builder.emit(wide, "wide") if _is_floating(replacement, self._dtype) else replacement


def _product(call: relax.Call, arguments: list[relax.Expr]) -> relax.Expr:
    """Returns the product of half operands with float32 sums."""
    name, attributes = _operator(call), call.attrs
    if name == "relax.matmul":
        return relax.op.matmul(*arguments, out_dtype="float32")
    if not name.startswith("relax.nn.conv2d"):
        return relax.Call(call.op, arguments, attributes, call.ty_args)
    shared = {
        key: getattr(attributes, key)
        for key in ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout")
    }
    if name == "relax.nn.conv2d":
        return relax.op.nn.conv2d(*arguments, **shared, out_dtype="float32")
    shared["output_padding"] = attributes.output_padding
    return relax.op.nn.conv2d_transpose(*arguments, **shared, out_dtype="float32")


def is_product(value: relax.Expr) -> bool:
    """Returns whether a value is a float32 product whose sums have enough terms to gain from half operands."""
    operands = _multiplied(value, "float32")
    if not operands:
        return False
    name, shape = _operator(value), _extents(operands[1])
    if name == "relax.matmul":
        terms = shape[-2:-1]
    elif name == "relax.nn.conv2d":
        terms = shape[1:]
    else:
        terms = shape[-1:] if name.startswith("relax.nn.attention") else shape[:1]
    return len(terms) > 0 and math.prod(extent or 0 for extent in terms) >= SHORTEST_SUM


def rows_of_tables(function: relax.Function) -> list[list[relax.Var]]:
    """Returns the rows taken of each large table, which is a weight that only `take` reads."""
    parameters = list(function.params)[int(function.attrs["num_input"]) :]
    readers: dict[relax.Var, list[relax.VarBinding]] = {
        table: [] for table in parameters if math.prod(extent or 0 for extent in _extents(table)) >= LARGE_TABLE
    }
    for block in function.body.blocks:
        for binding in block.bindings:
            for operand in _tensors(_arguments(binding.value)):
                if operand in readers:
                    readers[operand].append(binding)
    tables = [
        table_reads
        for table_reads in readers.values()
        if all(_operator(read.value) == "relax.take" for read in table_reads)
    ]
    return [[binding.var for binding in table_reads] for table_reads in tables if table_reads]


def operations_of(value: relax.Expr, dtype: str) -> int:
    """Returns the operations of a product of operands of one type, two for each term; 0 for any other value.

    The result is also 0 for products with symbolic extents.

    Args:
        value: The value of a binding.
        dtype: Type of both operands.
    """
    extents = [_extents(operand) for operand in _multiplied(value, dtype)]
    if not extents or any(extent is None for shape in extents for extent in shape):
        return 0
    name = _operator(value)
    left, right = ([int(extent or 0) for extent in shape] for shape in extents[:2])
    if name.startswith("relax.nn.attention"):  # [batch, tokens, heads, features]
        batch, queries, heads, features = left
        return 2 * batch * heads * queries * right[1] * (features + int(extents[2][-1] or 0))
    if name == "relax.nn.conv2d_transpose":  # each element of the data meets a kernel [in, out, height, width]
        return 2 * math.prod(left) * math.prod(right[1:])
    terms = right[-2] if name == "relax.matmul" else math.prod(right[1:])
    return 2 * terms * math.prod(int(extent) for extent in value.ty.shape)


def _multiplied(value: relax.Expr, dtype: str) -> list[relax.Expr]:
    """Returns the operands that a product of operands of this type multiplies; none for any other value."""
    name = _operator(value)
    operands = list(value.args[: _OPERANDS[name]]) if name in _OPERANDS else []
    return operands if all(_is_floating(operand, dtype) for operand in operands) else []


def _extents(value: relax.Expr) -> list[int | None]:
    """Returns the extents of a tensor, None for symbolic extents."""
    return [int(extent) if isinstance(extent, tirx.IntImm) else None for extent in value.ty.shape]


def _operator(value: relax.Expr) -> str:
    """Returns the name of the called Relax operator; empty for tuples and their elements."""
    if not isinstance(value, relax.Call):
        return ""
    return str(value.op.name) if isinstance(value.op, ir.Op) else "call"


def _arguments(value: relax.Expr) -> list[relax.Expr]:
    """Returns the operands of a call, the tuple of one of its elements, or any other value itself."""
    if isinstance(value, relax.Call):
        return list(value.args)
    if isinstance(value, relax.TupleGetItem):
        return [value.tuple_value]
    return [value]


def _tensors(arguments: Iterable[relax.Expr]) -> Iterator[relax.Expr]:
    """Yields the variables and constants among the arguments, including those in tuples."""
    for argument in arguments:
        if isinstance(argument, relax.Tuple):
            yield from _tensors(argument.fields)
        elif isinstance(argument, relax.Var | ir.Constant):
            yield argument


def _convert_tensors(argument: relax.Expr, convert: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
    """Returns the argument with each tensor in it converted."""
    if isinstance(argument, relax.Tuple):
        return relax.Tuple([_convert_tensors(field, convert) for field in argument.fields])
    return convert(argument) if isinstance(argument, relax.Var | ir.Constant) else argument


def _is_constant(operand: relax.Expr) -> bool:
    return isinstance(operand, ir.Constant)


def _is_floating(operand: relax.Expr, dtype: str = "float32") -> bool:
    """Returns whether the operand is a tensor of this type, or a tuple of such tensors."""
    ty = operand.ty
    tensors = list(ty.fields) if isinstance(ty, relax.TupleType) else [ty]
    return all(isinstance(tensor, relax.TensorType) and str(tensor.dtype) == dtype for tensor in tensors)
