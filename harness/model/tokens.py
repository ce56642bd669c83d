"""CLIP's byte-pair tokenizer, from the vocabulary file: texts in, int64 ids out; needs neither torch nor sam3.

The algorithm is byte-pair encoding (Sennrich et al. 2016) over UTF-8 bytes, with the text clean-up and the word pattern
of CLIP. Equal to `sam3.model.tokenizer_ve.SimpleTokenizer`, which sam3's text encoder uses.
"""

from __future__ import annotations

import gzip
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import HarnessError

VOCABULARY_FILE = "bpe_simple_vocab_16e6.txt.gz"
START, END = "<start_of_text>", "<end_of_text>"
_WORD_END = "</w>"
_MERGES = 49152 - 256 - 2
"""CLIP's vocabulary of 49408: 256 bytes, the same at the end of a word, the merges, start and end of text."""

_WORD_PATTERN = rf"{START}|{END}|'s|'t|'re|'ve|'m|'ll|'d|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"


def vocabulary_path() -> Path:
    """The BPE vocabulary file of an installed package, found without importing that package.

    Raises:
        HarnessError: if neither sam3 nor open_clip_torch brings the file.
    """
    spec = find_spec("sam3")
    if spec is not None and spec.submodule_search_locations:
        shipped = Path(spec.submodule_search_locations[0]).parent / "assets" / VOCABULARY_FILE
        if shipped.is_file():
            return shipped
    try:
        files = metadata.files("open_clip_torch") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == VOCABULARY_FILE:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise HarnessError(
        f"The BPE vocabulary {VOCABULARY_FILE} was not found in the installed packages sam3 and open_clip_torch; "
        "install open_clip_torch, which carries it."
    )


def _byte_symbols() -> dict[int, str]:
    """Byte → the printable character that stands for it in the vocabulary, in the order of the vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    symbols = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(256 + len(symbols) - len(printable))
    return symbols


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
            HarnessError: if it cannot be read or is not a CLIP vocabulary.
        """
        try:
            with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
                lines = file.read().split("\n")[1 : _MERGES + 1]
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise HarnessError(f"The vocabulary {path} cannot be read: {error}; reinstall open_clip_torch.") from error
        pairs = [tuple(line.split()) for line in lines]
        if len(pairs) != _MERGES or any(len(pair) != 2 for pair in pairs):
            raise HarnessError(f"The vocabulary {path} is not CLIP's BPE vocabulary; reinstall open_clip_torch.")
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

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without start and end, of any length."""
        ids: list[int] = []
        for word in _words(text):
            if word not in self.words:
                self.words[word] = self._encode_word(word)
            ids.extend(self.words[word])
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        if word in (START, END):
            return (self.ids[word],)
        parts = [self.symbols[byte] for byte in word.encode("utf-8")]
        parts[-1] += _WORD_END
        last = len(self.ranks)
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self.ranks.get(pair, last))
            if best not in self.ranks:
                break
            parts = _merged(parts, best)
        return tuple(self.ids[part] for part in parts)


def _merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """The parts with every occurrence of the pair joined, from left to right."""
    merged: list[str] = []
    index = 0
    while index < len(parts):
        if tuple(parts[index : index + 2]) == pair:
            merged.append(pair[0] + pair[1])
            index += 2
        else:
            merged.append(parts[index])
            index += 1
    return merged


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


@cache
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.read(path)


def tokenize(texts: Sequence[str], context_length: int = 32) -> npt.NDArray[np.int64]:
    """Token ids of texts: start, the text, end, zeros; a longer text is cut and still ends with the end token.

    Args:
        texts: Any number of texts.
        context_length: Columns of the result; 32 in SAM 3.

    Returns:
        int64 [len(texts), context_length].

    Raises:
        HarnessError: if the vocabulary is not found or the arguments make no sense.
    """
    if isinstance(texts, str):
        raise HarnessError(f"tokenize takes a sequence of texts, not one text; pass [{texts[:40]!r}].")
    if context_length < 2:
        raise HarnessError(f"A context length of {context_length} has no room for start and end; use at least 2.")
    tokenizer = _tokenizer(vocabulary_path())
    result = np.zeros((len(texts), context_length), dtype=np.int64)
    for row, text in zip(result, texts, strict=True):
        ids = [tokenizer.ids[START], *tokenizer.encode(text), tokenizer.ids[END]]
        if len(ids) > context_length:
            ids = [*ids[: context_length - 1], tokenizer.ids[END]]
        row[: len(ids)] = ids
    return result
