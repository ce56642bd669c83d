"""Holds the sentences of errors to their form, and the tests to the table of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from conformance.support.sentences import TABLE, sentence, sentences
from harness.core.settings import REPOSITORY

QUOTED = 6
"""Words in a row that a test shares with a sentence only if it quotes it."""


@cache
def trees(folder: str) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in (REPOSITORY / folder).rglob("*.py")}


@cache
def nodes(folder: str) -> list[ast.AST]:
    return [*chain.from_iterable(ast.walk(tree) for tree in trees(folder).values())]


def template(node: ast.expr) -> str | None:
    """Returns a string in the sources with `{}` for what is filled in, or None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def name(node: ast.expr) -> str:
    """Returns the last name of `a.b`."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def without_names(text: str) -> str:
    return re.sub(r"\{\w*\}", "{}", text)


def raised() -> Iterator[str]:
    """Yields the sentences that errors are made with."""
    errors = {"HarnessError", "ModelError"}
    classes = [node for node in nodes("harness") if isinstance(node, ast.ClassDef)]
    errors |= {found.name for found in classes if errors & set(map(name, found.bases))}
    for node in nodes("harness"):
        if isinstance(node, ast.Call) and name(node.func) in errors and (text := template(node.args[0])):
            yield text


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr):
            yield node.body[0]


def test_every_sentence_of_the_table_is_in_the_sources() -> None:
    there = {
        without_names(text) for node in nodes("harness") if isinstance(node, ast.expr) and (text := template(node))
    }
    gone = [
        f"{code}: {text}" for code, texts in sentences().items() for text in texts if without_names(text) not in there
    ]
    assert not gone, f"say in {TABLE.name} what these became:\n" + "\n".join(gone)


def test_every_sentence_of_the_table_is_asserted() -> None:
    words = {node.value for node in nodes("conformance") if isinstance(node, ast.Constant)}
    assert not (unused := sentences().keys() - words), unused


def test_a_sentence_is_one_and_says_what_to_do() -> None:
    texts = [*raised()]
    assert len(texts) > 200
    wrong = [text for text in texts if "\n" in text or re.search(r"\. [A-Z]", text) or not re.search("[;:,?] ", text)]
    assert not wrong, "\n".join(wrong)


def test_no_test_quotes_a_sentence() -> None:
    """Its wording would be frozen: `sentence` names it and the facts in it."""

    def runs(text: str) -> Iterator[tuple[str, ...]]:
        words = re.findall(r"[\w'-]+", text)
        return zip(*(words[start:] for start in range(QUOTED)), strict=False)

    known = {run for text in raised() for part in text.split("{}") for run in runs(part)}
    quoting = []
    for path, tree in trees("conformance").items():
        reasons = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "skip" in name(node.func)]
        prose = {part for node in [*reasons, *docstrings(tree)] for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
                quoting += [f"{path.name}:{node.lineno}: {' '.join(run)}" for run in runs(node.value) if run in known]
    assert not quoting, "\n".join(quoting)


def test_a_sentence_is_found_by_its_facts() -> None:
    told = sentences()["not-tracked"][0].format(object_id=12, listed="3, 4")
    assert re.fullmatch(sentence("not-tracked", object_id=12, listed=4), told)
    for facts in ({"object_id": 1}, {"object_id": 2}, {"listed": 12}):
        assert not re.search(sentence("not-tracked", **facts), told)
    assert not re.search(sentence("nothing-to-track"), told)
    for codes, facts in ((("no-such-code",), {}), (("not-tracked",), {"frame": 1})):
        with pytest.raises(KeyError):
            sentence(*codes, **facts)
