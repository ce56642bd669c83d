"""The whole model as one subject: photographs and prompts in, masks out, held to upstream's `Sam3Processor`."""

from __future__ import annotations

RAW = ("logits", "boxes", "masks", "presence", "semantic")
"""Outputs under the strict gate, as `harness.models.sam3.deployed.entry_points.grounding` describes them."""
FINAL = ("found/queries", "found/masks", "found/boxes", "found/scores")
"""The detections in the photograph, under the criteria of `harness.parity.detections`."""
