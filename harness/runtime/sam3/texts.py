"""Packs several texts into one call of the text encoder, because a single one leaves most of its positions empty.

The encoder reads its weights, over a gigabyte, once for each call. No token attends to the tokens of another text, and
each text counts its positions from its own start.
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
        """The tokens int64 [1, L], and for each token the position int64 [1, L] where its text begins."""
        tokens, starts = np.zeros_like(self.texts[0]), np.zeros_like(self.texts[0])
        position = 0
        for text in self.texts:
            length = token_count(text)
            tokens[:, position : position + length] = text[:, :length]
            starts[:, position:] = position
            position += length
        return {"tokens": tokens, "starts": starts}

    def split(self, features: npt.NDArray[Any]) -> list[Tensors]:
        """Returns the outputs of the entry point for each text, padded with zeros; `features` are [L, 1, C]."""
        encoded: list[Tensors] = []
        position = 0
        for text in self.texts:
            length = token_count(text)
            padded = np.zeros_like(features)
            padded[:length] = features[position : position + length]
            encoded.append({"text_features": padded, "text_mask": text == 0})
            position += length
        return encoded


def pack_texts(texts: Sequence[Ids]) -> Iterator[PackedTexts]:
    """Yields the texts in their order, as many in one `PackedTexts` as fit.

    Args:
        texts: int64 [1, L] each.
    """
    batch: list[Ids] = []
    for text in texts:
        if batch and sum(map(token_count, (*batch, text))) > text.shape[1]:
            yield PackedTexts(tuple(batch))
            batch = []
        batch.append(text)
    if batch:
        yield PackedTexts(tuple(batch))


def token_count(text: Ids) -> int:
    """Returns the number of tokens of a text int64 [1, L] up to its end token; the id 0 may be among them."""
    return int(np.flatnonzero(text[0])[-1]) + 1
