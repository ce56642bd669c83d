"""Masks of one object as a subject: photographs and clicks in, masks out, held to upstream's `predict_inst`."""

from __future__ import annotations

from harness.runtime.manifest import DEFAULT_CLICKS, Capacity

OUTPUTS = ("logits", "iou", "masks")
"""What is judged of every round: mask logits [n, 288, 288], predicted IoU [n], and masks at the photograph's size."""
CAPACITY = Capacity(clicks=DEFAULT_CLICKS)
"""What a compiled model must answer to be judged."""
