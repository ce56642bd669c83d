"""Defines masks of one object as a subject, which holds answers to clicks to upstream's `predict_inst`."""

from __future__ import annotations

OUTPUTS = ("logits", "iou", "masks")
"""Judged outputs of every round: mask logits [n, 288, 288], predicted IoU [n], and masks at the photograph's size."""
