"""What `sam3-tvm track` writes frame by frame: a video of the objects, their masks, a data set, a table of tracks."""

from __future__ import annotations

from harness.track.objects import TrackedObjects
from harness.track.results import Results

__all__ = ["Results", "TrackedObjects"]
