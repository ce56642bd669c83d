"""Legalizes operators in place of TVM: transposed convolutions as products, and attention of half operands."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, topi

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, default
from harness.core.precision import HALF_DTYPES


def conv2d_transpose(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalizes a transposed convolution whose stride is its kernel: a product over pixels, which is scattered.

    No two pixels meet in the result. TVM's legalization would insert zeros into the image and convolve it, with as many
    times the multiplications as the kernel has pixels.
    """
    attrs, (image, weight) = call.attrs, call.args
    shape, result = tuple(weight.ty.shape), str(call.ty.dtype)
    scatters = (
        tuple(map(int, attrs.strides)) == tuple(map(int, shape[2:]))
        and not any(map(int, (*attrs.padding, *attrs.output_padding)))
        and all(int(step) == 1 for step in attrs.dilation)
        and (int(attrs.groups), attrs.data_layout, attrs.kernel_layout) == (1, "NCHW", "IOHW")
        and attrs.out_layout in ("", "NCHW")
    )
    if not scatters:
        return default(builder, call)

    def scattered(x: te.Tensor, w: te.Tensor) -> te.Tensor:
        count, channels, height, width = x.shape
        _, filters, down, across = w.shape
        c = te.reduce_axis((0, channels), "c")

        def product(o: T.Index, p: T.Index, q: T.Index, n: T.Index, i: T.Index, j: T.Index) -> Any:
            return te.sum(w[c, o, p, q].astype(result) * x[n, c, i, j].astype(result), axis=c)

        products = te.compute((filters, down, across, count, height, width), product, name="products")

        def pixel(n: T.Index, o: T.Index, i: T.Index, j: T.Index) -> Any:
            p, q = T.floormod(i, down), T.floormod(j, across)
            return products[o, p, q, n, T.floordiv(i, down), T.floordiv(j, across)]

        return te.compute((count, filters, height * down, width * across), pixel, name="scattered")

    return builder.call_te(scattered, image, weight, primfunc_name_hint="conv2d_transpose")


def attention(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalizes attention that no kernel of this project takes; half operands are widened, the result is rounded.

    TVM's legalization would sum half operands in half precision.
    """
    dtype = str(call.args[0].ty.dtype)
    if dtype not in HALF_DTYPES:
        return default(builder, call)
    wide = [
        builder.emit_te(topi.cast, operand, "float32") if str(operand.ty.dtype) == dtype else operand
        for operand in call.args
    ]
    summed = builder.normalize(relax.Call(call.op, wide, call.attrs, call.ty_args))
    return builder.call_te(topi.cast, builder.emit(default(builder, summed)), dtype)


LEGALIZE: dict[str, Legalize] = {
    "relax.nn.conv2d_transpose": conv2d_transpose,
    "relax.nn.attention": attention,
    "relax.nn.attention_bias": attention,
}
"""Legalizations, by Relax operator."""
