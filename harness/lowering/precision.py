"""From an imported module to one with half-precision operands: a pass over Relax, before any target's pipeline.

These are half:

- the operands of matrix products, convolutions and attention, whose sums are float32 (attention's result is half: TVM's
  operator has no other, and only products read it);
- parameters that are read by those alone: they have half the size on the device;
- tables of at least `LARGE_TABLE` numbers of which only rows are taken, as the embeddings of words: they are a tenth of
  the text encoder, and a row is rounded where a product reads it anyway;
- what is on its way there: an activation that is moved or selected (reshaped, transposed, sliced, gathered, `relu`) and
  then multiplied is rounded where it is computed. Rounding commutes with moving, so that changes no value;
- results of products, with their bias, that are moved before anything else reads them: they go through memory, and
  upstream under autocast rounds them as well.

These stay float32:

- normalization, softmax, sums and every other elementwise function (exponentials, GELU, logarithms, rotations, sine
  embeddings), and the residual stream: their results are rounded where a product reads them, and not before;
- coordinates: box refinement, positions, `grid_sample` and `roi_align` are no products, and products of fewer than
  `SHORTEST_SUM` terms, which is how points and boxes are projected, are left alone. bfloat16 tells 256 positions apart
  between 0.5 and 1, four pixels of a photograph's 1008;
- results of fewer than `NARROWEST_RESULT` columns (boxes, scores): there is no memory to be saved;
- attention's bias, which holds infinities and, in the decoder, logarithms of distances;
- biases, scales and small tables, as those of positions: they are added, not multiplied;
- inputs and outputs of the function.

TVM's `ToMixedPrecision` is not used: it knows float16 alone, computes elementwise functions in it wherever its operands
are, keeps all parameters in float32, and has attention sum in float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Flag, auto
from typing import TYPE_CHECKING, Any

from harness.core.errors import HarnessError
from harness.core.precision import ROUNDED_OPERANDS, Precision

if TYPE_CHECKING:
    import numpy.typing as npt
    import tvm
    from tvm import relax

    Array = npt.NDArray[Any]

SHORTEST_SUM = 16
"""Terms of one step of a matrix unit, in both half types (PTX ISA, mma.m16n8k16): shorter sums would not be faster."""

NARROWEST_RESULT = 64
"""Columns of a result from which on it is worth being kept in half precision."""

LARGE_TABLE = 1 << 20
"""Numbers of a table from which on half of its size is worth it; tables of positions are smaller."""

_OPERANDS = {
    "relax.matmul": 2,
    "relax.nn.conv2d": 2,
    "relax.nn.conv2d_transpose": 2,
    "relax.nn.attention": 3,
    "relax.nn.attention_bias": 3,
}
"""Products, with how many of their first arguments are multiplied."""

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

_SELECTS = frozenset(("relax.nn.relu", "relax.nn.max_pool2d", "relax.where"))
"""Operators whose results are elements of their arguments or zero, with arithmetic that fuses."""


_SCALINGS = frozenset(("relax.add", "relax.multiply", "relax.divide"))
"""Operators on the result of a product before it leaves its kernel: a bias, a factor."""


class _Need(Flag):
    """How an activation is used."""

    NOTHING = 0
    HALF = auto()
    """It is multiplied."""
    FLOAT = auto()
    """It is computed with in float32."""
    OUTPUT = auto()
    """It is returned."""


def lower_precision(module: tvm.IRModule, precision: Precision, float32: Collection[str] = ()) -> tvm.IRModule:
    """Converts the operands of products in an imported module to the precision's type, parameters of `main` too.

    Args:
        module: From `torch_export.import_program`: `main` is one dataflow block, and its parameters after the first
            `num_input` are weights.
        precision: fp32 leaves the module as it is.
        float32: Names of the variables whose values are products that stay float32, operands and result, or rows of
            tables that do.
    """
    if not precision.is_half:
        return module
    lowered = module.clone()
    lowered["main"] = _Lowering(module["main"], precision.dtype, frozenset(float32)).function()
    return lowered


def parameters_for(module: tvm.IRModule, parameters: Sequence[Array]) -> list[Array]:
    """Returns the parameters in the types that `main` takes them in, rounded to nearest even.

    Args:
        module: From `lower_precision`.
        parameters: Values of everything that `main` takes after its inputs, in order, as imported.

    Raises:
        HarnessError: A weight is beyond the range of the half type.
    """
    function = module["main"]
    taken = list(function.params)[int(function.attrs["num_input"]) :]
    return [_rounded(array, parameter) for array, parameter in zip(parameters, taken, strict=True)]


def _rounded(array: Array, parameter: relax.Var) -> Array:
    import ml_dtypes
    import numpy as np

    name = str(parameter.ty.dtype)
    if name == array.dtype.name:
        return array
    with np.errstate(over="ignore"):
        rounded = array.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    if not np.array_equal(np.isfinite(rounded), np.isfinite(array)):
        raise HarnessError(f"the weight {parameter.name} has values beyond {name}: choose another --precision")
    return rounded


class _Lowering:
    """One function, first looked through from its end for what each activation is used for, then written anew."""

    def __init__(self, function: relax.Function, dtype: str, float32: Collection[str]) -> None:
        from tvm import relax

        self._function = function
        self._dtype = dtype
        self._float32 = float32
        (block,) = function.body.blocks
        self._bindings: list[relax.VarBinding] = list(block.bindings)
        self._output: relax.Var = function.body.body
        self._inputs = int(function.attrs["num_input"])
        self._builder = relax.BlockBuilder()
        # Of each row of a table, whether the table is half: all its readers have to be.
        self._rows = {
            row: not any(each.name in float32 for each in rows) for rows in rows_of_tables(function) for row in rows
        }
        self._results = self._wide_results()
        self._half = self._kept_in_half()
        self._new: dict[relax.Var, relax.Expr] = {}
        self._casts: dict[relax.Var, relax.Expr] = {}

    def function(self) -> relax.Function:
        """Writes the function anew, with half operands."""
        from tvm import relax

        for position, parameter in enumerate(self._function.params):
            weight = position >= self._inputs
            ty = (
                relax.TensorType(parameter.ty.shape, self._dtype)
                if weight and parameter in self._half
                else parameter.ty
            )
            self._new[parameter] = relax.Var(parameter.name, ty)
        parameters = [self._new[parameter] for parameter in self._function.params]
        attributes = dict(self._function.attrs.items()) | {ROUNDED_OPERANDS: self._dtype}
        with self._builder.function("main", parameters, attrs=attributes):
            with self._builder.dataflow():
                for parameter in self._function.params:
                    if parameter in self._half:
                        self._new[parameter] = self._as_half(parameter)
                for binding in self._bindings:
                    self._new[binding.var] = self._rewritten(binding)
                result = self._builder.emit_output(self._as_float(self._output))
            self._builder.emit_func_output(result)
        return self._builder.get()["main"]

    def _wide_results(self) -> set[relax.Var]:
        """Returns the wide enough results of products, also moved, scaled, or with weights and constants added."""
        results: set[relax.Var] = set()
        weights = set(self._function.params[self._inputs :])
        for binding in self._bindings:
            name, read = _operator(binding.value), list(_tensors(_arguments(binding.value)))
            if read and all(_is_constant(operand) or operand in weights for operand in read):
                weights.add(binding.var)
            elif self._rounds(binding):
                if (_extents(binding.var)[-1] or 0) >= NARROWEST_RESULT:
                    results.add(binding.var)
            elif name in _MOVES | _SELECTS | _SCALINGS:
                others = [operand for operand in read if operand not in results]
                fixed = all(_is_constant(operand) or operand in weights for operand in others)
                if len(others) < len(read) and (fixed or name in _MOVES):
                    results.add(binding.var)
        return results

    def _kept_in_half(self) -> set[relax.Var]:
        """Returns the activations and parameters that are half where they are computed."""
        from tvm import relax

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
            elif _copies(name) and variable in self._results and need and _Need.OUTPUT not in need:
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

    def _rewritten(self, binding: relax.VarBinding) -> relax.Expr:
        from tvm import relax

        value, name = binding.value, _operator(binding.value)
        own = binding.var.name  # nodes of the exported program are known by it
        if isinstance(value, relax.Tuple):
            if binding.var == self._output:
                return self._builder.emit(_mapped(value, self._as_float), own)
            return self._builder.emit(_mapped(value, self._as_it_is), own)
        if isinstance(value, relax.TupleGetItem):
            return self._builder.emit(relax.TupleGetItem(self._new[value.tuple_value], value.index), own)
        if not isinstance(value, relax.Call):
            return self._builder.emit(_mapped(value, self._as_float), own)
        if self._rounds(binding):
            multiplied = _OPERANDS[name]
            operands = [self._as_half(operand) for operand in value.args[:multiplied]]
            others = [_mapped(operand, self._as_float) for operand in value.args[multiplied:]]
            result = _product(value, [*operands, *others])
        else:
            exact = name in _MOVES | _SELECTS and binding.var in self._half
            convert = self._as_half if exact else self._as_float
            arguments = [_mapped(argument, convert) for argument in value.args]
            result = relax.Call(value.op, arguments, value.attrs, value.ty_args)
        result = self._builder.normalize(result)
        rounds = binding.var in self._half and isinstance(result.ty, relax.TensorType)  # of several, those who read it
        if rounds and _is_floating(result, "float32"):
            result = relax.op.astype(self._builder.emit(result, "exact"), self._dtype)
        return self._builder.emit(result, own)

    def _rounds(self, binding: relax.VarBinding) -> bool:
        """Returns whether this is a product whose operands are half."""
        return is_product(binding.value) and binding.var.name not in self._float32

    def _as_it_is(self, operand: relax.Expr) -> relax.Expr:
        return self._new.get(operand, operand)

    def _as_half(self, operand: relax.Expr) -> relax.Expr:
        """Returns the operand in the half type; one that has to be rounded is rounded once for all that read it."""
        from tvm import relax

        new = self._new.get(operand, operand)
        if not _is_floating(new, "float32"):
            return new
        if operand not in self._casts:
            self._casts[operand] = self._builder.emit(relax.op.astype(new, self._dtype), "half")
        return self._casts[operand]

    def _as_float(self, operand: relax.Expr) -> relax.Expr:
        """Widens the operand to float32 for each call that reads it, so that widening is part of that kernel."""
        from tvm import relax

        new = self._new.get(operand, operand)
        wide = relax.op.astype(new, "float32")
        return self._builder.emit(wide, "wide") if _is_floating(new, self._dtype) else new


def _product(call: relax.Call, arguments: list[relax.Expr]) -> relax.Expr:
    """Returns the product of half operands with float32 sums."""
    from tvm import relax

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
    """Returns whether half operands are worth it: sums of float32 products with enough terms."""
    name = _operator(value)
    if name not in _OPERANDS or not all(_is_floating(operand, "float32") for operand in value.args[: _OPERANDS[name]]):
        return False
    shape = _extents(value.args[1])
    if name == "relax.matmul":
        terms = shape[-2:-1]
    elif name == "relax.nn.conv2d":
        terms = shape[1:]
    else:
        terms = shape[-1:] if name.startswith("relax.nn.attention") else shape[:1]
    return len(terms) > 0 and math.prod(extent or 0 for extent in terms) >= SHORTEST_SUM


def rows_of_tables(function: relax.Function) -> list[list[relax.Var]]:
    """Returns the rows that are taken of each large table, which is a weight of which nothing else is read."""
    parameters = list(function.params)[int(function.attrs["num_input"]) :]
    readers: dict[relax.Var, list[relax.VarBinding]] = {
        table: [] for table in parameters if math.prod(extent or 0 for extent in _extents(table)) >= LARGE_TABLE
    }
    for block in function.body.blocks:
        for binding in block.bindings:
            for operand in _tensors(_arguments(binding.value)):
                if operand in readers:
                    readers[operand].append(binding)
    tables = [found for found in readers.values() if all(_operator(each.value) == "relax.take" for each in found)]
    return [[binding.var for binding in found] for found in tables if found]


def operations_of(value: relax.Expr, dtype: str) -> int:
    """Returns the operations of a product of operands of a type, two for each term; 0 for all else.

    Products with symbolic extents have none.

    Args:
        value: What a variable is bound to.
        dtype: Type of both operands.
    """
    name = _operator(value)
    if name not in _OPERANDS or not all(_is_floating(operand, dtype) for operand in value.args[: _OPERANDS[name]]):
        return 0
    extents = [_extents(operand) for operand in value.args[: _OPERANDS[name]]]
    if any(extent is None for shape in extents for extent in shape):
        return 0
    left, right = ([int(extent or 0) for extent in shape] for shape in extents[:2])
    if name.startswith("relax.nn.attention"):  # [batch, tokens, heads, features]
        batch, queries, heads, features = left
        return 2 * batch * heads * queries * right[1] * (features + int(extents[2][-1] or 0))
    if name == "relax.nn.conv2d_transpose":  # each element of the data meets a kernel [in, out, height, width]
        return 2 * math.prod(left) * math.prod(right[1:])
    terms = right[-2] if name == "relax.matmul" else math.prod(right[1:])
    return 2 * terms * math.prod(int(extent) for extent in value.ty.shape)


def _extents(value: relax.Expr) -> list[int | None]:
    """Returns the extents of a tensor, None for symbolic ones."""
    from tvm import tirx

    return [int(extent) if isinstance(extent, tirx.IntImm) else None for extent in value.ty.shape]


def _copies(name: str) -> bool:
    """Returns whether the operator moves elements in memory; the others of `_MOVES` only change the shape."""
    return name in _MOVES and name not in ("relax.reshape", "relax.expand_dims", "relax.squeeze")


def _operator(value: relax.Expr) -> str:
    """Returns the name of the Relax operator that is called; empty for tuples and what is taken out of them."""
    from tvm import ir, relax

    if not isinstance(value, relax.Call):
        return ""
    return str(value.op.name) if isinstance(value.op, ir.Op) else "call"


def _arguments(value: relax.Expr) -> list[relax.Expr]:
    from tvm import relax

    if isinstance(value, relax.Call):
        return list(value.args)
    if isinstance(value, relax.TupleGetItem):
        return [value.tuple_value]
    return [value]


def _tensors(arguments: Iterable[relax.Expr]) -> Iterator[relax.Expr]:
    """Yields the variables and constants among the arguments, and in tuples among them."""
    from tvm import ir, relax

    for argument in arguments:
        if isinstance(argument, relax.Tuple):
            yield from _tensors(argument.fields)
        elif isinstance(argument, relax.Var | ir.Constant):
            yield argument


def _mapped(argument: relax.Expr, convert: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
    """Returns the argument with each tensor in it converted."""
    from tvm import ir, relax

    if isinstance(argument, relax.Tuple):
        return relax.Tuple([_mapped(field, convert) for field in argument.fields])
    return convert(argument) if isinstance(argument, relax.Var | ir.Constant) else argument


def _is_constant(operand: relax.Expr) -> bool:
    from tvm import ir

    return isinstance(operand, ir.Constant)


def _is_floating(operand: relax.Expr, dtype: str = "float32") -> bool:
    """Returns whether the operand is a tensor of this type, or a tuple of such."""
    from tvm import relax

    ty = operand.ty
    tensors = list(ty.fields) if isinstance(ty, relax.TupleType) else [ty]
    return all(isinstance(tensor, relax.TensorType) and str(tensor.dtype) == dtype for tensor in tensors)
