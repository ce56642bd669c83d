"""Packs the result of a frame, which is shown later or again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.outputs import VisibleObject

Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class FrameResult:
    """The objects of a frame, with packed masks.

    Attributes:
        index: Number of the frame.
        size: Width and height.
        bits: The mask of each object, uint8 [(width · height + 7) // 8].
        tracker_scores: See `VisibleObject`.
        is_complete: Whether all objects were computed on the frame, not some alone.
    """

    index: int
    size: tuple[int, int]
    bits: Mapping[int, Bits]
    tracker_scores: Mapping[int, float]
    is_complete: bool

    @classmethod
    def pack(
        cls, index: int, size: tuple[int, int], objects: Mapping[int, VisibleObject], is_complete: bool
    ) -> FrameResult:
        """Packs the objects of a frame."""
        bits = {number: np.packbits(item.mask) for number, item in objects.items()}
        return cls(index, size, bits, {number: item.tracker_score for number, item in objects.items()}, is_complete)

    @property
    def objects(self) -> dict[int, VisibleObject]:
        """The unpacked objects."""
        width, height = self.size
        return {
            number: VisibleObject(
                np.unpackbits(bits, count=height * width).reshape(height, width).astype(bool),
                self.tracker_scores[number],
            )
            for number, bits in self.bits.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the masks."""
        return sum(bits.nbytes for bits in self.bits.values())

    def drop_objects(self, object_ids: Collection[int]) -> FrameResult:
        """Returns the result without some objects."""
        return replace(self, bits={number: bits for number, bits in self.bits.items() if number not in object_ids})
