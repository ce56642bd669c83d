"""How the errors of one output are distributed: plain data of bounded size, which reports draw."""

from __future__ import annotations

from dataclasses import dataclass

EDGES = tuple(10.0 ** (half_decades / 2) for half_decades in range(-10, 5))
"""Upper edges of all bins of a histogram but the last, which has none: errors in units of the strict gate."""
BINS = len(EDGES) + 1
WITHIN = EDGES.index(1.0) + 1
"""How many bins lie within the gate; the others are outside."""
CELLS = 24
"""Most rows, and most columns, of a map of errors."""
PIXELS = 96
"""Most rows, and most columns, of a picture of a mask."""
MASKS = 3
"""Most masks of one output that are kept as pictures."""


@dataclass(frozen=True)
class MaskPicture:
    """A mask on both sides, at most `PIXELS` high and wide; the pictures are PNG files.

    Attributes:
        index: Which mask of the output it is: its place on all axes but the last two.
        size: Height and width of the mask, in pixels.
        differing: Pixels of the mask itself that are inside on one side only, or not a number on one side only.
        torch: PyTorch's, in grey: 8 levels up to zero, 8 above; a boolean one in black and white.
        tvm: The compiled model's, in the same levels; None if it is the same picture.
        marks: Transparent but where a pixel differs; None if none does.
    """

    index: tuple[int, ...]
    size: tuple[int, int]
    differing: int
    torch: bytes
    tvm: bytes | None
    marks: bytes | None


@dataclass(frozen=True)
class Distribution:
    """How the errors of one output against PyTorch fp32 are distributed.

    Attributes:
        histogram: Elements by |error| / gate, the gate being 1e-5 + 1e-5·|torch|: `BINS` counts between `EDGES`, of
            which the first `WITHIN` lie within the gate. NaN and infinities that differ are in the last, equal ones in
            the first. Empty for integers and booleans, which have no gate.
        largest: Largest |error| of the elements in each cell of the image, over all other axes: at most `CELLS` rows
            and columns, which divide height and width evenly; inf where NaN and infinities differ. Empty where the
            output is no image.
        masks: Those in which most pixels differ, then those whose inside and outside are both large, at most `MASKS`,
            in their order; empty where the output is no mask.
    """

    histogram: tuple[int, ...] = ()
    largest: tuple[tuple[float, ...], ...] = ()
    masks: tuple[MaskPicture, ...] = ()
