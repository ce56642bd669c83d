"""Defines the graph that an import starts from, before any rewriting: its nodes and the values of its placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from harness.compiler.lowering.frontends.torch_export.lifting import decompose_and_lift


@dataclass(frozen=True)
class Graph:
    """An exported program in core ATen operators, its weights and constants placeholders.

    Attributes:
        module: The graph.
        inputs: Names of the placeholders of the user's inputs, in order.
        weights: Values of the other placeholders, by name.
        outputs: Names of the nodes of the outputs, in order.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    weights: Mapping[str, torch.Tensor]
    outputs: tuple[str, ...]

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """Returns the nodes by name, in order."""
        return {node.name: node for node in self.module.graph.nodes}


def graph_of(program: ExportedProgram) -> Graph:
    """Returns the graph of a program, as in `import_program` before this project's rewriting."""
    program = decompose_and_lift(program)
    specs = program.graph_signature.input_specs
    weights = {spec.arg.name: spec.target for spec in specs if spec.kind is not InputKind.USER_INPUT}
    values = {**program.constants, **program.state_dict}
    return Graph(
        program.graph_module,
        tuple(spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT),
        {name: values[target] for name, target in weights.items()},
        tuple(program.graph_signature.user_outputs),
    )
