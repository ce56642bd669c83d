"""Lists the components' distinct operator calls in fixtures/operators.json, when run as a program.

A call is an operator with the shapes, dtypes and other arguments that TVM's importer gets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.route import Route
from harness.core.files import write_text
from harness.core.settings import FIXTURES

OPERATORS_FILE = FIXTURES / "operators.json"
"""Every distinct call in the components at shallow scale."""


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


def calls_of(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> set[Call]:
    """Exports a module by the default route, and returns the distinct calls that TVM's importer gets."""
    route = Route()
    return {
        Call(str(node.target).removeprefix("torch.ops."), json.dumps([_plain(node.args), _plain(node.kwargs)]))
        for node in route.graph(route.export(module, args)).nodes.values()
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    }


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


def collect() -> set[Call]:
    """Exports every component for each of its samples at shallow scale, and returns all operator calls."""
    from harness.core.case import Case
    from harness.core.settings import SEEDED
    from harness.models.sam3.build import build_case
    from harness.models.sam3.components import COMPONENTS
    from harness.models.sam3.source import UpstreamModel
    from harness.models.sam3.upstream import upstream

    calls: set[Call] = set()
    with upstream():
        for interactive in (False, True):
            model = build_case(Case("", "real", "llvm"), SEEDED, interactive=interactive)
            for component in COMPONENTS.values():
                if component.interactive is not interactive:
                    continue
                module = component.build(model)
                case = Case(component.name, "real", "llvm")
                activations = UpstreamModel(case, SEEDED).captured(component.captured_by)
                for arguments in component.samples(activations).values():
                    calls |= calls_of(module, tuple(arguments.values()))
                print(component.name, len(calls), flush=True)
    return calls


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


if __name__ == "__main__":
    write_text(OPERATORS_FILE, dump_calls(collect()))
