"""Defines videos as a subject, which holds the objects of every frame to upstream's own video model."""

from __future__ import annotations

DECISIONS = ("ids", "births", "removals", "remembered")
"""Outputs that are equal on every frame: the ids of the visible objects, the numbers of births and removals, and the
objects in the frame's memory."""
VISIBLE_OUTPUTS = ("scores", "boxes", "masks")
"""Outputs of the visible objects, judged over all frames."""
STEP = ("logits", "pointers", "object_logits", "iou", "memory")
"""Outputs of a step of the tracker from PyTorch's own state, judged strictly."""
SESSION_FRAMES = "frames"
"""Output that only sessions have: the frames returned after each request, which are equal."""
OUTPUTS = (*DECISIONS, *VISIBLE_OUTPUTS, *STEP, "drift")
FOLLOWED = (
    *("logits", "object_logits", "clicked_logits", "clicked_object_logits"),
    *("detected_logits", "detected_scores"),
)
"""The compiled model's results from which upstream can go on, see `harness.models.sam3.video.following`."""
