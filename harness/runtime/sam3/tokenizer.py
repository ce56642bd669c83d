"""CLIP's byte-pair tokenizer, from the vocabulary file: texts in, int64 ids out.

The algorithm is byte-pair encoding (Sennrich et al. 2016) over UTF-8 bytes, with the text clean-up and the word pattern
of CLIP. Equal to `sam3.model.tokenizer_ve.SimpleTokenizer`, which sam3's text encoder uses.
"""

from __future__ import annotations

import gzip
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import Sam3Error

START, END = "<start_of_text>", "<end_of_text>"
_WORD_END = "</w>"
_MERGES = 49152 - 256 - 2
"""CLIP's vocabulary of 49408: 256 bytes, the same at the end of a word, the merges, start and end of text."""

CONTEXT_LENGTH = 32
"""Tokens that SAM 3's text encoder reads, start and end among them."""

REMEMBERED_WORDS = 10_000
"""Encodings of words that a tokenizer keeps before it begins anew; a language's common words."""

_WORD_PATTERN = rf"{START}|{END}|'s|'t|'re|'ve|'m|'ll|'d|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"


def _byte_symbols() -> dict[int, str]:
    """Byte → the printable character that stands for it in the vocabulary, in the order of the vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    symbols = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(256 + len(symbols) - len(printable))
    return symbols


@dataclass(frozen=True)
class Tokens:
    """Texts as the model reads them.

    Attributes:
        ids: int64 [texts, context length].
        cut: For each text how many of its tokens did not fit, and are ignored; 0 where all did.
    """

    ids: npt.NDArray[np.int64]
    cut: tuple[int, ...]


@dataclass(frozen=True)
class Tokenizer:
    """A byte-pair vocabulary, ready to encode.

    Attributes:
        ids: Token → id.
        ranks: Pair of tokens → priority of merging it, lowest first.
        symbols: Byte → character.
        words: Remembered encodings of single words.
    """

    ids: dict[str, int]
    ranks: dict[tuple[str, str], int]
    symbols: dict[int, str]
    words: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Tokenizer:
        """Reads a vocabulary file.

        Raises:
            Sam3Error: If it cannot be read or is not a CLIP vocabulary.
        """
        try:
            with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
                lines = file.read().split("\n")[1 : _MERGES + 1]
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise Sam3Error(f"The vocabulary {path} cannot be read: {error}; put CLIP's own in its place.") from error
        pairs = [tuple(line.split()) for line in lines]
        if len(pairs) != _MERGES or any(len(pair) != 2 for pair in pairs):
            raise Sam3Error(f"The vocabulary {path} is not CLIP's BPE vocabulary; put CLIP's own in its place.")
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
        """Token ids of texts: start, the text, end, zeros; a longer text is cut and still ends with the end token.

        Args:
            texts: Any number of texts.
            context_length: Columns of the ids.

        Raises:
            Sam3Error: If the arguments make no sense.
        """
        if isinstance(texts, str):
            raise Sam3Error(f"tokenize takes a sequence of texts, not one text; pass [{texts[:40]!r}].")
        if context_length < 2:
            raise Sam3Error(f"A context length of {context_length} has no room for start and end; use at least 2.")
        ids = np.zeros((len(texts), context_length), dtype=np.int64)
        cut = []
        for row, text in zip(ids, texts, strict=True):
            encoded = self.encode(text)
            kept = [self.ids[START], *encoded[: context_length - 2], self.ids[END]]
            row[: len(kept)] = kept
            cut.append(max(0, len(encoded) + 2 - context_length))
        return Tokens(ids, tuple(cut))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without start and end, of any length."""
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
        return tuple(self.ids[part] for part in self._merged(parts))

    def _merged(self, parts: list[str]) -> list[str]:
        """The parts after all merges, best rank first, of each rank every occurrence from left to right.

        A heap keeps this fast for a text of thousands of letters without a space.
        """
        count = len(parts)
        before, after = list(range(-1, count - 1)), list(range(1, count + 1))

        def ranked(place: int) -> int | None:
            """Rank of the pair that begins at a place; None if there is none."""
            if place < 0 or not parts[place] or after[place] == count:
                return None
            return self.ranks.get((parts[place], parts[after[place]]))

        waiting = [(rank, place) for place in range(count) if (rank := ranked(place)) is not None]
        heapify(waiting)
        while waiting:
            best = waiting[0][0]
            touched: list[int] = []
            while waiting and waiting[0][0] == best:
                _, place = heappop(waiting)
                if ranked(place) != best:
                    continue
                second = after[place]
                parts[place] += parts[second]
                parts[second] = ""
                after[place] = after[second]
                if after[place] < count:
                    before[after[place]] = place
                touched += (before[place], place)
            for place in touched:
                if (rank := ranked(place)) is not None:
                    heappush(waiting, (rank, place))
        return [part for part in parts if part]


def _words(text: str) -> list[str]:
    """The words of a text after CLIP's clean-up: mended encoding, HTML entities, white space, lower case."""
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
