"""Sessions in which a user prompts single objects, corrects and removes them, held to upstream's own session."""

from __future__ import annotations

SESSION_FRAMES = "frames"
"""What is equal in a session besides what is judged of any video: the frames that are given out after each request."""
