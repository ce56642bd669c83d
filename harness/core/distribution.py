"""Defines the distribution of the errors of one output: plain data of bounded size, which reports draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from harness.runtime.decoding import Count

EDGES = tuple(10.0 ** (half_decades / 2) for half_decades in range(-10, 5))
"""Upper edges of the bins of a histogram, in units of the strict gate; the last bin has no upper edge."""
BINS = len(EDGES) + 1
WITHIN = EDGES.index(1.0) + 1
"""Number of bins within the gate; the others are outside."""
CELLS = 24
"""Maximum number of rows and of columns of an error map."""
PIXELS = 96
"""Maximum number of rows and of columns of a mask picture."""
MASKS = 3
"""Maximum number of masks of one output that are kept as pictures."""
Picture = Annotated[bytes, Meta(min_length=1, max_length=18_000)]
"""A PNG file of at most `PIXELS` × `PIXELS` pixels of 8 bits, uncompressed, with twice the room for PNG's overhead."""


@dataclass(frozen=True)
class MaskPicture:
    """A mask of PyTorch and of the compiled model, at most `PIXELS` high and wide, as PNG files.

    Attributes:
        index: Index of the mask on all axes of the output but the last two.
        size: Height and width of the mask, in pixels.
        differing: Number of pixels of the full mask that are inside, or not a number, on one side only.
        torch: PyTorch's mask. Grey: 8 levels up to zero, 8 above; a boolean mask is black and white.
        tvm: The compiled model's mask in the same levels; None if both pictures are equal.
        marks: A picture that is transparent except where a pixel differs; None if no pixel differs.
    """

    index: tuple[Count, ...]
    size: tuple[Count, Count]
    differing: Count
    torch: Picture
    tvm: Picture | None
    marks: Picture | None


@dataclass(frozen=True)
class Distribution:
    """The distribution of the errors of one output against PyTorch fp32.

    Attributes:
        histogram: Elements by |error| / gate, where the gate is 1e-5 + 1e-5·|torch|: `BINS` counts between `EDGES`, of
            which the first `WITHIN` lie within the gate. NaN and infinities that differ are in the last bin, equal ones
            in the first. Empty for integers and booleans, which have no gate.
        largest: Largest |error| of the elements in each cell of the image, over all other axes: at most `CELLS` rows
            and columns, which divide height and width evenly; inf where NaN and infinities differ. Empty if the output
            is not an image.
        masks: At most `MASKS` masks in their order: first those in which most pixels differ, then those whose inside
            and outside are both large. Empty if the output is not a mask.
    """

    histogram: tuple[int, ...] = ()
    largest: tuple[tuple[float, ...], ...] = ()
    masks: tuple[MaskPicture, ...] = ()
