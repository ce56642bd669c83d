"""Masks of one object as a subject: photographs and clicks in, masks out, held to upstream's `predict_inst`."""

from __future__ import annotations

OUTPUTS = ("logits", "iou", "masks")
"""What is judged of every round: mask logits [n, 288, 288], predicted IoU [n], and masks at the photograph's size."""
