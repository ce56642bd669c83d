"""Holds docstrings and names to `docs/design/language.md`, in the packages that have been rewritten to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.core.settings import REPOSITORY

HARNESS = REPOSITORY / "harness"
LATER = (
    "compiler/deployment",
    "compiler/execution",
    "compiler/schedules",
    "compiler/tuned",
    "tuning",
    "verify/report/performance",
)
"""The packages that are still to be rewritten."""
CIRCUMLOCUTION = re.compile(r"(What|Whether|How|Of|As|Where|Which|Who)\b")
PRONOUNS = {
    *("told", "tell", "asked", "asking", "shown", "alike", "theirs", "ours", "beside", "together"),
    *("some", "of", "at", "kept", "this", "that", "it", "held"),
}


def modules() -> list[Path]:
    return [
        path
        for path in sorted(HARNESS.rglob("*.py"))
        if not str(path.relative_to(HARNESS)).startswith(tuple(f"{package}/" for package in LATER))
    ]


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


@pytest.mark.parametrize("package", sorted({path.relative_to(HARNESS).parts[0] for path in modules()}))
def test_docstrings_say_what_is_done_and_names_are_no_pronouns(package: str) -> None:
    wrong = []
    for path in modules():
        if path.relative_to(HARNESS).parts[0] == package:
            tree = ast.parse(path.read_text())
            wrong += [f"{path}:{n}: {text[:60]}" for n, text in documented(tree) if CIRCUMLOCUTION.match(text)]
            wrong += [f"{path}:{n}: {name}" for n, name in named(tree) if name.strip("_") in PRONOUNS]
    assert not wrong, "\n".join(wrong)


def test_a_package_that_is_to_be_rewritten_is_there() -> None:
    assert all((HARNESS / package).is_dir() for package in LATER)
