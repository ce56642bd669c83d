"""The part of an imported module that one kernel computes, cut out with PyTorch's values around it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.fx import GraphModule, Node
from tvm import ir, relax, tirx

from harness.diagnose.deviation import Deviation, deviation
from harness.diagnose.fault import Fault
from harness.diagnose.reference import Reference, array_of, region
from harness.schedules.common.origins import bindings_of

if TYPE_CHECKING:
    import numpy.typing as npt
    import tvm

    from harness.lowering.frontends.torch_export.graph import Graph

    Array = npt.NDArray[Any]

_FEW = 16
"""Operators up to which leaving out each number of them is tried."""


@dataclass(frozen=True)
class Piece:
    """The operators between some nodes and another.

    Attributes:
        module: Its `main` takes the values of some nodes, then weights, and returns a tuple of one tensor.
        names: The nodes whose values its parameters are; of what only says a symbolic extent, the name of that.
        arguments: These values, PyTorch's own.
        sources: Names of the nodes that it is computed from; placeholders need not be among them.
        torch_value: PyTorch's value of the result.
        exact: The float64 value that follows from the same arguments.
        extents: The numbers that symbolic extents stand for, by name.
    """

    module: tvm.IRModule
    names: tuple[str, ...]
    arguments: tuple[Array, ...]
    sources: frozenset[str]
    torch_value: Array
    exact: Array
    extents: Mapping[str, int]

    @property
    def inputs(self) -> int:
        """How many of the parameters are no weights."""
        return int(self.module["main"].attrs["num_input"])

    @property
    def operators(self) -> int:
        """The number of Relax operators."""
        return sum(not isinstance(binding.value, relax.Tuple) for binding in bindings_of(self.module["main"]))

    def judged(self, output: Array) -> Deviation:
        """Returns the error of a result."""
        return deviation(output.reshape(self.torch_value.shape), self.torch_value, self.exact)

    def fault(self, output: Array) -> Fault | None:
        """Returns what is wrong with a result; None if its error is within the limits."""
        output = output.reshape(self.torch_value.shape)
        return Fault.of(self.judged(output), output, self.torch_value, self.exact)


class Pieces:
    """Cuts the operators between some nodes and one other out of an imported module, from several places on."""

    def __init__(
        self,
        module: tvm.IRModule,
        holding: Mapping[str, str],
        graph: Graph,
        inputs: Sequence[torch.Tensor],
        node: str,
        sources: Iterable[str],
    ) -> None:
        """Computes nothing yet.

        Args:
            module: As imported.
            holding: The variable that holds each node's value (`nodes_of`).
            graph: The nodes.
            inputs: The program's inputs.
            node: Name of the node to compute.
            sources: Names of the nodes to compute it from.
        """
        self.node = node
        self.sources = frozenset(sources) - {node}
        self._graph = graph
        self._holding = holding
        self._node_of = {
            variable: name
            for name, variable in reversed(list(holding.items()))
            if name in graph.nodes and isinstance(graph.nodes[name].meta.get("val"), torch.Tensor)
        }
        self._module = module
        self._main = relax.transform.CanonicalizeBindings()(module)["main"]
        self._bound = {binding.var.name: binding for binding in bindings_of(self._main)}
        self._extents = _extents(self._main, inputs)
        self._weights = {parameter.name for parameter in self._main.params[int(self._main.attrs["num_input"]) :]}
        read = {name for part in self.nodes for name in (part.name, *(other.name for other in part.all_input_nodes))}
        self._reference = Reference(graph, inputs, [*self.sources, *read, node], [])

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes that are computed, in order."""
        return region(self._graph.nodes[self.node], [self._graph.nodes[name] for name in self.sources])

    @cached_property
    def _fixed(self) -> frozenset[str]:
        """Names of the nodes that depend on weights alone."""
        fixed = set(self._graph.weights)
        for node in self._graph.nodes.values():
            if node.op == "call_function" and all(part.name in fixed for part in node.all_input_nodes):
                fixed.add(node.name)
        return frozenset(fixed)

    def cut(self, sources: Iterable[str] | None = None) -> Piece:
        """Cuts the operators out.

        Args:
            sources: Names of nodes to compute it from, nearer to the result than those of all pieces.
        """
        limits = self.sources if sources is None else frozenset(sources) - {self.node}
        result = self._bound[self._holding[self.node]].var
        stops = {self._holding[name] for name in limits if name in self._holding}
        kept: set[str] = set()
        read: dict[str, relax.Var] = {}
        waiting: list[relax.Var] = [result]
        while waiting:
            variable = waiting.pop()
            if variable.name in self._bound and variable.name not in stops:
                if variable.name not in kept:
                    kept.add(variable.name)
                    waiting.extend(values_read(self._bound[variable.name].value))
            else:
                read[variable.name] = variable
        weights = {name for name in read if name in self._weights or self._node_of[name] in self._fixed}
        if len(weights) == len(read):  # nothing would be left to do with every input
            weights = set()
        parameters = sorted(read.values(), key=lambda variable: variable.name in weights)
        bindings = [binding for name, binding in self._bound.items() if name in kept]
        unsaid = unsaid_extents(bindings, parameters)
        names = tuple(self._node_of[variable.name] for variable in parameters)
        values = [array_of(self._reference.own(name)) for name in names]
        return Piece(
            module_of(self._module, bindings, result, [*unsaid, *parameters], weights),
            (*(extent.name for extent in unsaid), *names),
            (
                *(np.zeros(self._extents[extent.name], np.uint8) for extent in unsaid),
                *(value.reshape(_shape(variable)) for value, variable in zip(values, parameters, strict=True)),
            ),
            limits,
            array_of(self._reference.own(self.node)),
            array_of(self._reference.locally_exact(self.node, limits)),
            self._extents,
        )

    def shorter(self) -> list[frozenset[str]]:
        """Returns sources for `cut` that leave out leading operators: most of them first, and none last.

        Of many operators, the number that is left doubles.
        """
        named = [
            part.name in self._holding and part.name not in self._fixed and isinstance(part.meta["val"], torch.Tensor)
            for part in self.nodes
        ]
        count = len(self.nodes)
        left = range(1, count) if count <= _FEW else (2**n for n in range(count.bit_length()))
        nearer = [
            self.sources | {part.name for part, known in zip(self.nodes[:end], named, strict=False) if known}
            for end in (count - n for n in left if n < count)
        ]
        return [*dict.fromkeys(nearer), self.sources]

    def program(self, sources: Collection[str]) -> tuple[GraphModule, dict[str, torch.Tensor]]:
        """Returns the nodes of a piece as a module of PyTorch, and the values that it takes, by name and in order."""
        parts = region(self._graph.nodes[self.node], [self._graph.nodes[name] for name in sources])
        own = set(parts)
        graph = torch.fx.Graph()
        outside = dict.fromkeys(read for part in parts for read in part.all_input_nodes if read not in own)
        copies: dict[Node, Node] = {}
        for node in outside:
            copies[node] = graph.placeholder(node.name)
        for part in parts:
            copies[part] = graph.node_copy(part, copies.__getitem__)
        graph.output((copies[parts[-1]],))
        return GraphModule(torch.nn.Module(), graph), {node.name: self._reference.own(node.name) for node in outside}


