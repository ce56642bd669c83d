"""The work of `sam3-tvm segment`: images in; overlays, masks and COCO annotations out."""

from __future__ import annotations

from harness.segment.images import find_images, unique_names
from harness.segment.job import Failed, Job, Segmented, failures, run

__all__ = ["Failed", "Job", "Segmented", "failures", "find_images", "run", "unique_names"]
