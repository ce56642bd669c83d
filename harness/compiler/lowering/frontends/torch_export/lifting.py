"""Makes every tensor that the graph reads an input of the graph, so that weights stay out of the compiled code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from harness.compiler.lowering.frontends.rewriting import decompose
from harness.compiler.lowering.frontends.torch_export.complex.values import as_real

_MAX_BOUND_ELEMENTS = 1
"""Largest number of elements of constants that remain constants, so that the compiler can fold and inline them."""


def decompose_and_lift(program: ExportedProgram) -> ExportedProgram:
    """Returns a program in core ATen operators, whose weights, buffers and constants are all parameters.

    TVM's importer would embed buffers and constants (position encodings, RoPE tables) in the module. The result has its
    own graph, which may be rewritten; it shares tensors with `program`.
    """
    program = decompose(program)
    specs = []
    values: dict[str, torch.Tensor | torch.nn.Parameter] = {}
    bound: dict[str, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            specs.append(spec)
            continue
        value = program.state_dict[spec.target] if spec.target in program.state_dict else program.constants[spec.target]
        if spec.kind is InputKind.CONSTANT_TENSOR and value.numel() <= _MAX_BOUND_ELEMENTS:
            specs.append(spec)
            bound[spec.target] = value
        else:
            specs.append(replace(spec, kind=InputKind.PARAMETER, persistent=None))
            values[spec.target] = torch.nn.Parameter(value.detach(), requires_grad=False)
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph_module.graph,
        graph_signature=replace(program.graph_signature, input_specs=specs),
        state_dict=values,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        constants=bound,
        verifiers=program.verifiers,
    )


def drop_unread(program: ExportedProgram) -> None:
    """Removes the parameters and constants that no node of a lifted program reads.

    Passes make some of them unread: the neck's position encodings, 113 MB that are no output of the image encoder, are
    read only by assertions on their dtype, which a pass removes.
    """
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    for spec in list(specs):
        node = placeholders[spec.arg.name]
        if spec.kind is not InputKind.USER_INPUT and not node.users:
            program.graph.erase_node(node)
            specs.remove(spec)
            values = program.state_dict if spec.kind is InputKind.PARAMETER else program.constants
            values.pop(spec.target, None)
    program.graph_module.recompile()


def parameter_values(program: ExportedProgram) -> dict[str, np.ndarray]:
    """Returns the values of a lifted program's parameters, by name, in the order of the imported function's inputs.

    Complex values are pairs of real and imaginary parts, [..., 2].
    """
    return {name: as_real(value.detach()).contiguous().numpy() for name, value in program.named_parameters()}


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
