"""Provides helpers for passes over an fx graph: find and insert calls, read arguments, name source lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._export.utils import _collect_all_valid_cia_ops
from torch.export import ExportedProgram, default_decompositions, exported_program
from torch.fx import Graph, GraphModule, Node

UNDECOMPOSED = (torch.ops.aten.scaled_dot_product_attention.default,)
"""Operators that the import needs whole: their decompositions are not optimized (the defect `attention_decomposed`)."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.+)')
_PYTORCH = "/torch/nn/"
"""Folder of PyTorch's modules."""
_LISTING = _collect_all_valid_cia_ops.__name__
"""The function of `torch.export` that lists PyTorch's composite operators for each program."""


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Returns a program in core ATen operators and `UNDECOMPOSED`."""
    graphs = (module.graph for module in program.graph_module.modules() if isinstance(module, GraphModule))
    unused = _replaced_by_default() - {node.target for graph in graphs for node in graph.nodes}
    table = {operator: rule for operator, rule in _decompositions().items() if operator not in unused}
    with _composite_operators_are(_composite_operators() - unused):
        decomposed: ExportedProgram = program.run_decompositions(table)
    return decomposed


@contextmanager
def _composite_operators_are(operators: frozenset[Any]) -> Iterator[None]:
    """Makes PyTorch prepare only these of its composite operators for a program, which takes 0.1 ms for each.

    What it prepares is that an operator in the program is replaced as its table says, and so the others need none whose
    rule is how PyTorch replaces them in any case.
    """
    setattr(exported_program, _LISTING, lambda: operators)
    try:
        yield
    finally:
        setattr(exported_program, _LISTING, _collect_all_valid_cia_ops)


@cache
def _composite_operators() -> frozenset[Any]:
    """Returns the operators that PyTorch replaces by others unless a table says otherwise."""
    return frozenset(_collect_all_valid_cia_ops())


@cache
def _replaced_by_default() -> frozenset[Any]:
    """Returns the composite operators whose rule in the table is PyTorch's own replacement."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    rules = _decompositions()
    return frozenset(
        operator
        for operator in _composite_operators() & rules.keys()
        if getattr(rules[operator], "keywords", {}).get("kernel") is operator
        or rules[operator] is operator.py_kernels.get(key)
    )


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns PyTorch's table without `UNDECOMPOSED`; making it takes longer than decomposing a small program."""
    return {operator: rule for operator, rule in default_decompositions().items() if operator not in UNDECOMPOSED}


def overloads(names: str, *suffixes: str) -> tuple[Any, ...]:
    """Returns ATen's operators of these names, which are separated by spaces, with each overload."""
    return tuple(getattr(getattr(torch.ops.aten, name), suffix) for name in names.split() for suffix in suffixes)


def calls(module: GraphModule, *targets: Callable[..., Any]) -> Iterator[Node]:
    """Yields the nodes that call one of `targets`, in order; the graph may be changed between nodes."""
    target_set = set(targets)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in target_set:
            yield node


def value_of(node: Node) -> torch.Tensor:
    """Returns the fake tensor of a node's result, which has the shape and dtype of PyTorch's result."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def insert(successor: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Inserts a call before a node, with the fake result in its metadata."""
    with successor.graph.inserting_before(successor):
        return append_call(successor.graph, target, args, kwargs)


def append_call(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """Adds a call at the graph's place of insertion, with the fake result in its metadata."""
    node = graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def argument(node: Node, name: str) -> Any:
    """Returns an argument of a call of an ATen operator by name; its default if it is not passed."""
    for position, parameter in enumerate(node.target._schema.arguments):
        if parameter.name == name:
            passed = node.args[position] if position < len(node.args) else node.kwargs.get(name)
            return parameter.default_value if passed is None else passed
    raise TypeError(f"{node.target} has no argument {name}")


def source_line(node: Node) -> str:
    """Returns the innermost Python line that a node was traced from, as `file:line in function: code`.

    Lines of PyTorch's own modules count only if there are no other lines.
    """
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return "a line that torch.export did not record"
    frame = ([frame for frame in frames if _PYTORCH not in frame["file"]] or frames)[-1]
    return f"{frame['file']}:{frame['line']} in {frame['function']}: `{frame['code'].strip()}`"
