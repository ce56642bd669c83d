"""Builds the entry points `preprocess` and `resize_masks` for GPUs, whose targets schedule kernels themselves.

The arithmetic is that of `preprocessing` and `mask_resizing`, whose loops are made for CPUs. Here it is written as
tensor expressions in which every element is computed independently.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tvm
from tvm import relax, s_tir, te, tirx

from harness.compiler import tir as T
from harness.models.sam3.deployed.mask_resizing import LARGEST_OUTSIDE, interpolate_pair, source_indices
from harness.models.sam3.deployed.mask_resizing import NAME as RESIZE_MASKS
from harness.models.sam3.deployed.preprocessing import LONGEST, Fma, normalized
from harness.models.sam3.deployed.preprocessing import NAME as PREPROCESS
from harness.runtime.sam3.images import MASK_SIZE, RESOLUTION

_THREADS = 256
"""Threads per block."""

_FMA = {"cuda": "fmaf", "metal": "fma"}
"""Fused multiply-add in the languages of GPUs; TVM 0.27 has only LLVM's."""


def _fma(kind: str) -> Fma:
    return partial(tirx.call_pure_extern, "float32", _FMA[kind]) if kind in _FMA else T.fma


def preprocess_module(kind: str) -> tvm.IRModule:
    """Builds the function of `harness.models.sam3.deployed.preprocessing.preprocess_module` for a GPU.

    Args:
        kind: Kind of TVM's target.
    """
    height, width = T.Var("h", "int64"), T.Var("w", "int64")
    image = relax.Var("image", relax.TensorType([height, width, 3], "uint8"))
    builder = relax.BlockBuilder()
    with builder.function(PREPROCESS, [image]):
        rows = builder.emit_te(lambda image: _weights(image, 0), image, primfunc_name_hint="resampling_weights_y")
        columns = builder.emit_te(lambda image: _weights(image, 1), image, primfunc_name_hint="resampling_weights_x")
        narrow = builder.emit_te(
            _resampled_rows, image, *(columns[n] for n in range(3)), primfunc_name_hint="resample_rows"
        )
        pixels = builder.emit_te(
            partial(_resampled_columns, _fma(kind)),
            narrow,
            *(rows[n] for n in range(3)),
            primfunc_name_hint="resample_columns",
        )
        builder.emit_func_output(pixels)
    return _bind_element_threads(builder.get(), ("resample_rows", "resample_columns"), kind)


def resize_masks_module(kind: str) -> tvm.IRModule:
    """Builds the function of `mask_resizing.resize_masks_module` for a GPU; query indices are not checked.

    Args:
        kind: Kind of TVM's target.
    """
    queries, count, height, width = (T.Var(name, "int64") for name in "qkhw")
    masks = relax.Var("masks", relax.TensorType([1, queries, MASK_SIZE, MASK_SIZE], "float32"))
    kept_queries = relax.Var("kept", relax.TensorType([count], "int64"))
    shape_image = relax.Var("like", relax.TensorType([height, width, 3], "uint8"))
    builder = relax.BlockBuilder()
    with builder.function(RESIZE_MASKS, [masks, kept_queries, shape_image]):
        builder.emit_func_output(
            builder.emit_te(
                partial(_resized_masks, _fma(kind)),
                masks,
                kept_queries,
                shape_image,
                primfunc_name_hint="resize_kept_masks",
            )
        )
    return builder.get()


def _bind_element_threads(module: tvm.IRModule, names: tuple[str, ...], kind: str) -> tvm.IRModule:
    """Schedules kernels for a GPU such that each element's sum is added up by the thread that writes it.

    The sum has a handful of terms. Their number is known only at run time, so that DLight would give it to a block of
    threads.
    """
    if kind not in _FMA:
        return module
    scheduled = module.clone()
    for name in names:
        schedule = s_tir.Schedule(module[name])
        total, result = schedule.get_child_blocks(schedule.get_sblock("root"))
        block, thread = schedule.split(schedule.fuse(*schedule.get_loops(result)), [None, _THREADS])
        schedule.bind(block, "blockIdx.x")
        schedule.bind(thread, "threadIdx.x")
        schedule.compute_at(total, thread)
        schedule.set_scope(total, 0, "local")
        scheduled[name] = schedule.mod["main"].with_attr("tirx.is_scheduled", True)
    return scheduled


def _int64(value: T.Operand) -> T.Expr:
    return T.Cast("int64", value)


