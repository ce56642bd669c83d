"""Defines the thresholds for detections and tracked objects, with the values of upstream's `build_sam3_video_model`.

In this package VB is sam3/model/sam3_video_base.py, VI is sam3/model/sam3_video_inference.py, TP is
sam3/model/sam3_tracking_predictor.py and MB is sam3/model_builder.py of sam3 0.1.4; a number after it is a line.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.runtime.errors import Sam3Error


@dataclass(frozen=True)
class Rules:
    """Upstream's configuration with temporal disambiguation (MB:716-740), which is its default.

    Scores are probabilities, IoU is of binary masks of 288 x 288 pixels.

    Attributes:
        detection_score: A detection counts if its score is above this.
        detection_iou: Of two detections whose IoU is above this, only the one with the higher score counts.
        matched_iou: A detection matches each object whose IoU with it is at least this.
        tracked_iou: An object is unmatched if its IoU with every detection is below this.
        new_score: A detection that matches no object becomes one if its score is at least this.
        hotstart_frames: The number of frames after its birth on which an object may be removed, and by which outputs
            are delayed.
        hotstart_unmatched: An object is removed once it was unmatched on this many frames.
        hotstart_duplicates: An object is removed once it shared this many detections with one older object.
        recondition_every: On frames whose number is a multiple of this, confident detections correct their objects; 0
            for never.
        overlap_iou: Of two objects whose IoU is at least this, the one that was occluded last may be suppressed.
        max_objects: New objects beyond this number are dropped, but upstream drops none of a single image (VB:561).
    """

    detection_score: float = 0.5
    detection_iou: float = 0.1
    matched_iou: float = 0.1
    tracked_iou: float = 0.5
    new_score: float = 0.7
    hotstart_frames: int = 15
    hotstart_unmatched: int = 8
    hotstart_duplicates: int = 8
    recondition_every: int = 16
    overlap_iou: float = 0.7
    max_objects: int = 10_000

    def __post_init__(self) -> None:
        """Checks that hotstart can count to its thresholds within its frames (VB:92-94).

        Raises:
            Sam3Error: It cannot.
        """
        count = max(self.hotstart_unmatched, self.hotstart_duplicates)
        if self.hotstart_frames and count > self.hotstart_frames:
            raise Sam3Error(
                f"Hotstart counts to {count} within {self.hotstart_frames} frames; give it at least {count} frames."
            )


DISAMBIGUATED = Rules()
"""`apply_temporal_disambiguation=True` (MB:716-740)."""
UNDISAMBIGUATED = Rules(hotstart_frames=0, hotstart_unmatched=0, hotstart_duplicates=0, recondition_every=0)
"""`apply_temporal_disambiguation=False` (MB:743-767): no object is removed or corrected, and no output is delayed."""
