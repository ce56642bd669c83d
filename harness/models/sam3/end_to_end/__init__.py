"""Defines the whole model as a subject, which holds answers to prompts to upstream's `Sam3Processor`."""

from __future__ import annotations

RAW = ("logits", "boxes", "masks", "presence", "semantic")
"""Outputs under the strict gate, which `harness.models.sam3.deployed.entry_points.ground` describes."""
FINAL = ("found/queries", "found/masks", "found/boxes", "found/scores")
"""The detections in the photograph, under the criteria of `harness.models.sam3.detections`."""
