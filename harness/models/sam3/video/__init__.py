"""Videos as a subject: frames and a prompt in, objects on every frame out, held to upstream's own video model."""

from __future__ import annotations

from harness.runtime.manifest import DEFAULT_CLICKS, Capacity

DECIDED = ("ids", "births", "removals", "remembered")
"""What is equal on every frame: (frame, id) of each object that is shown, how many come and go, and which of them the
frame's memory has."""
SHOWN = ("scores", "boxes", "masks")
"""What is judged of the objects that are shown, all frames together."""
STEP = ("logits", "pointers", "object_logits", "iou", "memory")
"""What a step of the tracker computes from PyTorch's own state, judged strictly."""
OUTPUTS = (*DECIDED, *SHOWN, *STEP, "drift")
CAPACITY = Capacity(clicks=DEFAULT_CLICKS, video=True)
"""What a compiled model must answer to be judged."""
