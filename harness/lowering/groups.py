"""Groups of products, and tables, that users name: those of one module, by its path in the model that it is a part of.

torch.export notes the modules that a node was traced in (`nn_module_stack`), by their paths in what was exported: a
component, or an entry point of the compiled model. Both take modules of one model, under other names. So whoever builds
the model notes on each module its path in the model (`note_paths`), and a group has the same name in both. In the same
way it notes on a module that its products stay float32 in every half precision (`keep_float32`). A module that computes
what another one does, with its weights, has the notes of that one (`computes_as`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.core.budget import Groups

if TYPE_CHECKING:
    import torch
    import tvm
    from torch.fx import Node

    from harness.lowering.frontends.torch_export.graph import Graph

_PATH = "path_in_model"
"""Attribute of a module: its path in the model."""
_FLOAT32 = "stays_float32"
"""Attribute of a module whose products stay float32."""

OUTSIDE = "(outside of modules)"
"""The group of products that no module of the model computes."""


def note_paths(model: torch.nn.Module) -> None:
    """Notes on each module of a model its path in it."""
    for path, part in model.named_modules():
        if path:
            setattr(part, _PATH, path)


def keep_float32(module: torch.nn.Module) -> None:
    """Notes on a module that its products stay float32, whatever the precision; its parts have groups of their own."""
    setattr(module, _FLOAT32, True)


def computes_as(module: torch.nn.Module, part: torch.nn.Module) -> None:
    """Notes on a module that it computes what a part of the model does: its products are in that part's group."""
    for noted in (_PATH, _FLOAT32):
        if hasattr(part, noted):
            setattr(module, noted, getattr(part, noted))


def always_float32(exported: torch.nn.Module) -> Groups:
    """Returns the groups of what is exported that `keep_float32` has noted."""
    parts = exported.named_modules(remove_duplicate=False)
    return frozenset(_name(path, part) for path, part in parts if getattr(part, _FLOAT32, False))


def groups_of(module: tvm.IRModule, graph: Graph, exported: torch.nn.Module) -> dict[str, str]:
    """Returns the group of each product and of rows of each table, by the name of the variable that holds them.

    Args:
        module: As imported, in fp32.
        graph: The nodes that it was imported from.
        exported: The module that was exported.
    """
    from harness.lowering.frontends.torch_export import nodes_of
    from harness.lowering.precision import is_product, rows_of_tables
    from harness.schedules.common.origins import bindings_of

    node_of = {variable: node for node, variable in reversed(list(nodes_of(module).items()))}
    names = {path: _name(path, part) for path, part in exported.named_modules(remove_duplicate=False)}
    found: dict[str, str] = {}
    waiting: list[str] = []
    rows = {row for of_table in rows_of_tables(module["main"]) for row in of_table}
    for binding in bindings_of(module["main"]):
        if is_product(binding.value) or binding.var in rows:
            waiting.append(binding.var.name)
        # A node's value is the last of what the importer makes of it: a product comes before its bias.
        node = graph.nodes.get(node_of.get(binding.var.name, ""))
        if node is not None:
            found |= dict.fromkeys(waiting, _group(node, names))
            waiting = []
    return found | dict.fromkeys(waiting, OUTSIDE)


def _name(path: str, part: torch.nn.Module) -> str:
    return str(getattr(part, _PATH, path))


def _group(node: Node, names: Mapping[str, str]) -> str:
    """Returns the path of the innermost module that a node was traced in."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    path = next((str(path) for path, _ in reversed(list(stack.values()))), "")
    return names.get(path, path) or OUTSIDE
