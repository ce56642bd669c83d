"""Several texts in one call of the text encoder, one behind the other: a single one leaves most of its places empty.

The encoder reads its weights, over a gigabyte, once for each call, and most texts fill a few of its places. No token
reads those of another text, and each counts its position from the start of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PackedTexts:
    """Texts that are encoded in one call.

    Attributes:
        texts: int64 [1, L] each, zeros after the end token.
    """

    texts: tuple[Ids, ...]

    @property
    def inputs(self) -> dict[str, Ids]:
        """The tokens int64 [1, L], and for each the place int64 [1, L] where its text begins."""
        tokens, starts = np.zeros_like(self.texts[0]), np.zeros_like(self.texts[0])
        place = 0
        for text in self.texts:
            length = length_of(text)
            tokens[:, place : place + length] = text[:, :length]
            starts[:, place:] = place
            place += length
        return {"tokens": tokens, "starts": starts}

    def split(self, features: npt.NDArray[Any]) -> list[Tensors]:
        """The outputs of the entry point for each text, zeros where it is padded; `features` are [L, 1, C]."""
        encoded: list[Tensors] = []
        place = 0
        for text in self.texts:
            length = length_of(text)
            own = np.zeros_like(features)
            own[:length] = features[place : place + length]
            encoded.append({"text_features": own, "text_mask": text == 0})
            place += length
        return encoded


def packed(texts: Sequence[Ids]) -> Iterator[PackedTexts]:
    """Yields the texts in their order, as many together as have room.

    Args:
        texts: int64 [1, L] each.
    """
    together: list[Ids] = []
    for text in texts:
        if together and sum(map(length_of, (*together, text))) > text.shape[1]:
            yield PackedTexts(tuple(together))
            together = []
        together.append(text)
    if together:
        yield PackedTexts(tuple(together))


def length_of(text: Ids) -> int:
    """The tokens of a text int64 [1, L] up to its end token; the id 0 may be among them."""
    return int(np.flatnonzero(text[0])[-1]) + 1
