"""The tokenizer is upstream's, on any text."""

from __future__ import annotations

import gzip
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.support.examples import examples
from conformance.support.sentences import sentence
from harness.core.errors import HarnessError
from harness.models.sam3.upstream import import_sam3
from harness.models.sam3.vocabulary import installed_tokenizer, vocabulary_path
from harness.runtime.errors import ModelError
from harness.runtime.sam3 import VOCABULARY_FILE
from harness.runtime.sam3.tokenizer import END, START, Tokenizer

TEXTS = [
    "cat",
    "",
    "   ",
    "A striped CAT, sitting on the sofa!",
    "it's they've I'm we'll he'd don't 'S",
    "naïve café — “quoted” … ½ ² Ⅷ",
    "кошка 猫 قطة बिल्ली 고양이",
    "😀👩\u200d👩\u200d👧 🇨🇭",
    "&lt;b&gt; &amp;amp; &eacute; &#128049;",
    "schÃ¶n â€œmojibakeâ€\x9d",
    "a\tb\nc\u00a0d\u2003e",
    "1234567890 3.14 -1e-5",
    START,
    f"x{END}y <START_OF_TEXT>",
    "word " * 200,
    "x" * 1000,
    "supercalifragilisticexpialidocious" * 5,
    "\x00\x01\x7f\ufffe\U0010ffff",
    "\u017f\u2019s İstanbul ẞ ﬁ",
]


def tokenize(texts: list[str], context_length: int = 32) -> np.ndarray:
    return installed_tokenizer().tokenize(texts, context_length).ids


@cache
def upstream_tokenizer() -> Any:
    import_sam3()
    from sam3.model.tokenizer_ve import SimpleTokenizer

    return SimpleTokenizer(bpe_path=str(vocabulary_path()))


def check(texts: list[str], context_length: int) -> None:
    expected = upstream_tokenizer()(texts, context_length=context_length).numpy()
    ours = tokenize(texts, context_length)
    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_equal_to_upstream(text: str) -> None:
    check([text], 32)


@examples(400)
@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=4), context_length=st.integers(2, 77))
@example(texts=["\ud800"], context_length=32)
def test_equal_to_upstream_on_any_text(texts: list[str], context_length: int) -> None:
    check(texts, context_length)


WORDS = st.sampled_from(["the", "Cat's", "&amp;", "don't", "x1", "😀", "!!", "été", START, "'ll", "-", "\n", "日本"])


@examples(200)
@given(words=st.lists(WORDS, max_size=40), separator=st.sampled_from(["", " ", "\u00a0"]))
def test_equal_to_upstream_on_words(words: list[str], separator: str) -> None:
    check([separator.join(words)], 32)


LETTERS = st.text(alphabet="aelnotxyz", min_size=1, max_size=300)


@examples(100)
@given(word=LETTERS)
def test_equal_to_upstream_on_long_words(word: str) -> None:
    check([word], 77)


def test_a_word_of_very_many_letters_takes_no_long_time() -> None:
    letters = np.random.default_rng(0).choice(list("aelnotxyz"), 100_000)
    start = time.perf_counter()
    ids = installed_tokenizer().encode("".join(letters))
    assert time.perf_counter() - start < 20
    assert 20_000 < len(ids) < 100_000


def test_known_ids() -> None:
    expected = [49406, 2368, 49407] + [0] * 29
    assert tokenize(["cat"]).tolist() == [expected]
    assert tokenize(["a photo of a cat"])[0, :7].tolist() == [49406, 320, 1125, 539, 320, 2368, 49407]


def test_batches_are_the_texts_one_by_one() -> None:
    np.testing.assert_array_equal(tokenize(TEXTS), np.concatenate([tokenize([text]) for text in TEXTS]))
    assert tokenize([]).shape == (0, 32)


def test_over_long_text_ends_with_the_end_token() -> None:
    row = tokenize(["dog " * 100])[0]
    assert row[0] == 49406
    assert row[-1] == 49407
    assert (row != 0).all()


def test_what_does_not_fit_is_counted() -> None:
    tokens = installed_tokenizer().tokenize(["dog " * 100, "dog " * 30, "dog " * 31, ""])
    assert tokens.cut == (70, 0, 1, 0)


def test_vocabulary_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = vocabulary_path()
    assert installed.name == VOCABULARY_FILE
    monkeypatch.setattr(metadata, "files", lambda name: None)
    with pytest.raises(HarnessError, match=sentence("no-vocabulary")):
        vocabulary_path()


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip at all", gzip.compress(b"#version\na b\n"), gzip.compress(b"\xff\xfe" * 100), None],
    ids=["empty", "text", "short", "binary", "missing"],
)
def test_vocabulary_damaged(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / VOCABULARY_FILE
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=sentence("unreadable", "not-clips", path=path)):
        Tokenizer.read(path)


def test_vocabulary_truncated(tmp_path: Path) -> None:
    path = tmp_path / VOCABULARY_FILE
    path.write_bytes(vocabulary_path().read_bytes()[:-1000])
    with pytest.raises(ModelError, match=sentence("unreadable", path=path)):
        Tokenizer.read(path)
