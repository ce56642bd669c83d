"""Lowers an exported program: its graph, its signature, and the values of parameters, buffers and constants."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from harness.compiler.lowering.frontends.rewriting import decompose
from harness.compiler.lowering.frontends.torch_export.complex import arithmetic, functions, moving
from harness.compiler.lowering.frontends.torch_export.complex.constants import fold_constants
from harness.compiler.lowering.frontends.torch_export.complex.values import (
    PART_DTYPES,
    Interleaved,
    Pair,
    Value,
    Writer,
    as_real,
    is_complex,
    touches_complex,
    unsupported,
)

_aten = torch.ops.aten

RULES = {**moving.RULES, **arithmetic.RULES, **functions.RULES}
"""Core ATen operator → its rule for complex tensors."""


def lower_complex(program: ExportedProgram) -> ExportedProgram:
    """Returns the program in real arithmetic; the package documents its calling convention.

    Args:
        program: Any exported program; it is not changed. A program without complex tensors is returned unchanged.

    Raises:
        ComplexOperatorError: An operator without a rule, a dtype other than complex64 and complex128, or control flow
            over complex tensors; the message has the model's source line.
    """
    if not any(is_complex(node) for node in _all_nodes(program.graph_module)):
        return program
    with torch.no_grad():
        return _Lowering(decompose(program)).result()


def _all_nodes(module: GraphModule) -> Iterable[Node]:
    for part in module.modules():
        if isinstance(part, GraphModule):
            yield from part.graph.nodes


class _Lowering:
    """One run of the pass, over a program in core ATen operators."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.writer = Writer(Graph())
        self.values: dict[Node, Value] = {}
        self.input_names: dict[str | None, str] = {}
        self.folded: dict[str, torch.Tensor] = {}
        self.input_specs: list[InputSpec] = []
        self.output_specs: list[OutputSpec] = []

    def result(self) -> ExportedProgram:
        """Walks the graph and assembles the new program."""
        folded, unused = fold_constants(self.program.graph)
        nodes = [node for node in self.program.graph.nodes if node not in unused]
        placeholders = [node for node in nodes if node.op == "placeholder"]
        inputs = list(zip(placeholders, self.program.graph_signature.input_specs, strict=True))
        # torch.export's order: parameters, buffers and constants come before user inputs
        for node, spec in inputs:
            if spec.kind is not InputKind.USER_INPUT:
                self._take_input(node, spec)
        for node, value in folded.items():
            target = f"computed_{node.name}"
            self.folded[target] = value
            self._take_input(node, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), target))
        for node, spec in inputs:
            if spec.kind is InputKind.USER_INPUT:
                self._take_input(node, spec)
        for node in nodes:
            if node.op == "output":
                self._return(node)
            elif node.op != "placeholder" and node not in folded:
                self.values[node] = self._lower_node(node)
        self.writer.erase_unused()
        return self._assemble()

    def _take_input(self, node: Node, spec: InputSpec) -> None:
        """Adds the placeholder of an input; a complex one is [..., 2]."""
        if is_complex(node):
            _check_dtype(node)
            placeholder = self.writer.graph.placeholder(node.name)
            placeholder.meta["val"] = torch.view_as_real(node.meta["val"])
        else:
            placeholder = self.writer.graph.node_copy(node)
        self.values[node] = placeholder
        self.input_names[node.name] = placeholder.name
        self.input_specs.append(replace(spec, arg=_with_name(spec.arg, placeholder.name)))

    def _lower_node(self, node: Node) -> Value:
        """Returns the value of a node in the lowered graph: a copy of a real call, or the result of a rule."""
        self.writer.source = node
        if node.op == "get_attr":
            self._refuse_control_flow(node)
            return self.writer.graph.node_copy(node)
        for argument in filter(is_complex, node.all_input_nodes):
            value = self.values[argument]
            if isinstance(value, Node):  # an input or constant, whose parts have the line that reads them first
                self.values[argument] = self.writer.unpacked(value)
        arguments = [self.values[argument] for argument in node.all_input_nodes]
        if all(isinstance(value, Node) for value in arguments) and not is_complex(node):
            return self._copy(node)
        if is_complex(node):
            _check_dtype(node)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: self.values[argument])
        if node.target is operator.getitem and isinstance(args[0], list):
            return args[0][args[1]]
        if args and isinstance(args[0], Interleaved):
            lowered = functions.lower_interleaved(self.writer, node, args[0], args)
            if lowered is not None:
                return lowered
        if not touches_complex(node):
            return self._copy(node)
        if node.target is _aten._assert_tensor_metadata.default:
            return self.values[node.args[0]]  # true by construction, and its result is not read
        if node.target not in RULES:
            raise unsupported(node)
        return RULES[node.target](self.writer, *args, **kwargs)

    def _copy(self, node: Node) -> Node:
        """Copies a real operator on real tensors."""
        writer = self.writer
        changed = False
        for argument in node.all_input_nodes:
            old_value, new_value = argument.meta.get("val"), writer.real(self.values[argument]).meta.get("val")
            changed |= isinstance(old_value, torch.Tensor) and old_value.stride() != new_value.stride()
        if changed and isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda argument: writer.real(self.values[argument])
            )
            return writer.call(moving.REPLACEMENTS.get(node.target, node.target), *args, **kwargs)
        return writer.graph.node_copy(node, lambda argument: writer.real(self.values[argument]))

    def _refuse_control_flow(self, node: Node) -> None:
        """Raises ComplexOperatorError if a node is the body of a loop or branch with calls on complex tensors."""
        body = getattr(self.program.graph_module, str(node.target), None)
        if isinstance(body, GraphModule):
            for inner in _all_nodes(body):
                if is_complex(inner) and inner.op == "call_function":
                    raise unsupported(inner, "on complex tensors inside control flow has no real form here")

    def _return(self, node: Node) -> None:
        """Adds the outputs; a complex one is [..., 2]."""
        writer = self.writer
        writer.source = None
        results: list[Any] = []
        for result, spec in zip(node.args[0], self.program.graph_signature.output_specs, strict=True):
            value = self.values[result] if isinstance(result, Node) else result
            if isinstance(value, Pair | Interleaved):
                value = writer.real(value)
            results.append(value)
            if isinstance(value, Node):
                spec = replace(spec, arg=_with_name(spec.arg, value.name))
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                spec = replace(spec, target=self.input_names[spec.target])
            self.output_specs.append(spec)
        writer.graph.output(tuple(results)).meta.update(
            val=tuple(result.meta.get("val") if isinstance(result, Node) else result for result in results)
        )

    def _assemble(self) -> ExportedProgram:
        program = self.program
        module = GraphModule(program.graph_module, self.writer.graph)
        module.meta.update(program.graph_module.meta)
        example = program.example_inputs
        return ExportedProgram(
            root=module,
            graph=module.graph,
            graph_signature=ExportGraphSignature(self.input_specs, self.output_specs),
            state_dict=_as_real(program.state_dict),
            range_constraints=program.range_constraints,
            module_call_graph=program.module_call_graph,
            example_inputs=None if example is None else pytree.tree_map(as_real, example),
            constants=_as_real(program.constants | self.folded),
            verifiers=program.verifiers,
        )


def _as_real(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters, buffers or constants by name, complex tensors as copies [..., 2]."""
    result = dict(tensors)
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor) and value.is_complex():
            result[name] = as_real(value.detach()).clone()
            if isinstance(value, torch.nn.Parameter):
                result[name] = torch.nn.Parameter(result[name], requires_grad=value.requires_grad)
    return result


def _check_dtype(node: Node) -> None:
    value = node.meta["val"]
    for part in value if isinstance(value, list | tuple) else [value]:
        if isinstance(part, torch.Tensor) and part.is_complex() and part.dtype not in PART_DTYPES:
            raise unsupported(node, f"makes a tensor of {part.dtype}, which is neither complex64 nor complex128")


def _with_name(argument: Any, name: str) -> Any:
    return replace(argument, name=name) if hasattr(argument, "name") else argument
