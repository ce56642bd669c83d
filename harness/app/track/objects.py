"""Defines the objects of a frame with their ids in the video."""

from __future__ import annotations

from dataclasses import dataclass

from harness.app.segment.objects import Objects

LARGEST_ID = 65_534
"""The largest id of an object, so that an image of 16 bits can hold it plus 1."""


@dataclass(frozen=True, eq=False)
class TrackedObjects:
    """The k visible objects of a frame.

    Attributes:
        ids: Id of each object, 0 … 65534; all ids differ.
        objects: Masks, boxes, scores and categories, in the same order.
    """

    ids: tuple[int, ...]
    objects: Objects

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.objects.scores) or len(set(self.ids)) != len(self.ids):
            raise ValueError(f"{len(self.objects.scores)} objects need as many numbers that differ, not {self.ids}")
        if any(not 0 <= number <= LARGEST_ID for number in self.ids):
            raise ValueError(f"numbers of objects are 0 … {LARGEST_ID}, not {self.ids}")
