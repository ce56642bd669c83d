"""Attention of half operands where no kernel of this project takes it: TVM's legalization would sum it in half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.precision.lowering import HALF_DTYPES

if TYPE_CHECKING:
    from tvm import relax


def _attention(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """TVM's legalization on widened operands, and its result rounded."""
    from tvm import relax, topi

    legalize: Any = call.op.get_attr("FLegalize")
    dtype = str(call.args[0].ty.dtype)
    if dtype not in HALF_DTYPES:
        result: relax.Expr = legalize(builder, call)
        return result
    wide = [
        builder.emit_te(topi.cast, operand, "float32") if str(operand.ty.dtype) == dtype else operand
        for operand in call.args
    ]
    attention = builder.normalize(relax.Call(call.op, wide, call.attrs, call.ty_args))
    return builder.call_te(topi.cast, builder.emit(legalize(builder, attention)), dtype)


LEGALIZE = {"relax.nn.attention": _attention, "relax.nn.attention_bias": _attention}
"""By Relax operator, for `relax.transform.LegalizeOps`."""
