"""Finds the sentences of errors by their codes in `conformance/sentences.toml`, which alone has their wording.

A test asserts which error it is and the facts in it, and nothing about its words.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from string import Formatter

TABLE = Path(__file__).parents[1] / "sentences.toml"


class Sentence(str):
    """A regular expression for a sentence, with its code.

    Attributes:
        code: The sentence's name in the table, which parametrized tests are called by.
    """

    code: str


@cache
def sentences() -> dict[str, list[str]]:
    """Returns the table: templates of the sentences by code."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {code: [found] if isinstance(found, str) else found for code, found in table.items()}


def sentence(*codes: str, **facts: object) -> Sentence:
    """Returns a regular expression for the sentences of one of the codes that have all these facts.

    A fact is found as whole words within the text of its placeholder.

    Raises:
        KeyError: There is no such code, or none of its sentences has these placeholders.
    """
    table = sentences()
    templates = [template for code in codes for template in table[code] if facts.keys() <= placeholders(template)]
    if not templates:
        raise KeyError(f"no sentence {' or '.join(codes)} has the placeholders {', '.join(facts)}")
    found = Sentence(f"(?:{'|'.join(_expression(template, facts) for template in templates)})")
    found.code = " or ".join(codes)
    return found


def placeholders(template: str) -> set[str]:
    """Returns the names of what an error fills in."""
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def _expression(template: str, facts: dict[str, object]) -> str:
    expression = ""
    for words, name, _, _ in Formatter().parse(template):
        expression += re.escape(words)
        if name in facts:
            expression += rf"(?:.*(?<!\w))?{re.escape(str(facts[name]))}(?:(?!\w).*)?"
        elif name:
            expression += ".*"
    return expression
