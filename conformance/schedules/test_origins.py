"""Operators keep their identity through groups: one is not taken for another that TVM's structural hash equals."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import op
from tvm.relax.dpl import is_op, wildcard

from harness.compiler.schedules.common.origins import bindings_of, name_groups, tagged


def test_operators_with_one_hash_keep_their_identity_in_groups() -> None:
    one, other = relax.ShapeExpr([6, 1, 46]), relax.ShapeExpr([6, 2, 23])
    assert tvm_ffi.structural_hash(one) == tvm_ffi.structural_hash(other)
    x = relax.Var("x", relax.TensorType([6, 46], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            alone = builder.emit(op.abs(builder.emit(op.reshape(x, one))))
            grouped = builder.emit(op.exp(builder.emit(op.reshape(x, other))))
            result = builder.emit_output(relax.Tuple([alone, grouped]))
        builder.emit_func_output(result)
    before = tagged(builder.get())
    pattern = ("exp", is_op("relax.exp")(is_op("relax.reshape")(wildcard(), wildcard())))
    after = name_groups(before, relax.transform.FuseOpsByPattern([pattern], bind_constants=False)(before))
    called = {binding.var.name: getattr(binding.value, "op", None) for binding in bindings_of(after["main"])}
    assert [name for name, function in called.items() if isinstance(function, tvm.ir.GlobalVar)] == ["operator:3,2"]
