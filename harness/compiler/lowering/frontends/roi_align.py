"""Emits RoI align of aligned boxes as PyTorch computes it; the importers of all frontends have the same defects."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tvm import relax


class _Align(torch.nn.Module):
    def forward(self, image: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        import torchvision

        pooled: torch.Tensor = torchvision.ops.roi_align(image, boxes, 2, spatial_scale=0.5, aligned=True)
        return pooled


def reproduce_offset() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Returns a module and inputs whose samples are misplaced if boxes are moved before they are scaled."""
    import torchvision  # noqa: F401  # registers the operator before the export begins

    return _Align(), (torch.arange(16.0).reshape(1, 1, 4, 4), torch.tensor([[0.0, 1.0, 1.0, 5.0, 6.0]]))


def reproduce_empty() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Returns a module and inputs with an empty box."""
    import torchvision  # noqa: F401

    return _Align(), (torch.ones(1, 1, 4, 4), torch.tensor([[0.0, 2.0, 2.0, 2.0, 2.0]]))


def roi_align(
    emit: Callable[[relax.Expr], relax.Expr],
    image: relax.Expr,
    boxes: relax.Expr,
    size: tuple[int, int],
    scale: float,
    ratio: int,
    aligned: bool,
    mode: str = "avg",
) -> relax.Expr:
    """Emits RoI align: boxes are scaled, then moved by half a pixel; an empty box has no samples, so its mean is 0.

    Source: torchvision/csrc/ops/cpu/roi_align_kernel.cpp.

    Args:
        emit: Binds or normalizes an expression.
        image: Data [n, c, h, w].
        boxes: Index of the image, x0, y0, x1, y1 of each box, [m, 5].
        size: Rows and columns of the result.
        scale: Factor of the coordinates.
        ratio: Samples in each direction of a bin; 0 or less for as many samples as the bin has pixels.
        aligned: Whether boxes are moved by half a pixel.
        mode: Reduction of the samples of a bin.
    """
    from tvm import relax

    dtype = boxes.ty.dtype.dtype
    corners = emit(relax.op.strided_slice(boxes, axes=[1], begin=[1], end=[5]))
    if aligned:
        index = emit(relax.op.strided_slice(boxes, axes=[1], begin=[0], end=[1]))
        scaled = emit(relax.op.multiply(corners, relax.const(scale, dtype)))
        moved = emit(relax.op.subtract(scaled, relax.const(0.5, dtype)))
        boxes, scale = emit(relax.op.concat([index, moved], axis=1)), 1.0
    result = emit(
        relax.op.vision.roi_align(
            image,
            boxes,
            pooled_size=size,
            spatial_scale=scale,
            sample_ratio=ratio,
            aligned=aligned,
            layout="NCHW",
            mode=mode,
        )
    )
    if not aligned or ratio > 0:
        return result
    upper_left = emit(relax.op.strided_slice(corners, axes=[1], begin=[0], end=[2]))
    lower_right = emit(relax.op.strided_slice(corners, axes=[1], begin=[2], end=[4]))
    smallest = emit(relax.op.min(emit(relax.op.subtract(lower_right, upper_left)), axis=1))
    is_nonempty = emit(relax.op.reshape(emit(relax.op.greater(smallest, relax.const(0.0, dtype))), [-1, 1, 1, 1]))
    return emit(relax.op.where(is_nonempty, result, relax.const(0.0, dtype)))
