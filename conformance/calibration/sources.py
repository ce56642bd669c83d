"""Changes one expression of a source file by rule, so that a fault can be anywhere in the project."""

from __future__ import annotations

import ast
import functools
import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

from harness.core.settings import REPOSITORY
from harness.verify.diagnose.diagnosis import Cause

HARNESS = REPOSITORY / "harness"

_KERNELS = frozenset((Cause.LEGALIZATION, Cause.SCHEDULE, Cause.FUSION))
_IN_PYTORCH = frozenset((Cause.STRATEGY, Cause.EXPORT))


@dataclass(frozen=True)
class Part:
    """A part of the project that a fault is drawn in.

    Attributes:
        paths: Its files and folders below `harness/`.
        causes: The causes of which a right diagnosis names one.
    """

    paths: tuple[str, ...]
    causes: frozenset[Cause]


PATCHES = "patches"
"""The part that acts when a model is built, too, and on PyTorch's own run."""
PARTS = {
    "strategies": Part(
        (
            "compiler/lowering/rope",
            "compiler/lowering/rotation.py",
            "compiler/lowering/strategy.py",
            "models/sam3/rotary.py",
        ),
        frozenset((Cause.STRATEGY, Cause.IMPORTER)),
    ),
    "complex engines": Part(
        ("compiler/lowering/frontends/torch_export/complex",),
        frozenset((Cause.STRATEGY, Cause.IMPORTER)),
    ),
    PATCHES: Part(("models/sam3/patches", "models/sam3/upstream.py"), _IN_PYTORCH),
    "export": Part(
        ("compiler/lowering/frontends/exporting.py", "compiler/lowering/frontends/torch_export/lifting.py"), _IN_PYTORCH
    ),
    "import": Part(("compiler/lowering",), frozenset((Cause.IMPORTER,))),
    "graph": Part(("compiler/schedules/common",), _KERNELS | {Cause.RUNTIME}),
    "kernels": Part(("compiler/schedules/cpu",), _KERNELS | {Cause.CODE_GENERATION}),
    "memory": Part(("compiler/schedules/cpu/memory.py", "compiler/schedules/cpu/arena.py"), _KERNELS | {Cause.RUNTIME}),
    "targets": Part(("compiler/targets",), frozenset((Cause.RUNTIME, Cause.CODE_GENERATION))),
    "runtime": Part(("runtime",), frozenset((Cause.RUNTIME,))),
}
"""The parts by name. A file belongs to the part that names it most closely."""


def part_of(path: str) -> str | None:
    """Returns the part that a file below `harness/` belongs to, or None."""
    fitting = [
        (len(folder), name)
        for name, part in PARTS.items()
        for folder in part.paths
        if path == folder or path.startswith(f"{folder}/")
    ]
    return max(fitting)[1] if fitting else None


@dataclass(frozen=True)
class Edit:
    """A change of a source file.

    Attributes:
        line: The line at which the changed expression begins, counted from 1.
        start: Offset of the first byte that is replaced.
        end: Offset after the last one.
        text: The replacement.
    """

    line: int
    start: int
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        """Returns the source with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]


KINDS = (
    "other number",
    "other comparison",
    "other operator",
    "negated condition",
    "and for or",
    "swapped branches",
    "swapped arguments",
    "keyword left out",
    "statement left out",
    "sign left out",
)
"""The ways in which an expression or a statement is changed."""


def edits(source: bytes) -> Iterator[tuple[str, Edit]]:
    """Yields each change that can be made of the functions of a source file, with its kind.

    Documentation, annotations and what is raised stay as they are.
    """
    text = _Text(source)
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, _FUNCTIONS))
    for node in dict.fromkeys(node for function in functions for node in _computing(function)):
        for kind, change in _CHANGES.items():
            found = change(node, text)
            if found is not None:
                start, end, replacement = found
                edit = Edit(node.lineno, start, end, replacement)
                if edit.applied(source) != source:
                    yield kind, edit


def marked(source: bytes, marks: Sequence[tuple[Edit, str]]) -> bytes:
    """Returns a source file in which a statement of one line runs before whatever an edit changes, for each edit."""
    text, inserted = _Text(source), []
    statements = [text.lines(node) for node in ast.walk(ast.parse(source)) if text.can_be_preceded(node)]
    for edit, mark in marks:
        start = max(start for start, end in statements if start <= edit.start and edit.end <= end)
        line = source[start:].partition(b"\n")[0]
        inserted.append((start, line[: len(line) - len(line.lstrip())] + mark.encode() + b"\n"))
    for start, line in sorted(inserted, reverse=True):
        source = source[:start] + line + source[start:]
    return source


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class _Text:
    """The bytes of a source file by the positions of its syntax tree."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        """Returns the offsets of a node's first byte and of the byte after its last."""
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def lines(self, node: ast.stmt) -> tuple[int, int]:
        """Returns the offsets of the line where a statement begins, with its decorators, and of the statement's end."""
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        return self.starts[first - 1], self.span(node)[1]

    def can_be_preceded(self, node: ast.AST) -> bool:
        """Returns whether a line with another statement may stand before a node."""
        if not isinstance(node, ast.stmt):
            return False
        start = self.span(node)[0]
        return (
            not self.source[self.starts[node.lineno - 1] : start].strip() and self.source[start : start + 4] != b"elif"
        )

    def of(self, node: Any) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()


_Found = tuple[int, int, str] | None


