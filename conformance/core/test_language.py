"""Holds docstrings and names to `docs/design/language.md`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from harness.core.settings import REPOSITORY

HARNESS = REPOSITORY / "harness"
PACKAGES = sorted({path.relative_to(HARNESS).parts[0] for path in HARNESS.rglob("*.py")})
CIRCUMLOCUTION = re.compile(r"(What|Whether|How|Of|As|Where|Which|Who)\b|(See|Does what) `")
THIRD_PERSON = re.compile(
    r"(?!Bytes|Files|Folders|Kernels|Names of|Numbers of|Schedules for|This|Weights)[A-Z][a-z]*s\b"
)
"""A verb of the third person, as far as its ending tells."""
PRONOUNS = {
    *("told", "tell", "asked", "asking", "shown", "alike", "theirs", "ours", "beside", "together"),
    *("some", "of", "at", "kept", "this", "that", "it", "held", "each", "own"),
}
JSON_KEYS = {"compiler/schedules/common/provenance.py": {"beside"}}
"""Fields that a file format names, by module."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees(package: str) -> dict[Path, ast.Module]:
    paths = sorted(path for path in HARNESS.rglob("*.py") if path.relative_to(HARNESS).parts[0] == package)
    return {path: ast.parse(path.read_text()) for path in paths}


def documented(tree: ast.Module) -> Iterator[tuple[Documented, int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, getattr(node, "lineno", 1), text


def described(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the descriptions below constants and fields."""
    for node in ast.walk(tree):
        for before, after in pairwise(node.body if isinstance(node, ast.Module | ast.ClassDef) else ()):
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                yield after.lineno, ast.unparse(after.value).strip("'\"")


def named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def acts(node: Documented, path: Path) -> bool:
    """Returns whether a docstring says what is done: not of a class or property, nor the help of a command."""
    if isinstance(node, ast.Module | ast.ClassDef):
        return isinstance(node, ast.Module)
    is_command = path.parent.name == "cli" and node.name.removesuffix("_command").strip("_") == path.stem
    return not is_command and not re.search("property|callback", " ".join(map(ast.unparse, node.decorator_list)))


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_say_what_is_done_and_names_are_no_pronouns(package: str) -> None:
    wrong = []
    for path, tree in trees(package).items():
        names = PRONOUNS - JSON_KEYS.get(path.relative_to(HARNESS).as_posix(), set())
        texts = [*((n, text) for _, n, text in documented(tree)), *described(tree)]
        wrong += [f"{path}:{n}: {text[:60]}" for n, text in texts if CIRCUMLOCUTION.match(text)]
        wrong += [f"{path}:{n}: {name}" for n, name in named(tree) if name.strip("_") in names]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_modules_and_functions_begin_with_a_verb(package: str) -> None:
    wrong = [
        f"{path}:{n}: {text[:60]}"
        for path, tree in trees(package).items()
        for node, n, text in documented(tree)
        if acts(node, path) and not THIRD_PERSON.match(text)
    ]
    assert not wrong, "\n".join(wrong)
