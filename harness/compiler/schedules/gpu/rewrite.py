"""Finds attention on Relax, and replaces it by a call of this package's kernel."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import ir, relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from harness.compiler import tir as T
from harness.compiler.schedules.common.attention import recognized
from harness.compiler.schedules.common.graph import between, call, is_call, permutation, static_shape, transposed
from harness.compiler.schedules.common.kernel import ceil_div, free_variables
from harness.compiler.schedules.common.origins import join_tags
from harness.compiler.schedules.gpu.attention import arguments_of, attention_kernel, choose_attention_tile
from harness.compiler.schedules.gpu.capabilities import TENSOR_CORES, has
from harness.compiler.schedules.gpu.folding import Folding
from harness.compiler.schedules.gpu.tensor_attention import (
    AttentionWarpTile,
    choose_attention_warp_tile,
    warp_attention_kernel,
)
from harness.compiler.schedules.gpu.threads import FLOATS

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def call_kernels(target: tvm.target.Target) -> tvm.transform.Pass:
    """Replaces `relax.nn.attention` and `attention_bias` by kernels that move and rotate their operands as they load.

    Attention with a window, or with symbolic extents other than the number of keys, is left to TVM. A permutation of a
    permutation becomes one: importers permute before and after attention, and models permute back. Products read a
    transposed right operand as it lies: weights are not transposed in every run.
    """
    shared_bytes = int(target.attrs["max_shared_memory_per_block"])

    @tvm.transform.module_pass(opt_level=0, name="CallKernels")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        module = relax.transform.CanonicalizeBindings()(module)
        rewriter = _Rewriter(module, shared_bytes, has(target, TENSOR_CORES))
        functions = dict(module.functions_items())
        for variable, function in functions.items():
            if isinstance(function, relax.Function):
                rewriter.folding = Folding(function, functions)
                rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
        return relax.transform.DeadCodeElimination()(rewriter.builder_.get())

    return run


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    def __init__(self, module: tvm.IRModule, shared_bytes: int, tensor_cores: bool) -> None:
        super().__init__(module)
        self.shared_bytes, self.tensor_cores = shared_bytes, tensor_cores
        self.folding: Folding
        self.current: relax.Var | None = None
        self.folded: list[relax.Var] = []

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.current, self.folded = binding.var, []
        value = self.builder_.normalize(self.visit_expr(binding.value))
        variable = type(binding.var)(join_tags([binding.var, *self.folded]), value.ty)
        self.builder_.emit_normalized(relax.VarBinding(variable, value))
        self.set_var_remap(binding.var, variable)

    def visit_call_(self, op: ir.Call) -> relax.Expr:
        node = super().visit_call_(op)
        if is_call(node, "relax.nn.attention", "relax.nn.attention_bias"):
            kernel = self._attention(node)
            return node if kernel is None else kernel
        if is_call(node, "relax.permute_dims"):
            return self._permuted(node, op)
        if is_call(node, "relax.matmul"):
            return self._product(node)
        return node

    def _definition(self, value: relax.Expr) -> relax.Expr:
        found = self.lookup_binding(value) if isinstance(value, relax.Var) else None
        return value if found is None else found

    def _permuted(self, node: ir.Call, original: ir.Call) -> relax.Expr:
        inner = self._definition(node.args[0])
        if not is_call(inner, "relax.permute_dims"):
            return node
        first, second = permutation(inner), permutation(original)
        axes = [first[d] for d in second]
        self.folded = [node.args[0]]
        return inner.args[0] if axes == sorted(axes) else relax.op.permute_dims(inner.args[0], axes)

    def _product(self, node: ir.Call) -> relax.Expr:
        left, right = node.args
        source = transposed(self._definition(right))
        if source is None or len(left.ty.shape) < 2:
            return node
        self.folded = [right]
        return self.builder_.call_te(
            _transposed_product, left, source, list(node.ty.shape), str(node.ty.dtype), primfunc_name_hint="NT_matmul"
        )

    def _unexpanded(self, bias: relax.Expr) -> relax.Expr:
        """Returns the source of a bias before its broadcast, or before a reshape to the same shape."""
        definition = self._definition(bias)
        if not is_call(definition, "relax.broadcast_to", "relax.reshape"):
            return bias
        source = definition.args[0]
        shape = static_shape(source, None)
        if shape is None or (definition.op.name == "relax.reshape" and shape != static_shape(bias, None)):
            return bias
        return self._unexpanded(source)

    def _attention(self, node: ir.Call) -> relax.Expr | None:
        bias = self._unexpanded(node.args[3]) if len(node.args) > 3 else None
        attention = recognized(node, FLOATS, bias, symbolic_keys=True)
        if attention is None:
            return None
        warps = choose_attention_warp_tile(attention) if self.tensor_cores else None
        tile = warps or choose_attention_tile(attention, self.shared_bytes)
        if tile is None:
            return None
        turns = ceil_div(attention.queries, tile.queries)
        folded = self.folding.operands(self.current, _BYTES[attention.dtype], turns)
        arguments = self.folding.bindings[self.current].args[:3]
        for argument, operand in zip(arguments, folded, strict=True):
            self.folded += between(self.folding.bindings, argument, operand.inputs)
        kernel = (
            warp_attention_kernel(attention, tile, folded)
            if isinstance(tile, AttentionWarpTile)
            else attention_kernel(attention, tile, folded)
        )
        inputs: list[relax.Expr] = [*map(self.visit_expr, folded.inputs), *([] if bias is None else [bias])]
        return call(self.builder_, "attention", kernel, [*inputs, *free_variables(arguments_of(attention, folded))])


def _transposed_product(left: te.Tensor, right: te.Tensor, shape: list[T.Expr], dtype: str) -> te.Tensor:
    """Returns the product of matrices, of which the right ones are stored as [columns, depth]."""
    k = te.reduce_axis((0, left.shape[-1]), name="k")

    def factor(operand: te.Tensor, batch: Sequence[T.Var], line: T.Var) -> te.TensorSlice:
        extents = operand.shape[:-2]
        aligned = zip(extents, batch[len(batch) - len(extents) :], strict=True)
        outer = [0 if isinstance(extent, T.IntImm) and int(extent) == 1 else index for extent, index in aligned]
        return operand(*outer, line, k).astype(dtype)

    def element(*idx: T.Var) -> T.Expr:
        *batch, row, column = idx
        total: T.Expr = te.sum(factor(left, batch, row) * factor(right, batch, column), axis=k)
        return total

    return te.compute(shape, element, name="NT_matmul")
