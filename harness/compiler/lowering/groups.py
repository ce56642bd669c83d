"""Names groups of products and tables that users select: one module each, by its path in the model.

torch.export notes the modules that a node was traced in (`nn_module_stack`), by their paths in the exported module: a
component, or an entry point of the compiled model. Both contain modules of one model under different paths. Therefore
the code that builds the model notes on each module its path in the model (`note_paths`), so that a group has the same
name in both. It also notes on a module that its products stay float32 in every half precision (`keep_float32`). A
module that computes the products of another module gets that module's notes (`copy_notes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.core.budget import Groups

if TYPE_CHECKING:
    import torch
    import tvm
    from torch.fx import Node

    from harness.compiler.lowering.frontends.torch_export.lifting import Graph

_PATH = "path_in_model"
"""Attribute of a module: its path in the model."""
_FLOAT32 = "stays_float32"
"""Attribute of a module whose products stay float32."""

OUTSIDE = "(outside of modules)"
"""The group of products that no module of the model computes."""


def note_paths(model: torch.nn.Module) -> None:
    """Notes on each module of a model its path in the model."""
    for path, part in model.named_modules():
        if path:
            setattr(part, _PATH, path)


def keep_float32(module: torch.nn.Module) -> None:
    """Notes on a module that its products stay float32 in every precision; its submodules have their own groups."""
    setattr(module, _FLOAT32, True)


def copy_notes(module: torch.nn.Module, part: torch.nn.Module) -> None:
    """Notes on a module that it computes the products of a part of the model, so that they are in the part's group."""
    for attribute in (_PATH, _FLOAT32):
        if hasattr(part, attribute):
            setattr(module, attribute, getattr(part, attribute))


def always_float32(exported: torch.nn.Module) -> Groups:
    """Returns the groups of an exported module that `keep_float32` has noted."""
    parts = exported.named_modules(remove_duplicate=False)
    return frozenset(_name(path, part) for path, part in parts if getattr(part, _FLOAT32, False))


def groups_of(module: tvm.IRModule, graph: Graph, exported: torch.nn.Module) -> dict[str, str]:
    """Returns the group of each product, and of the rows of each table, by the name of its variable.

    Args:
        module: The imported module, in fp32.
        graph: The nodes from which it was imported.
        exported: The exported module.
    """
    from harness.compiler.lowering.frontends.torch_export.importing import nodes_of
    from harness.compiler.lowering.precision import is_product, rows_of_tables
    from harness.compiler.schedules.common.origins import bindings_of

    node_of = {variable: node for node, variable in reversed(list(nodes_of(module).items()))}
    names = {path: _name(path, part) for path, part in exported.named_modules(remove_duplicate=False)}
    groups: dict[str, str] = {}
    waiting: list[str] = []
    rows = {row for table_rows in rows_of_tables(module["main"]) for row in table_rows}
    for binding in bindings_of(module["main"]):
        if is_product(binding.value) or binding.var in rows:
            waiting.append(binding.var.name)
        # A node's value is the last variable that the importer makes for it: a product comes before its bias.
        node = graph.nodes.get(node_of.get(binding.var.name, ""))
        if node is not None:
            groups |= dict.fromkeys(waiting, _group(node, names))
            waiting = []
    return groups | dict.fromkeys(waiting, OUTSIDE)


def _name(path: str, part: torch.nn.Module) -> str:
    return str(getattr(part, _PATH, path))


def _group(node: Node, names: Mapping[str, str]) -> str:
    """Returns the path of the innermost module that a node was traced in."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    path = next((str(path) for path, _ in reversed(list(stack.values()))), "")
    return names.get(path, path) or OUTSIDE
