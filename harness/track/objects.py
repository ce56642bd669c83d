"""The objects of a frame, each with the number that it keeps through the video."""

from __future__ import annotations

from dataclasses import dataclass

from harness.segment.objects import Objects

LARGEST_ID = 65_534
"""The largest number of an object: an image of 16 bits has it, plus 1."""


@dataclass(frozen=True, eq=False)
class TrackedObjects:
    """The k objects that are seen in a frame.

    Attributes:
        ids: Number of each object, 0 … 65534; no two are equal.
        objects: Masks, boxes, scores and names, in the same order.
    """

    ids: tuple[int, ...]
    objects: Objects

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.objects.scores) or len(set(self.ids)) != len(self.ids):
            raise ValueError(f"{len(self.objects.scores)} objects need as many numbers that differ, not {self.ids}")
        if any(not 0 <= number <= LARGEST_ID for number in self.ids):
            raise ValueError(f"numbers of objects are 0 … {LARGEST_ID}, not {self.ids}")
