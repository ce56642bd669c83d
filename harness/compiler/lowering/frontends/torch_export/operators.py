"""Lists the operators of an exported program, with the shapes, dtypes and other arguments of each call."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from harness.core.settings import REPOSITORY

OPERATORS_FILE = REPOSITORY / "fixtures" / "operators.json"
"""Every distinct call in the components at shallow scale, written by `harness.models.sam3.operator_calls`."""


@dataclass(frozen=True)
class Call:
    """One distinct use of an operator.

    Attributes:
        operator: Name with overload, for instance `aten.add.Tensor`.
        arguments: JSON text: positional arguments, then keyword arguments as an object; a tensor is {"shape": […],
            "dtype": "float32"}, any other argument is its value or its text.
    """

    operator: str
    arguments: str


def calls_of(program: ExportedProgram) -> set[Call]:
    """Returns the distinct calls of a program in core ATen operators, which are the input of TVM's importer."""
    from harness.compiler.lowering.frontends.torch_export.lifting import decompose_and_lift

    return {
        Call(_name(node), json.dumps([_plain(node.args), _plain(node.kwargs)]))
        for node in decompose_and_lift(program).graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    }


def operators_of(program: ExportedProgram) -> set[str]:
    """Returns the names of a program's operators."""
    return {call.operator for call in calls_of(program)}


def load_calls(path: Path = OPERATORS_FILE) -> dict[str, list[list[Any]]]:
    """Reads the stored list: the distinct [positional, keyword] arguments by operator."""
    stored: dict[str, list[list[Any]]] = json.loads(path.read_text(encoding="utf-8"))["operators"]
    return stored


def dump_calls(calls: Iterable[Call]) -> str:
    """Returns the text of the stored list: sorted, one call per line."""
    by_operator: dict[str, list[str]] = {}
    for call in sorted(set(calls), key=lambda call: (call.operator, call.arguments)):
        by_operator.setdefault(call.operator, []).append(call.arguments)
    blocks = [
        f"  {json.dumps(operator)}: [\n    " + ",\n    ".join(arguments) + "\n  ]"
        for operator, arguments in by_operator.items()
    ]
    return '{"schema": 1, "operators": {\n' + ",\n".join(blocks) + "\n}}\n"


def _name(node: Node) -> str:
    return str(node.target).removeprefix("torch.ops.")


def _plain(value: Any) -> Any:
    """Returns an argument of a call as JSON-able data, without the device and layout of new tensors; see `Call`."""
    if isinstance(value, Node):
        fake = value.meta["val"]
        if isinstance(fake, torch.Tensor):
            return {"shape": list(fake.shape), "dtype": str(fake.dtype).removeprefix("torch.")}
        return str(fake)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in ("device", "layout", "pin_memory")}
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return str(value)
