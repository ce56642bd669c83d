"""Finds attention on Relax, and replaces it by a call of this package's kernel."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, relax
from tvm.relax.dpl import is_op, wildcard
from tvm.relax.expr_functor import PyExprMutator, mutator

from harness.compiler.schedules.common.attention import recognized
from harness.compiler.schedules.common.graph import between, call, is_call, permutation, static_shape, transposed
from harness.compiler.schedules.common.kernel import ceil_div, free_variables
from harness.compiler.schedules.common.origins import join_tags, name_groups
from harness.compiler.schedules.gpu.attention import arguments_of, attention_kernel, choose_attention_tile
from harness.compiler.schedules.gpu.capabilities import TENSOR_CORES, has
from harness.compiler.schedules.gpu.folding import Folding
from harness.compiler.schedules.gpu.tensor_attention import (
    AttentionWarpTile,
    choose_attention_warp_tile,
    warp_attention_kernel,
)
from harness.compiler.schedules.gpu.threads import FLOATS

_GROUP = "transpose_matmul_fuse"
"""The name that FuseTransposeMatmul gives its groups."""

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def call_attention(target: tvm.target.Target) -> tvm.transform.Pass:
    """Replaces `relax.nn.attention` and `attention_bias` by kernels that move and rotate their operands as they load.

    Attention with a window, or with symbolic extents other than the number of keys, is left to TVM. A permutation of a
    permutation becomes one: importers permute before and after attention, and models permute back.
    """
    shared_bytes = int(target.attrs["max_shared_memory_per_block"])

    @tvm.transform.module_pass(opt_level=0, name="CallAttention")
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


@tvm.transform.module_pass(opt_level=0, name="GroupTransposedProducts")
def group_transposed_products(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Makes groups of transpositions and the products that read them, as FuseTransposeMatmul does.

    Here the groups are named after their operators, which that pass would forget; it leaves existing groups alone.
    """
    permuted = is_op("relax.permute_dims")(wildcard())
    product = is_op("relax.matmul")(wildcard(), permuted)

    def swaps(found: relax.transform.PatternCheckContext) -> bool:
        return transposed(found.annotated_expr["permuted"]) is not None

    pattern = (_GROUP, product, {"permuted": permuted}, swaps)
    return name_groups(module, relax.transform.FuseOpsByPattern([pattern], bind_constants=False)(module))


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    def __init__(self, module: tvm.IRModule, shared_bytes: int, tensor_cores: bool) -> None:
        super().__init__(module)
        self.shared_bytes, self.tensor_cores = shared_bytes, tensor_cores
        self.folding: Any = None
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
        for argument, operand in zip(arguments, folded.all, strict=True):
            self.folded += between(self.folding.bindings, argument, operand.inputs)
        kernel = (
            warp_attention_kernel(attention, tile, folded)
            if isinstance(tile, AttentionWarpTile)
            else attention_kernel(attention, tile, folded)
        )
        inputs: list[relax.Expr] = [*map(self.visit_expr, folded.inputs), *([] if bias is None else [bias])]
        return call(self.builder_, "attention", kernel, [*inputs, *free_variables(arguments_of(attention, folded))])
