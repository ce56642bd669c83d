"""Segments images for `sam3-tvm segment` and writes overlays, masks and COCO annotations."""

from __future__ import annotations

from harness.app.segment.images import find_images, unique_names
from harness.app.segment.job import FailedImage, Job, SegmentedImage, failures, run

__all__ = ["FailedImage", "Job", "SegmentedImage", "failures", "find_images", "run", "unique_names"]
