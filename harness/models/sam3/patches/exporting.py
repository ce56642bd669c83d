"""Lifts obstacles to torch.export and to float64: values read from tensors, asserts in the graph, fixed fp32 boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from harness.models.sam3.patches.patch import patch, source, wrapped

if TYPE_CHECKING:
    import torch


@patch(needed=lambda: "spatial_shapes[0, 0], spatial_shapes[0, 1]" in source("model/decoder.py"))
def constant_spatial_shapes() -> AbstractContextManager[None]:
    """Reads the size for which the decoder was built.

    Assumption: the feature map's height and width are read from a tensor and compared (sam3/model/decoder.py,
    TransformerDecoder.forward and _get_rpb_matrix).
    Without the patch: torch.export cannot branch on values of a tensor.
    """
    import torch
    from sam3.model.decoder import TransformerDecoder

    def get_rpb_matrix(original: Any, decoder: Any, reference_boxes: Any, feat_size: tuple[Any, Any]) -> Any:
        if torch.compiler.is_compiling() and any(isinstance(size, torch.Tensor) for size in feat_size):
            # A traced tensor has no value; the decoder is built for one size, and attention fails with any other size.
            feat_size = decoder.compilable_stored_size
        return original(decoder, reference_boxes, (int(feat_size[0]), int(feat_size[1])))

    return wrapped(TransformerDecoder, "_get_rpb_matrix", get_rpb_matrix)


@patch(needed=lambda: "torch._assert_async" in source("model/geometry_encoders.py"))
@contextmanager
def no_asserts_in_graph() -> Iterator[None]:
    """Asserts nothing while a program is traced.

    Assumption: padding on the right is asserted on the device (sam3/model/geometry_encoders.py,
    concat_padded_sequences and is_right_padded).
    Without the patch: the assert, with the sort that it needs, becomes part of the exported program; eager runs
    keep it.
    """
    import torch
    from sam3.model import geometry_encoders

    def is_right_padded(original: Callable[..., Any], mask: torch.Tensor) -> Any:
        return None if torch.compiler.is_compiling() else original(mask)

    def assert_async(original: Callable[..., Any], condition: torch.Tensor | None, *message: str) -> None:
        if condition is not None:
            original(condition, *message)

    with (
        wrapped(geometry_encoders, "is_right_padded", is_right_padded),
        wrapped(torch, "_assert_async", assert_async),
    ):
        yield


@patch(needed=lambda: "boxes_xyxy.float()" in source("model/geometry_encoders.py"))
def boxes_in_feature_dtype() -> AbstractContextManager[None]:
    """Casts boxes to the dtype of the features.

    Assumption: boxes are cast to fp32 before roi_align, which wants them in the dtype of the features
    (sam3/model/geometry_encoders.py, SequenceGeometryEncoder._encode_boxes).
    Without the patch: the float64 oracle cannot run.
    """
    import torch
    import torchvision

    def roi_align(original: Callable[..., Any], features: torch.Tensor, boxes: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(boxes, torch.Tensor):
            boxes = boxes.to(features.dtype)
        else:
            boxes = [box.to(features.dtype) for box in boxes]
        return original(features, boxes, *args, **kwargs)

    return wrapped(torchvision.ops, "roi_align", roi_align)
