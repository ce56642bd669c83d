"""Lowers a module with bfloat16 operands to one in which only linear layers have them.

`harness.compiler.lowering.precision` rounds the operands of every product, as a GPU takes them. On CPUs the kernels of
linear layers take bfloat16 weights and round activations while they pack them. Kernels of convolutions, of attention
and of products of two activations may round operands as they pack them, those of attention its weights, too: these
operators are of fp32 with a note that says so (`allow_bf16`). Rows of a table are widened when they are taken.
Everything else is fp32: results of products are not rounded, and weights that others than linear layers read are
widened when the model is loaded.
"""

from __future__ import annotations

import tvm
from tvm import ir, relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import is_call, static_shape
from harness.compiler.schedules.common.scope import scope_of
from harness.compiler.schedules.cpu.bf16 import BF16, allow_bf16, has_pairs
from harness.core.precision import ROUNDED_OPERANDS

_PRODUCTS = ("relax.matmul", "relax.nn.attention", "relax.nn.attention_bias")
_CHANNELS_OF_WEIGHTS = {"relax.nn.conv2d": 1, "relax.nn.conv2d_transpose": 0}
"""Convolutions, with the axis of their weights that is the channels that are summed."""


@tvm.transform.module_pass(opt_level=0, name="Widen")
def lower_bf16(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Widens what is not a linear layer; a module whose operands were not rounded for a precision keeps its types."""
    rewriter = _Widening(module)
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function) and str((function.attrs or {}).get(ROUNDED_OPERANDS)) == BF16:
            rewriter.begin(function)
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
    return rewriter.builder_.get()


def _holds_half(ty: ir.Type) -> bool:
    """Returns whether this is the type of a bfloat16 tensor, or of a tuple that has one."""
    if isinstance(ty, relax.TupleType):
        return any(map(_holds_half, ty.fields))
    return _is_half(ty)


def _is_half(ty: ir.Type) -> bool:
    return isinstance(ty, relax.TensorType) and str(ty.dtype) == BF16


def _may_round(value: relax.Expr) -> bool:
    """Returns whether an operator has rounded operands, and its kernels may round the factors."""
    if is_call(value, *_CHANNELS_OF_WEIGHTS):
        weight = static_shape(value.args[1], BF16)
        return weight is not None and weight[_CHANNELS_OF_WEIGHTS[value.op.name]] % 2 == 0
    return is_call(value, *_PRODUCTS) and all(_is_half(operand.ty) for operand in value.args[:2])


def _bits(values: te.Tensor) -> te.Tensor:
    """Returns the bits of bfloat16 numbers: runtimes lend their arrays to code, and NumPy has no bfloat16."""
    return te.compute(values.shape, lambda *index: T.reinterpret("uint16", values[index]), "bits")


def _from_bits(bits: te.Tensor) -> te.Tensor:
    """Returns the numbers in fp32."""

    def number(*index: T.Var) -> T.Expr:
        high = T.shift_left(T.Cast("uint32", bits[index]), T.const(16, "uint32"))
        return T.reinterpret("float32", high)

    return te.compute(bits.shape, number, "wide")


@mutator
class _Widening(PyExprMutator):  # type: ignore[misc]
    """Writes one function after the other anew."""

    def begin(self, function: relax.Function) -> None:
        """Sets the function that is rewritten next."""
        self._parameters = scope_of(function).parameters
        self._wide: dict[relax.Var, relax.Var] = {}
        self._keeps = False

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        variable, value = binding.var, binding.value
        if variable in self._parameters and _holds_half(variable.ty):
            self._keeps = True
            super().visit_var_binding_(binding)
            self._keeps = False
        elif self._is_linear(value):
            rounded = self.builder_.emit(relax.op.astype(self.visit_expr(value.args[0]), BF16))
            self._bind(variable, relax.op.matmul(rounded, self._visit_half(value.args[1]), out_dtype="float32"))
        elif is_call(value, "relax.take") and value.args[0] in self._parameters and _is_half(value.args[0].ty):
            bits = self.builder_.emit_te(_bits, self._visit_half(value.args[0]), primfunc_name_hint="bits")
            rows = self.builder_.emit(relax.Call(value.op, [bits, self.visit_expr(value.args[1])], value.attrs))
            self._bind(variable, self.builder_.call_te(_from_bits, rows, primfunc_name_hint="from_bits"))
        elif _may_round(value):
            self._bind(variable, allow_bf16(self.visit_expr(value)))
        elif is_call(value, "relax.astype") and (_is_half(variable.ty) or _is_half(value.args[0].ty)):
            self._bind(variable, self.visit_expr(value.args[0]))
        else:
            super().visit_var_binding_(binding)

    def _visit_half(self, value: relax.Expr) -> relax.Expr:
        """Returns a value of the new function that is not widened."""
        self._keeps = True
        visited = self.visit_expr(value)
        self._keeps = False
        return visited

    def visit_var_(self, op: relax.Var) -> relax.Expr:
        return self._widened(super().visit_var_(op))

    def visit_dataflow_var_(self, op: relax.DataflowVar) -> relax.Expr:
        return self._widened(super().visit_dataflow_var_(op))

    def _is_linear(self, value: relax.Expr) -> bool:
        """Returns whether this is a linear layer that `gemm.py` has a kernel for."""
        if not is_call(value, "relax.matmul") or value.args[0] in self._parameters:
            return False
        left, right = value.args
        return static_shape(left, BF16) is not None and right in self._parameters and has_pairs(right)

    def _bind(self, variable: relax.Var, value: relax.Expr) -> None:
        value = self.builder_.normalize(value)
        if isinstance(value, relax.Var) and isinstance(variable, relax.DataflowVar):
            self.set_var_remap(variable, value)  # a second name would end the epilogue of what computes the value
            return
        new = type(variable)(variable.name, value.ty)
        self.builder_.emit_normalized(relax.VarBinding(new, value))
        self.set_var_remap(variable, new)

    def _widened(self, value: relax.Expr) -> relax.Expr:
        if self._keeps or not _is_half(value.ty):
            return value
        if value not in self._wide:
            self._wide[value] = self.builder_.emit(relax.op.astype(value, "float32"))
        return self._wide[value]
