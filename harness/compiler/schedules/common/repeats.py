"""Calls that a function makes several times with the same arguments: all but the first are dropped.

A model computes some values once for every layer, the same each time: a mask, memory with its positions added.
TVM's `EliminateCommonSubexpr` does not know the sites of `origins`, which have to agree with the calls. Calls are
compared after they are fused, because a value that two operators share cannot be fused with either.
"""

from __future__ import annotations

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm_ffi import StructuralKey

from harness.compiler.schedules.common.graph import is_call
from harness.compiler.schedules.common.origins import LOAD, merge_sites


@tvm.transform.module_pass(opt_level=0, name="MergeCalls")
def merge_calls(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Calls a compiled function once where a dataflow block calls it several times with the same arguments.

    Results of a block keep calls of their own.
    """
    merged, earlier = module.clone(), {}
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function):
            merger = _Merger(module)
            merged.update_func(variable, merger.visit_expr(function))
            earlier[variable.name_hint] = merger.earlier
    return merge_sites(merged, {name: earlier[name] for name in (LOAD, "main") if name in earlier})


@mutator
class _Merger(PyExprMutator):  # type: ignore[misc]
    """Drops repeated calls.

    Attributes:
        earlier: For each call, by its number among all calls, the number of the call whose result takes its place.
    """

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.earlier: dict[int, int] = {}
        self.known: dict[StructuralKey, tuple[int, relax.Var]] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        self.known = {}
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if not isinstance(binding.value, ir.Call):
            super().visit_var_binding_(binding)
            return
        number = len(self.earlier)
        self.earlier[number] = number
        if not isinstance(binding.var, relax.DataflowVar) or not is_call(binding.value, "relax.call_tir"):
            super().visit_var_binding_(binding)
            return
        value = self.visit_expr(binding.value)
        first, result = self.known.setdefault(StructuralKey(value), (number, binding.var))
        if first == number:
            super().visit_var_binding_(binding)
            return
        self.earlier[number] = first
        self.set_var_remap(binding.var, result)