def _weights(image: te.Tensor, axis: int) -> list[te.Tensor]:
    """Computes first pixels int64 [1008], weights int32 [1008, taps] and the number of the weights' bits int64 [1]."""
    size = image.shape[axis]
    reach = T.max(size, RESOLUTION) * 2
    taps = T.ceildiv(reach, RESOLUTION)

    def middle(i: T.Index) -> T.Expr:
        value: T.Expr = (_int64(i) * 2 + 1) * size
        return value

    first_pixels = te.compute(
        (RESOLUTION,),
        lambda i: T.max(T.floordiv(middle(i) - reach - RESOLUTION, 2 * RESOLUTION) + 1, _int64(0)),
        name="first",
    )

    def numerator(i: T.Index, j: T.Index) -> T.Expr:
        pixel = first_pixels[i] + _int64(j)
        height = T.max(reach - T.abs((pixel * 2 + 1) * RESOLUTION - middle(i)), _int64(0))
        return T.Select(pixel < size, height, _int64(0))

    numerators = te.compute((RESOLUTION, taps), numerator, name="numerators")
    add, highest, bit, position = (te.reduce_axis((0, extent)) for extent in (taps, taps, LONGEST, RESOLUTION))
    total = te.compute((RESOLUTION,), lambda i: te.sum(numerators[i, add], axis=add), name="total")
    largest = te.compute((RESOLUTION,), lambda i: te.max(numerators[i, highest], axis=highest), name="largest")
    allowed = te.compute(
        (RESOLUTION,),
        lambda i: te.sum(_int64((largest[i] << _int64(bit + 2)) < total[i] * 65535), axis=bit),
        name="allowed",
    )
    bits = te.compute((1,), lambda _: te.min(allowed[position], axis=position), name="bits")
    weights = te.compute(
        (RESOLUTION, taps),
        lambda i, j: T.Cast("int32", T.floordiv((numerators[i, j] << (bits[0] + 1)) + total[i], total[i] * 2)),
        name="weights",
    )
    return [first_pixels, weights, bits]


def _byte(total: T.Expr, bits: te.Tensor) -> T.Expr:
    """Rounds the sum to 8 bits."""
    shift = T.Cast("int32", bits[0])
    half = T.const(1, "int32") << (shift - 1)
    return T.Cast("uint8", T.min((total + half) >> shift, 255))


def _resampled_rows(image: te.Tensor, first_pixels: te.Tensor, weights: te.Tensor, bits: te.Tensor) -> te.Tensor:
    """Resamples along x: uint8 [h, 1008, 3]."""
    height, width = image.shape[0], image.shape[1]
    j = te.reduce_axis((0, weights.shape[1]), "j")

    def term(y: T.Index, x: T.Index, c: T.Index) -> Any:
        pixel = T.min(first_pixels[x] + _int64(j), width - 1)
        return te.sum(weights[x, j] * T.Cast("int32", image[y, pixel, c]), axis=j)

    total = te.compute((height, RESOLUTION, 3), term, name="total")
    return te.compute((height, RESOLUTION, 3), lambda y, x, c: _byte(total[y, x, c], bits), name="narrow")


def _resampled_columns(
    fma: Fma, narrow: te.Tensor, first_pixels: te.Tensor, weights: te.Tensor, bits: te.Tensor
) -> te.Tensor:
    """Resamples along y and normalizes: fp32 [1, 3, 1008, 1008]."""
    shape = (1, 3, RESOLUTION, RESOLUTION)
    j = te.reduce_axis((0, weights.shape[1]), "j")

    def term(_: T.Index, c: T.Index, y: T.Index, x: T.Index) -> Any:
        pixel = T.min(first_pixels[y] + _int64(j), narrow.shape[0] - 1)
        return te.sum(weights[y, j] * T.Cast("int32", narrow[pixel, x, c]), axis=j)

    total = te.compute(shape, term, name="total")
    return te.compute(shape, lambda n, c, y, x: normalized(_byte(total[n, c, y, x], bits), fma), name="pixels")


def _resized_masks(fma: Fma, masks: te.Tensor, kept_queries: te.Tensor, shape_image: te.Tensor) -> te.Tensor:
    """Computes the masks, bool [k, h, w]."""
    height, width = shape_image.shape[0], shape_image.shape[1]

    def decide(n: T.Index, y: T.Index, x: T.Index) -> T.Expr:
        rows, row_weights = source_indices(y, height, fma)
        columns, column_weights = source_indices(x, width, fma)

        def line(row: T.Index) -> T.Expr:
            left, right = (masks[0, kept_queries[n], row, column] for column in columns)
            return interpolate_pair(left, column_weights[0], right, column_weights[1], fma)

        upper, lower = (line(row) for row in rows)
        return interpolate_pair(upper, row_weights[0], lower, row_weights[1], fma) > T.const(LARGEST_OUTSIDE, "float32")

    return te.compute((kept_queries.shape[0], height, width), decide, name="masks")
