"""Orders NaN as PyTorch does: a sort takes it for the largest number, and it is the extreme of what has it.

TVM compares by `<`, which is false for NaN: sorts end in any order, and reductions return a number. They begin with the
least finite number, too, which is the maximum of nothing but -inf then. Integers in the order of the numbers are
compared in their place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import tvm
from tvm import ir, relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import operator_name, static_shape
from harness.compiler.schedules.common.nan import FLOATS, is_nan

_SORTS = ("relax.sort", "relax.argsort", "relax.topk", "relax.median")
_LARGEST = ("relax.max", "relax.argmax", "relax.nn.max_pool1d", "relax.nn.max_pool2d", "relax.nn.max_pool3d")
_SMALLEST = ("relax.min", "relax.argmin")


def order_nan(kernels: Collection[str] = ()) -> tvm.transform.Pass:
    """Returns the module pass that lets operators compare integers in place of floating point numbers.

    Args:
        kernels: Operators that have a kernel which orders NaN, for fp32 tensors of static shape.
    """

    @tvm.transform.module_pass(opt_level=0, name="OrderNan")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        rewriter = _Rewriter(module)
        rewriter.kernels = kernels
        for variable, function in module.functions_items():
            if isinstance(function, relax.Function):
                rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
        return rewriter.builder_.get()

    return run


def _dtypes(dtype: str) -> tuple[str, str]:
    """Returns the types of floating point numbers and integers by which numbers are compared."""
    return ("float64", "int64") if dtype == "float64" else ("float32", "int32")


def _reverse_negative(bits: T.Expr, integer: str) -> T.Expr:
    """Reverses the order of negative numbers, whose magnitude comes after their sign."""
    return T.Select(bits < 0, T.bitwise_xor(bits, T.max_value(integer)), bits)


def _keys(values: te.Tensor, nan_is_largest: bool) -> te.Tensor:
    """Returns integers in the order of numbers: both zeros are equal, and so are all NaN."""
    wide, integer = _dtypes(values.dtype)
    nan = T.max_value(integer) if nan_is_largest else T.min_value(integer)

    def key(*indices: T.Var) -> T.Expr:
        value = T.Cast(wide, values[indices])
        bits = T.Select(value == T.const(0, wide), T.const(0, integer), T.reinterpret(integer, value))
        return T.Select(is_nan(value), nan, _reverse_negative(bits, integer))

    return te.compute(values.shape, key, "keys")


def _numbers(keys: te.Tensor, dtype: str, nan_is_largest: bool) -> te.Tensor:
    """Returns the numbers that keys stand for; both keys of NaN are NaN's bits.

    Args:
        keys: The integers.
        dtype: Type of the numbers.
        nan_is_largest: Whether the least integer is no NaN, but what a window of padding alone has: -inf.
    """
    wide, integer = _dtypes(dtype)
    lowest = T.const(int(np.array(-np.inf, wide).view(integer) ^ np.iinfo(integer).max), integer)

    def number(*indices: T.Var) -> T.Expr:
        key = T.max(keys[indices], lowest) if nan_is_largest else keys[indices]
        return T.Cast(dtype, T.reinterpret(wide, _reverse_negative(key, integer)))

    return te.compute(keys.shape, number, "numbers")


def _middle(keys: te.Tensor, axis: int) -> te.Tensor:
    """Returns the place of the lower median among sorted numbers, or that of the first NaN."""
    count = T.Cast("int64", keys.shape[axis])
    numbers = topi.sum(topi.cast(topi.less(keys, T.max_value(keys.dtype)), "int64"), axis, keepdims=True)

    def place(*indices: T.Var) -> T.Expr:
        return T.Select(numbers[indices] < count, numbers[indices], (count - 1) // 2)

    return te.compute(numbers.shape, place, "place")


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    kernels: Collection[str]

    def visit_call_(self, op: ir.Call) -> relax.Expr:
        node = super().visit_call_(op)
        name = operator_name(node)
        if name not in (*_SORTS, *_LARGEST, *_SMALLEST) or not str(node.args[0].ty.dtype).startswith(FLOATS):
            return node
        data, attrs = node.args[0], node.attrs
        if name in self.kernels and static_shape(data) is not None:
            return node
        if name == "relax.median":
            return self._median(data, attrs.axis, op.ty)
        keys = self._keys(data, name not in _SMALLEST)
        if name in ("relax.argsort", "relax.argmax", "relax.argmin"):
            return relax.Call(node.op, [keys], attrs)
        if name in (*_LARGEST, *_SMALLEST):
            extreme = self._emit(relax.Call(node.op, [keys], attrs))
            largest = name not in _SMALLEST
            return self.builder_.call_te(_numbers, extreme, str(op.ty.dtype), largest, primfunc_name_hint="numbers")
        if name == "relax.sort":
            order = self._emit(relax.op.argsort(keys, attrs.axis, attrs.descending, "int64"))
            return _take(data, order, attrs.axis)
        indices = self._emit(relax.op.topk(keys, attrs.k, attrs.axis, "indices", attrs.largest, attrs.dtype))
        if attrs.ret_type == "indices":
            return indices
        values = _take(data, self._emit(relax.op.astype(indices, "int64")), attrs.axis)
        return values if attrs.ret_type == "values" else relax.Tuple([self._emit(values), indices])

    def _median(self, data: relax.Expr, axes: Sequence[int] | None, ty: ir.Type) -> relax.Expr:
        """Returns the lower median and, along an axis, its index; that of the first NaN if there is one."""
        axis = int(axes[0]) % len(data.ty.shape) if axes else 0
        values = data if axes else self._emit(relax.op.flatten(data))
        keys = self._keys(values, nan_is_largest=True)
        order = self._emit(relax.op.argsort(keys, axis, dtype="int64"))
        place = self.builder_.emit_te(_middle, keys, axis, primfunc_name_hint="middle")
        index = self._emit(_take(order, place, axis))
        value = _take(values, index, axis)
        if not axes:
            return relax.op.reshape(value, ty.shape)
        return relax.Tuple([self._emit(relax.op.reshape(result, ty.fields[0].shape)) for result in (value, index)])

    def _keys(self, data: relax.Expr, nan_is_largest: bool) -> relax.Var:
        return self.builder_.emit_te(_keys, data, nan_is_largest, primfunc_name_hint="keys")

    def _emit(self, value: relax.Expr) -> relax.Var:
        return self.builder_.emit(value)


def _take(data: relax.Expr, indices: relax.Expr, axis: int) -> relax.Expr:
    return relax.op.gather_elements(data, indices, int(axis))