def module_of(
    module: tvm.IRModule,
    bindings: Sequence[relax.VarBinding],
    result: relax.Var,
    parameters: Sequence[relax.Var],
    weights: Collection[str],
) -> tvm.IRModule:
    """Returns the module with another `main`: bindings of its own, whose free variables are parameters.

    Args:
        module: Where functions that are called are from.
        bindings: What it computes, in order.
        result: What it returns, in a tuple.
        parameters: The free variables, weights last.
        weights: Names of those that are weights.
    """
    given = [relax.Var(variable.name, variable.ty) for variable in parameters]
    single = result if isinstance(result.ty, relax.TupleType) else relax.Tuple([result])
    output = relax.Var("outputs", single.ty if isinstance(single, relax.Var) else relax.TupleType([result.ty]))
    block = relax.DataflowBlock(
        [
            *(relax.VarBinding(variable, new) for variable, new in zip(parameters, given, strict=True)),
            *bindings,
            relax.VarBinding(output, single),
        ]
    )
    function = relax.Function(given, relax.SeqExpr([block], output), output.ty).with_attr("global_symbol", "main")
    cut = module.clone()
    cut["main"] = function.with_attr("num_input", sum(variable.name not in weights for variable in parameters))
    return relax.transform.CanonicalizeBindings()(cut)


def values_read(expression: Any) -> list[relax.Var]:
    """Returns the variables that an expression reads; a symbolic extent is none."""
    return [variable for variable in relax.analysis.free_vars(expression) if not isinstance(variable.ty, ir.PrimType)]


def unsaid_extents(bindings: Iterable[relax.VarBinding], parameters: Iterable[relax.Var]) -> list[relax.Var]:
    """Returns parameters that say by their shapes what symbolic extents are that no other parameter says.

    They are vectors of bytes, which nothing reads, named after the extents.
    """
    said = {extent for parameter in parameters for extent in parameter.ty.shape if isinstance(extent, tirx.Var)}
    read = (variable for binding in bindings for variable in relax.analysis.free_vars(binding.value))
    unsaid = [extent for extent in dict.fromkeys(read) if isinstance(extent.ty, ir.PrimType) and extent not in said]
    return [relax.Var(extent.name, relax.TensorType([extent], "uint8")) for extent in unsaid]


def _extents(main: relax.Function, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Returns the numbers that the symbolic extents of a function's inputs stand for, by name."""
    return {
        extent.name: size
        for parameter, value in zip(main.params, inputs, strict=False)
        for extent, size in zip(parameter.ty.shape, value.shape, strict=True)
        if isinstance(extent, tirx.Var)
    }


def without_weights(module: tvm.IRModule) -> tvm.IRModule:
    """Returns the module with weights as ordinary inputs."""
    changed = module.clone()
    changed["main"] = module["main"].without_attr("num_input")
    return changed


def _shape(variable: relax.Var) -> tuple[int, ...]:
    """Returns the shape for NumPy, with -1 for a symbolic extent, which follows from the size of a value."""
    return tuple(int(extent) if isinstance(extent, tirx.IntImm) else -1 for extent in variable.ty.shape)
