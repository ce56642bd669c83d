"""Works around operators on images: Resize and RoiAlign."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torchvision  # noqa: F401  # PyTorch's exporter translates its operators if it was imported before
from numpy.typing import NDArray
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import Resize

from harness.compiler.lowering.frontends.backend_defects import ONE_PIXEL
from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom
from harness.compiler.lowering.frontends.images import (
    EMPTY_BOX,
    IMAGE,
    MOVED_BOX,
    aligned_roi,
    interpolate,
    roi_align,
    triangle_weights,
)
from harness.compiler.lowering.frontends.onnx.values import constant_of, shape_of


def _positions(size: int, target: int, scale: float, mode: str) -> NDArray[Any]:
    """Returns the source position of each target pixel, by ONNX's table of coordinate_transformation_mode."""
    place = np.arange(target, dtype=np.float64)
    if mode == "align_corners":
        return place * ((size - 1) / (target - 1) if target > 1 else 0.0)
    if mode == "asymmetric":
        return place / scale
    if mode == "pytorch_half_pixel" and target == 1:
        return np.zeros(1)
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (place + 0.5) / scale - 0.5
    raise NotImplementedError(f"Resize with coordinate_transformation_mode {mode}")


def _linear_weights(size: int, target: int, scale: float, mode: str, antialias: bool) -> NDArray[Any]:
    step = (size - 1) / max(target - 1, 1) if mode == "align_corners" else 1.0 / scale
    return triangle_weights(_positions(size, target, scale, mode), size, step, antialias)


def _convert_resize(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Interpolates by weights along each axis where TVM's operator would be wrong, and by TVM's operator elsewhere."""
    data = builder.normalize(inputs[0])
    shape = shape_of(data)
    _, scales, sizes = (constant_of(value) for value in [*inputs[1:], None, None, None][:3])
    antialias = bool(attributes.get("antialias", 0))
    ratios = scales if scales is not None else np.array(sizes) / shape
    targets = np.floor(ratios * shape + 1e-6).astype(int) if sizes is None else sizes
    if not antialias and np.allclose(ratios * shape, targets, rtol=0, atol=1e-4):
        by_size = [inputs[0], None, None, relax.const(np.asarray(targets, np.int64))]
        return Resize._impl_v18(builder, by_size, attributes, [{}, {}])
    mode = attributes.get("coordinate_transformation_mode", b"half_pixel").decode()
    method = attributes.get("mode", b"nearest").decode()
    if len(shape) != 4 or list(targets[:2]) != shape[:2] or method == "cubic":
        raise NotImplementedError(f"Resize of {len(shape)} dimensions with mode {method} and a scale or antialias")
    if method == "nearest":
        if attributes.get("nearest_mode") != b"floor":
            raise NotImplementedError("Resize with mode nearest, a scale, and another nearest_mode than floor")
        for axis in (2, 3):
            indices = np.floor(_positions(shape[axis], targets[axis], ratios[axis], mode)).clip(0, shape[axis] - 1)
            data = relax.op.take(data, relax.const(indices.astype(np.int64)), axis)
        return data
    rows, columns = (_linear_weights(shape[axis], targets[axis], ratios[axis], mode, antialias) for axis in (2, 3))
    return interpolate(interpolate(data, rows, 2, builder.emit), columns, 3, builder.emit)


def _convert_roi_align(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Converts `RoiAlign` as PyTorch computes it; image indices become a column of the boxes."""
    image, boxes, batch = (builder.normalize(value) for value in inputs)
    index = relax.op.expand_dims(relax.op.astype(batch, boxes.ty.dtype.dtype), axis=1)
    return roi_align(
        builder.normalize,
        image,
        builder.normalize(relax.op.concat([index, boxes], axis=1)),
        (attributes.get("output_height", 1), attributes.get("output_width", 1)),
        float(attributes.get("spatial_scale", 1.0)),
        int(attributes.get("sampling_ratio", 0)),
        attributes.get("coordinate_transformation_mode", b"half_pixel") == b"half_pixel",
        attributes.get("mode", b"avg").decode(),
    )


DEFECTS = (
    Defect(
        name="resize_antialias",
        title="antialias of Resize is ignored",
        location="tvm.relax.frontend.onnx.onnx_frontend.Resize",
        description="The attribute is not read, so that a smaller image is sampled without the filter.",
        function=lambda x: torch.nn.functional.interpolate(x, size=(3, 2), mode="bilinear", antialias=True),
        args=IMAGE,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values of the unfiltered image"),
        workaround="A converter that applies the weights of the filter along each axis.",
        converters={"Resize": _convert_resize},
    ),
    Defect(
        name="resize_scale",
        title="Resize by a scale takes the ratio of the sizes instead",
        location="tvm.relax.frontend.onnx.onnx_frontend.Resize",
        description=(
            "The scale gives the size of the result and is then forgotten: 7 pixels times 1.7 are 11, and the pixels "
            "are taken 7/11 apart instead of 1/1.7. Right only where the size is a whole number without rounding."
        ),
        function=lambda x: torch.nn.functional.interpolate(x, scale_factor=1.7, mode="bilinear"),
        args=IMAGE,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values of other places in the image"),
        workaround="The converter of resize_antialias computes the weights from the scale.",
    ),
    ONE_PIXEL,
    Defect(
        name="roi_align_offset",
        title="RoiAlign with half_pixel coordinates and a scale samples at the wrong place",
        location="tvm.relax.frontend.onnx.onnx_frontend.RoiAlign",
        description=(
            "Half a pixel is subtracted from the boxes before they are scaled instead of after, so that they are moved "
            "by scale / 2. (SAM 3 uses output_half_pixel, which is right.)"
        ),
        function=aligned_roi,
        args=MOVED_BOX,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values of the neighbourhood"),
        workaround="A converter that scales first.",
        converters={"RoiAlign": _convert_roi_align},
    ),
    Defect(
        name="roi_align_no_size",
        title="RoiAlign with half_pixel coordinates of a box without size is not 0",
        location="relax.op.vision.roi_align",
        description=(
            "With the adaptive number of samples a box without width or height has none, and PyTorch's mean of them is "
            "0; TVM takes one sample."
        ),
        function=aligned_roi,
        args=EMPTY_BOX,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="1.5 instead of 0"),
        workaround="The converter of roi_align_offset sets them to 0.",
    ),
)
