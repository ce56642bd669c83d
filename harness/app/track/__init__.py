"""Writes the results of `sam3-tvm track` frame by frame: a video of the objects, their masks, a data set, a table."""

from __future__ import annotations

from harness.app.track.objects import TrackedObjects
from harness.app.track.results import Results

__all__ = ["Results", "TrackedObjects"]