def _computing(tree: ast.AST) -> Iterator[Any]:
    """Yields the expressions and statements that compute something."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            if isinstance(node, ast.expr | ast.stmt):
                yield node
            yield from _computing(node)


def _number(node: Any, text: _Text) -> _Found:
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return None
    changed = node.value + 1 if isinstance(node.value, int) else node.value * 1.5 or 0.5
    return (*text.span(node), repr(changed))


_COMPARISONS: dict[type, str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_OPERATORS: dict[type, str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.Pow: "*",
}


def _comparison(node: Any, text: _Text) -> _Found:
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return None
    return _between(node.left, node.comparators[0], _COMPARISONS[type(node.ops[0])], text)


def _operator(node: Any, text: _Text) -> _Found:
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return None
    return _between(node.left, node.right, _OPERATORS[type(node.op)], text)


def _between(left: Any, right: Any, operator: str, text: _Text) -> _Found:
    """Replaces what stands between two operands; None where a parenthesis does."""
    start, end = text.span(left)[1], text.span(right)[0]
    if set(text.source[start:end]) & set(b"()"):
        return None
    return start, end, f" {operator} "


def _condition(node: Any, text: _Text) -> _Found:
    if not isinstance(node, ast.If | ast.IfExp):
        return None
    return (*text.span(node.test), f"not ({text.of(node.test)})")


def _and_or(node: Any, text: _Text) -> _Found:
    if not isinstance(node, ast.BoolOp):
        return None
    return _between(node.values[0], node.values[1], "or" if isinstance(node.op, ast.And) else "and", text)


def _branches(node: Any, text: _Text) -> _Found:
    if not isinstance(node, ast.IfExp):
        return None
    changed = f"({text.of(node.orelse)}) if {text.of(node.test)} else ({text.of(node.body)})"
    return (*text.span(node), f"({changed})")


def _arguments(node: Any, text: _Text) -> _Found:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    first, second = node.args[:2]
    if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
        return None
    start, end = text.span(first)[0], text.span(second)[1]
    return start, end, f"{text.of(second)}, {text.of(first)}"


def _keyword(node: Any, text: _Text) -> _Found:
    if not isinstance(node, ast.Call) or not node.keywords or len(node.args) + len(node.keywords) < 2:
        return None
    last = node.keywords[-1]
    before = node.args[-1] if len(node.keywords) == 1 else node.keywords[-2]
    if last.arg is None or text.span(before)[1] > text.span(last)[0]:
        return None
    return text.span(before)[1], text.span(last)[1], ""


def _statement(node: Any, text: _Text) -> _Found:
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return (*text.span(node), "pass") if called or isinstance(node, ast.AugAssign) else None


def _sign(node: Any, text: _Text) -> _Found:
    if not isinstance(node, ast.UnaryOp) or not isinstance(node.op, ast.USub | ast.Not):
        return None
    return (*text.span(node), f"({text.of(node.operand)})")


_CHANGES: dict[str, Callable[[Any, _Text], _Found]] = dict(
    zip(
        KINDS,
        (
            _number,
            _comparison,
            _operator,
            _condition,
            _and_or,
            _branches,
            _arguments,
            _keyword,
            _statement,
            _sign,
        ),
        strict=True,
    )
)


@dataclass(frozen=True)
class Place:
    """A place where a fault can be.

    Attributes:
        part: Key of `PARTS`.
        file: The file, below `harness/`.
        kind: One of `KINDS`.
        edit: The change.
    """

    part: str
    file: str
    kind: str
    edit: Edit

    def __str__(self) -> str:
        source = (HARNESS / self.file).read_bytes()
        old = source[self.edit.start : self.edit.end].decode()
        return " ".join(f"{self.file}:{self.edit.line}: {old.strip()} → {self.edit.text.strip() or 'nothing'}".split())


def places(reached: Mapping[str, set[int]]) -> list[Place]:
    """Returns every place in the lines that were reached, given by file below `harness/`."""
    return [
        Place(part, file, kind, edit)
        for file, lines in sorted(reached.items())
        if (part := part_of(file)) is not None
        for kind, edit in edits((HARNESS / file).read_bytes())
        if edit.line in lines
    ]


@contextmanager
def tracing() -> Iterator[dict[str, set[int]]]:
    """Yields the lines of `harness/` that run in the context, in any thread, by file."""
    below = f"{HARNESS}/"
    reached: defaultdict[str, set[int]] = defaultdict(set)

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(below):
            return None
        lines = reached[file.removeprefix(below)]

        def line(frame: FrameType, _event: str, _argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line(frame, _event, _argument)

    threading.settrace(enter)
    sys.settrace(enter)
    try:
        yield reached
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


@contextmanager
def rewritten(place: Place) -> Iterator[None]:
    """Gives the functions of a file the changed code in the context, wherever they are referred to."""
    path = HARNESS / place.file
    changed = _codes(compile(place.edit.applied(path.read_bytes()), str(path), "exec"))
    functions = [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, FunctionType) and thing.__code__.co_filename == str(path)
    ]
    right = [(function, function.__code__) for function in functions]
    _forget_results()
    try:
        for function, code in right:
            other = changed.get(code.co_qualname)
            if other is not None and other.co_freevars == code.co_freevars:
                function.__code__ = other
        yield
    finally:
        for function, code in right:
            function.__code__ = code
        _forget_results()


def _codes(code: CodeType) -> dict[str, CodeType]:
    """Returns the functions of a module by their qualified names."""
    found: dict[str, CodeType] = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= {constant.co_qualname: constant} | _codes(constant)
    return found


def _forget_results() -> None:
    """Empties the caches of the project's functions, so that results with and without a fault are not mixed."""
    for thing in gc.get_objects():
        if isinstance(thing, functools._lru_cache_wrapper) and thing.__module__.startswith("harness."):
            thing.cache_clear()
