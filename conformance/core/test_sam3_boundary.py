"""SAM 3 is known to its model, its runtime and the application alone: no identifier elsewhere names a fact of it.

What may import what is a contract of import-linter in `pyproject.toml`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from harness.core.settings import REPOSITORY
from harness.models.registry import DEFAULT_MODEL

HARNESS = REPOSITORY / "harness"
INSIDE = ("models/sam3/", "models/sam31/", "runtime/sam3/", "app/")
APPLICATION = tuple(f"cli/{name}.py" for name in ("segment", "segment_display", "track", "ui", "loading"))
PUBLIC = "runtime/__init__.py"
"""Has the names that users of the runtime import."""
FACTS = re.compile(r"sam_?3|click|prompt|grounding|presence|tracker|vocabulary|masklet|^capacity$", re.I)
OTHER_CAPACITIES = {"compiler/schedules/cpu/arena.py", "runtime/cores.py", "verify/budget/choice.py"}
"""Have a capacity in bytes, in a core's speed, or in error."""


def outside() -> list[str]:
    names = (path.relative_to(HARNESS).as_posix() for path in sorted(HARNESS.rglob("*.py")))
    return [name for name in names if not name.startswith(INSIDE) and name not in (*APPLICATION, PUBLIC)]


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value


def test_no_identifier_names_a_fact_of_sam3() -> None:
    named = {
        name: {word for word in identifiers(ast.parse((HARNESS / name).read_text())) if FACTS.search(word)}
        for name in outside()
    }
    assert {name: words for name, words in named.items() if words} == {name: {"capacity"} for name in OTHER_CAPACITIES}


def test_the_registry_alone_names_the_model() -> None:
    """As a string, for nobody outside may import it."""
    naming = [name for name in outside() if f'"harness.models.{DEFAULT_MODEL}' in (HARNESS / name).read_text()]
    assert naming == ["models/registry.py"]


@pytest.mark.parametrize("line", ["def f(clicks): ...", "m.Sam3", "import a.sam3", "x.capacity", "knows_clicks = 1"])
def test_facts_are_seen(line: str) -> None:
    assert any(FACTS.search(word) for word in identifiers(ast.parse(line)))
