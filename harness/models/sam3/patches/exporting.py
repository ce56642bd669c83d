"""Lifts obstacles to torch.export and to float64: values read from tensors, asserts in the graph, fixed fp32 boxes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from harness.models.sam3.patches.patch import Patch, replaced, source


@contextmanager
def _constant_spatial_shapes() -> Iterator[None]:
    import torch
    from sam3.model.decoder import TransformerDecoder

    original = TransformerDecoder._get_rpb_matrix

    @wraps(original)
    def get_rpb_matrix(self: Any, reference_boxes: torch.Tensor, feat_size: tuple[Any, Any]) -> torch.Tensor:
        if torch.compiler.is_compiling() and any(isinstance(size, torch.Tensor) for size in feat_size):
            # A traced tensor has no value; the decoder is built for one size, and attention fails with any other size.
            feat_size = self.compilable_stored_size
        bias: torch.Tensor = original(self, reference_boxes, (int(feat_size[0]), int(feat_size[1])))
        return bias

    with replaced(TransformerDecoder, "_get_rpb_matrix", get_rpb_matrix):
        yield


@contextmanager
def _no_asserts_in_graph() -> Iterator[None]:
    import torch
    from sam3.model import geometry_encoders

    is_right_padded, assert_async = geometry_encoders.is_right_padded, torch._assert_async

    @wraps(is_right_padded)
    def is_right_padded_unless_tracing(mask: torch.Tensor) -> torch.Tensor | None:
        return None if torch.compiler.is_compiling() else is_right_padded(mask)

    @wraps(assert_async)
    def assert_async_unless_none(condition: torch.Tensor | None, *message: str) -> None:
        if condition is not None:
            assert_async(condition, *message)

    with (
        replaced(geometry_encoders, "is_right_padded", is_right_padded_unless_tracing),
        replaced(torch, "_assert_async", assert_async_unless_none),
    ):
        yield


@contextmanager
def _boxes_in_feature_dtype() -> Iterator[None]:
    import torch
    import torchvision

    original = torchvision.ops.roi_align

    @wraps(original)
    def roi_align(features: torch.Tensor, boxes: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(boxes, torch.Tensor):
            boxes = boxes.to(features.dtype)
        else:
            boxes = [box.to(features.dtype) for box in boxes]
        regions: torch.Tensor = original(features, boxes, *args, **kwargs)
        return regions

    with replaced(torchvision.ops, "roi_align", roi_align):
        yield


CONSTANT_SPATIAL_SHAPES = Patch(
    name="constant_spatial_shapes",
    assumption="the feature map's height and width are read from a tensor and compared",
    location="sam3/model/decoder.py, TransformerDecoder.forward and _get_rpb_matrix",
    reason="torch.export cannot branch on values of a tensor",
    needed=lambda: "spatial_shapes[0, 0], spatial_shapes[0, 1]" in source("model/decoder.py"),
    apply=_constant_spatial_shapes,
)

NO_ASSERTS_IN_GRAPH = Patch(
    name="no_asserts_in_graph",
    assumption="padding on the right is asserted on the device",
    location="sam3/model/geometry_encoders.py, concat_padded_sequences and is_right_padded",
    reason="the assert, with the sort that it needs, becomes part of the exported program; eager runs keep it",
    needed=lambda: "torch._assert_async" in source("model/geometry_encoders.py"),
    apply=_no_asserts_in_graph,
)

BOXES_IN_FEATURE_DTYPE = Patch(
    name="boxes_in_feature_dtype",
    assumption="boxes are cast to fp32 before roi_align, which wants them in the dtype of the features",
    location="sam3/model/geometry_encoders.py, SequenceGeometryEncoder._encode_boxes",
    reason="the float64 oracle cannot run",
    needed=lambda: "boxes_xyxy.float()" in source("model/geometry_encoders.py"),
    apply=_boxes_in_feature_dtype,
)
