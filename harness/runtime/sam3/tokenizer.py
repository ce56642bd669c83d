"""Implements CLIP's byte-pair tokenizer with its vocabulary file, and packs several texts into one call of the encoder.

The algorithm is byte-pair encoding (Sennrich et al. 2016) over UTF-8 bytes, with the text clean-up and the word pattern
of CLIP. It equals `sam3.model.tokenizer_ve.SimpleTokenizer`, which sam3's text encoder uses.

A single text leaves most positions of the encoder empty, which reads its weights, over a gigabyte, once for each call.
No token attends to the tokens of another text, and each text counts its positions from its own start.
"""

from __future__ import annotations

import gzip
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors
from harness.runtime.errors import ModelError

START, END = "<start_of_text>", "<end_of_text>"
_WORD_END = "</w>"
_MERGES = 49152 - 256 - 2
"""Merges of CLIP's vocabulary of 49408 tokens; the others are 256 bytes, 256 last bytes of words, start and end."""

CONTEXT_LENGTH = 32
"""Tokens that SAM 3's text encoder reads, including start and end."""

REMEMBERED_WORDS = 10_000
"""Encodings of words in a tokenizer's cache, which is then cleared; a language has fewer common words."""

_WORD_PATTERN = rf"{START}|{END}|'s|'t|'re|'ve|'m|'ll|'d|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"


def _byte_symbols() -> dict[int, str]:
    """Returns the printable character that represents each byte in the vocabulary, in the vocabulary's order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    symbols = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(256 + len(symbols) - len(printable))
    return symbols


@dataclass(frozen=True)
class Tokens:
    """Token ids of texts.

    Attributes:
        ids: int64 [texts, context length].
        cut: For each text the number of its tokens that did not fit and are ignored.
    """

    ids: npt.NDArray[np.int64]
    cut: tuple[int, ...]


@dataclass(frozen=True)
class Tokenizer:
    """A byte-pair vocabulary that encodes texts.

    Attributes:
        ids: Token → id.
        ranks: Pair of tokens → priority of merging it, lowest first.
        symbols: Byte → character.
        words: Cached encodings of single words.
    """

    ids: dict[str, int]
    ranks: dict[tuple[str, str], int]
    symbols: dict[int, str]
    words: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Tokenizer:
        """Reads a vocabulary file.

        Raises:
            ModelError: If it cannot be read or is not a CLIP vocabulary.
        """
        try:
            with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
                lines = file.read().split("\n")[1 : _MERGES + 1]
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ModelError(f"The vocabulary {path} cannot be read: {error}; put CLIP's own in its place.") from error
        pairs = [tuple(line.split()) for line in lines]
        if len(pairs) != _MERGES or any(len(pair) != 2 for pair in pairs):
            raise ModelError(f"The vocabulary {path} is not CLIP's BPE vocabulary; put CLIP's own in its place.")
        merges = [(first, second) for first, second in pairs]
        symbols = _byte_symbols()
        tokens = [*symbols.values(), *(symbol + _WORD_END for symbol in symbols.values())]
        tokens += ["".join(merge) for merge in merges]
        tokens += [START, END]
        # Later entries win where a merge spells a token that exists already, as in upstream.
        return cls(
            ids={token: index for index, token in enumerate(tokens)},
            ranks={merge: rank for rank, merge in enumerate(merges)},
            symbols=symbols,
        )

    def tokenize(self, texts: Sequence[str], context_length: int = CONTEXT_LENGTH) -> Tokens:
        """Returns token ids of texts: start, text, end, zeros; a longer text is cut and still ends with the end token.

        Args:
            texts: Any number of texts.
            context_length: Columns of the ids, two or more.
        """
        ids = np.zeros((len(texts), context_length), dtype=np.int64)
        cut = []
        for row, text in zip(ids, texts, strict=True):
            encoded = self.encode(text)
            tokens = [self.ids[START], *encoded[: context_length - 2], self.ids[END]]
            row[: len(tokens)] = tokens
            cut.append(max(0, len(encoded) + 2 - context_length))
        return Tokens(ids, tuple(cut))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text of any length, without start and end."""
        ids: list[int] = []
        for word in _words(text):
            encoded = self.words.get(word)
            if encoded is None:
                encoded = self._encode_word(word)
                if len(self.words) >= REMEMBERED_WORDS:
                    self.words.clear()
                self.words[word] = encoded
            ids.extend(encoded)
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        if word in (START, END):
            return (self.ids[word],)
        parts = [self.symbols[byte] for byte in word.encode("utf-8")]
        parts[-1] += _WORD_END
        return tuple(self.ids[part] for part in self._merge(parts))

    def _merge(self, parts: list[str]) -> list[str]:
        """Applies all merges to a word's parts, best rank first, and every occurrence of a rank from left to right.

        A heap keeps this fast for a text of thousands of letters without a space.
        """
        length = len(parts)
        previous, following = list(range(-1, length - 1)), list(range(1, length + 1))

        def rank_of_pair(position: int) -> int | None:
            """Returns the rank of the pair that begins at a position; None if there is none."""
            if position < 0 or not parts[position] or following[position] == length:
                return None
            return self.ranks.get((parts[position], parts[following[position]]))

        heap = [(rank, position) for position in range(length) if (rank := rank_of_pair(position)) is not None]
        heapify(heap)
        while heap:
            best_rank = heap[0][0]
            changed: list[int] = []
            while heap and heap[0][0] == best_rank:
                _, position = heappop(heap)
                if rank_of_pair(position) != best_rank:
                    continue
                merged = following[position]
                parts[position] += parts[merged]
                parts[merged] = ""
                following[position] = following[merged]
                if following[position] < length:
                    previous[following[position]] = position
                changed += (previous[position], position)
            for position in changed:
                if (rank := rank_of_pair(position)) is not None:
                    heappush(heap, (rank, position))
        return [part for part in parts if part]


def _words(text: str) -> list[str]:
    """Returns the words of a text after CLIP's clean-up: mended encoding, HTML entities, white space, lower case."""
    import ftfy

    cleaned = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    pattern, spaces = _patterns()
    lowered: str = spaces.sub(" ", cleaned).strip().lower()
    words: list[str] = pattern.findall(lowered)
    return words


@cache
def _patterns() -> tuple[Any, Any]:
    import regex

    return regex.compile(_WORD_PATTERN, regex.IGNORECASE), regex.compile(r"\s+")


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
