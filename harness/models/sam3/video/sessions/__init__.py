"""Defines sessions in which a user prompts, corrects and removes single objects, held to upstream's own session."""

from __future__ import annotations

SESSION_FRAMES = "frames"
"""Name of the output that only sessions have: the frames returned after each request, which are equal."""
