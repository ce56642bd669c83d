"""What is kept of a frame that may be shown, later or again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.outputs import ShownObject

Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class KeptFrame:
    """The objects of a frame that may be shown.

    Attributes:
        index: Number of the frame.
        size: Width and height.
        bits: The mask of each object, uint8 [(width · height + 7) // 8].
        tracker_scores: See `ShownObject`.
        whole: Whether everything was computed on the frame, not some objects alone.
    """

    index: int
    size: tuple[int, int]
    bits: Mapping[int, Bits]
    tracker_scores: Mapping[int, float]
    whole: bool

    @classmethod
    def of(cls, index: int, size: tuple[int, int], objects: Mapping[int, ShownObject], whole: bool) -> KeptFrame:
        """Keeps objects."""
        bits = {number: np.packbits(each.mask) for number, each in objects.items()}
        return cls(index, size, bits, {number: each.tracker_score for number, each in objects.items()}, whole)

    @property
    def objects(self) -> dict[int, ShownObject]:
        """The objects, as they were given."""
        width, height = self.size
        return {
            number: ShownObject(
                np.unpackbits(bits, count=height * width).reshape(height, width).astype(bool),
                self.tracker_scores[number],
            )
            for number, bits in self.bits.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the masks."""
        return sum(bits.nbytes for bits in self.bits.values())

    def without(self, object_ids: Collection[int]) -> KeptFrame:
        """The same without some objects."""
        return replace(self, bits={number: bits for number, bits in self.bits.items() if number not in object_ids})
