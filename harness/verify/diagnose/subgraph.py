"""Extracts the part of an imported module that one kernel computes, and reduces it while its fault stays the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import tvm
from torch.fx import GraphModule, Node
from tvm import ir, relax, tirx

from harness.compiler.lowering.frontends.torch_export.importing import nodes_of
from harness.compiler.lowering.frontends.torch_export.lifting import Graph
from harness.compiler.schedules.common.graph import is_call
from harness.compiler.schedules.common.origins import bindings_of
from harness.core.program import Array
from harness.verify.diagnose.deviation import Deviation, Fault, deviation
from harness.verify.diagnose.reference import NodeValues, array_of, region

_EXHAUSTIVE_LIMIT = 16
"""Number of operators up to which leaving out every number of them is tried."""


@dataclass(frozen=True)
class Subgraph:
    """The operators between some nodes and one other node.

    Attributes:
        module: Module whose `main` takes the values of some nodes, then weights, and returns a tuple of one tensor.
        names: Names of the nodes whose values are its parameters; for a parameter that only gives a symbolic extent,
            the extent's name.
        arguments: Values of the parameters, which are PyTorch's.
        sources: Names of the nodes that the result is computed from; placeholders may be missing.
        torch_value: PyTorch's value of the result.
        exact: The float64 value that follows from the same arguments.
        extents: Values of the symbolic extents, by name.
    """

    module: tvm.IRModule
    names: tuple[str, ...]
    arguments: tuple[Array, ...]
    sources: frozenset[str]
    torch_value: Array
    exact: Array
    extents: Mapping[str, int]

    @property
    def num_inputs(self) -> int:
        """Number of parameters that are not weights."""
        return int(self.module["main"].attrs["num_input"])

    def deviation(self, output: Array) -> Deviation:
        """Returns the error of a result."""
        return deviation(output.reshape(self.torch_value.shape), self.torch_value, self.exact)

    def fault(self, output: Array) -> Fault | None:
        """Returns the fault of a result; None if its error is within the limits."""
        output = output.reshape(self.torch_value.shape)
        return Fault.from_value(self.deviation(output), output, self.torch_value, self.exact)


@dataclass(frozen=True)
class ImportedProgram:
    """An imported program.

    Attributes:
        module: The imported module.
        graph: Nodes of the program.
        inputs: Inputs of the program.
    """

    module: tvm.IRModule
    graph: Graph
    inputs: Sequence[torch.Tensor]

    @cached_property
    def variable_of(self) -> dict[str, str]:
        """The variable of each node's value."""
        return nodes_of(self.module)


class SubgraphExtractor:
    """Extracts the operators between some nodes and one other node from an imported program."""

    def __init__(self, program: ImportedProgram, node: str, sources: Iterable[str]) -> None:
        """Computes no value yet.

        Args:
            program: The imported program.
            node: Name of the node to compute.
            sources: Names of the nodes that it is computed from.
        """
        self.node = node
        self.sources = frozenset(sources) - {node}
        self._graph = graph = program.graph
        self._variable_of = program.variable_of
        self._node_of = {
            variable: name
            for name, variable in reversed(list(program.variable_of.items()))
            if name in graph.nodes and isinstance(graph.nodes[name].meta.get("val"), torch.Tensor)
        }
        self._module = program.module
        self._main = relax.transform.CanonicalizeBindings()(program.module)["main"]
        self._bindings = {binding.var.name: binding for binding in bindings_of(self._main)}
        self._symbolic_extents = _symbolic_extents(self._main, program.inputs)
        self._weights = {parameter.name for parameter in self._main.params[int(self._main.attrs["num_input"]) :]}
        read = {
            name for inner in self.nodes for name in (inner.name, *(operand.name for operand in inner.all_input_nodes))
        }
        self._reference = NodeValues(graph, program.inputs, [*self.sources, *read, node], [])

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes that are computed, in order."""
        return region(self._graph.nodes[self.node], [self._graph.nodes[name] for name in self.sources])

    @cached_property
    def _weight_nodes(self) -> frozenset[str]:
        """Names of the nodes that depend on weights alone."""
        weight_nodes = set(self._graph.weights)
        for node in self._graph.nodes.values():
            if node.op == "call_function" and all(operand.name in weight_nodes for operand in node.all_input_nodes):
                weight_nodes.add(node.name)
        return frozenset(weight_nodes)

    def extract(self, sources: Iterable[str] | None = None) -> Subgraph:
        """Extracts the operators.

        Args:
            sources: Names of nodes to compute the result from, nearer to it than the extractor's sources.
        """
        limits = self.sources if sources is None else frozenset(sources) - {self.node}
        result = self._bindings[self._variable_of[self.node]].var
        stops = {self._variable_of[name] for name in limits if name in self._variable_of}
        included: set[str] = set()
        read: dict[str, relax.Var] = {}
        pending: list[relax.Var] = [result]
        while pending:
            variable = pending.pop()
            if variable.name in self._bindings and variable.name not in stops:
                if variable.name not in included:
                    included.add(variable.name)
                    pending.extend(read_variables(self._bindings[variable.name].value))
            else:
                read[variable.name] = variable
        weights = {name for name in read if name in self._weights or self._node_of[name] in self._weight_nodes}
        if len(weights) == len(read):  # otherwise everything would be computed at load
            weights = set()
        parameters = sorted(read.values(), key=lambda variable: variable.name in weights)
        bindings = [binding for name, binding in self._bindings.items() if name in included]
        free = free_extents(bindings, parameters)
        names = tuple(self._node_of[variable.name] for variable in parameters)
        values = [array_of(self._reference.torch_value(name)) for name in names]
        return Subgraph(
            replace_main(self._module, bindings, result, [*free, *parameters], weights),
            (*(extent.name for extent in free), *names),
            (
                *(np.zeros(self._symbolic_extents[extent.name], np.uint8) for extent in free),
                *(value.reshape(_shape(variable)) for value, variable in zip(values, parameters, strict=True)),
            ),
            limits,
            array_of(self._reference.torch_value(self.node)),
            array_of(self._reference.locally_exact_value(self.node, limits)),
            self._symbolic_extents,
        )

    def smaller_sources(self) -> list[frozenset[str]]:
        """Returns sources for `extract` that leave out leading operators: most of them first, none of them last.

        For many operators, the number of remaining operators doubles each time.
        """
        is_source = [
            inner.name in self._variable_of
            and inner.name not in self._weight_nodes
            and isinstance(inner.meta["val"], torch.Tensor)
            for inner in self.nodes
        ]
        count = len(self.nodes)
        remaining = range(1, count) if count <= _EXHAUSTIVE_LIMIT else (2**n for n in range(count.bit_length()))
        nearer = [
            self.sources | {inner.name for inner, usable in zip(self.nodes[:end], is_source, strict=False) if usable}
            for end in (count - n for n in remaining if n < count)
        ]
        return [*dict.fromkeys(nearer), self.sources]

    def torch_module(self, sources: Collection[str]) -> tuple[GraphModule, dict[str, torch.Tensor]]:
        """Returns the nodes as a PyTorch module, and its inputs by name, in order."""
        calls = region(self._graph.nodes[self.node], [self._graph.nodes[name] for name in sources])
        inner_nodes = set(calls)
        graph = torch.fx.Graph()
        external = dict.fromkeys(read for call in calls for read in call.all_input_nodes if read not in inner_nodes)
        copies = {node: graph.placeholder(node.name) for node in external}
        for call in calls:
            copies[call] = graph.node_copy(call, copies.__getitem__)
        graph.output((copies[calls[-1]],))
        values = {node.name: self._reference.torch_value(node.name) for node in external}
        return GraphModule(torch.nn.Module(), graph), values


def replace_main(
    module: tvm.IRModule,
    bindings: Sequence[relax.VarBinding],
    result: relax.Var,
    parameters: Sequence[relax.Var],
    weights: Collection[str],
) -> tvm.IRModule:
    """Returns the module with another `main` of some bindings, whose free variables become parameters.

    Args:
        module: Module with the called functions.
        bindings: Bindings of the function, in order.
        result: Result of the function, returned in a tuple.
        parameters: The free variables, weights last.
        weights: Names of the free variables that are weights.
    """
    new_parameters = [relax.Var(variable.name, variable.ty) for variable in parameters]
    single = result if isinstance(result.ty, relax.TupleType) else relax.Tuple([result])
    output = relax.Var("outputs", single.ty if isinstance(single, relax.Var) else relax.TupleType([result.ty]))
    block = relax.DataflowBlock(
        [
            *(relax.VarBinding(variable, new) for variable, new in zip(parameters, new_parameters, strict=True)),
            *bindings,
            relax.VarBinding(output, single),
        ]
    )
    function = relax.Function(new_parameters, relax.SeqExpr([block], output), output.ty)
    num_inputs = sum(variable.name not in weights for variable in parameters)
    new_module = module.clone()
    new_module["main"] = function.with_attr({"global_symbol": "main", "num_input": num_inputs})
    return relax.transform.CanonicalizeBindings()(new_module)


def read_variables(expression: Any) -> list[relax.Var]:
    """Returns the variables that an expression reads, without symbolic extents."""
    return [variable for variable in relax.analysis.free_vars(expression) if not isinstance(variable.ty, ir.PrimType)]


def free_extents(bindings: Iterable[relax.VarBinding], parameters: Iterable[relax.Var]) -> list[relax.Var]:
    """Returns extra parameters whose shapes give the symbolic extents that no other parameter gives.

    They are vectors of bytes that nothing reads, with the names of the extents.
    """
    bound = {extent for parameter in parameters for extent in parameter.ty.shape if isinstance(extent, tirx.Var)}
    read = (variable for binding in bindings for variable in relax.analysis.free_vars(binding.value))
    free = [extent for extent in dict.fromkeys(read) if isinstance(extent.ty, ir.PrimType) and extent not in bound]
    return [relax.Var(extent.name, relax.TensorType([extent], "uint8")) for extent in free]


def _symbolic_extents(main: relax.Function, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Returns the values of the symbolic extents of a function's inputs, by name."""
    return {
        extent.name: size
        for parameter, value in zip(main.params, inputs, strict=False)
        for extent, size in zip(parameter.ty.shape, value.shape, strict=True)
        if isinstance(extent, tirx.Var)
    }


def weights_to_inputs(module: tvm.IRModule) -> tvm.IRModule:
    """Returns the module with weights as ordinary inputs."""
    new_module = module.clone()
    new_module["main"] = module["main"].without_attr("num_input")
    return new_module


def _shape(variable: relax.Var) -> tuple[int, ...]:
    """Returns the shape for NumPy, with -1 for a symbolic extent, which follows from the size of a value."""
    return tuple(int(extent) if isinstance(extent, tirx.IntImm) else -1 for extent in variable.ty.shape)


RunSubgraph = Callable[[Subgraph], Array]
"""Compiles a subgraph, and returns its result."""


@dataclass(frozen=True)
class ReducedSubgraph:
    """A subgraph that shows a fault, while no smaller one that was tried does.

    Attributes:
        subgraph: The subgraph.
        fault: Fault of its result.
        halvings: Number of times that an extent was halved.
    """

    subgraph: Subgraph
    fault: Fault
    halvings: int = 0


def reduce_subgraph(
    extractor: SubgraphExtractor, fault: Fault, result: RunSubgraph, correct_result: RunSubgraph | None
) -> ReducedSubgraph | None:
    """Returns the smallest subgraph that shows a fault; None if none does.

    A subgraph shows the fault if its result is wrong in the same way and at the same elements (`Fault.same`). A
    subgraph that cannot be compiled, or is wrong in another way, does not show it.

    Args:
        extractor: Extracts subgraphs of the program, all with one result.
        fault: Fault of this result in the program.
        result: Compiles a subgraph in the way that is wrong.
        correct_result: Compiles it in a way that is right, to tell whether fewer rows are still rows of the same
            result. If there is none (None), the wrong result must stay the same.
    """
    for sources in extractor.smaller_sources():
        try:
            subgraph = extractor.extract(sources)
            actual = result(subgraph)
        except Exception:  # a subgraph that cannot be compiled is skipped
            continue
        if fault.same(subgraph.fault(actual)):
            return _reduce_extents(ReducedSubgraph(subgraph, fault), actual, result, correct_result)
    return None


def _reduce_extents(
    subgraph: ReducedSubgraph, actual: Array, result: RunSubgraph, correct_result: RunSubgraph | None
) -> ReducedSubgraph:
    """Halves extents, the first axes first, as long as the fault stays."""
    smallest = subgraph
    while True:
        for half, slices in _halved_subgraphs(smallest.subgraph):
            expected = smallest.fault.part(slices)
            try:
                output = result(half).reshape(half.torch_value.shape)
                if correct_result is None:  # the wrong result must be the same up to rounding
                    part = actual.reshape(smallest.subgraph.torch_value.shape)[slices]
                    is_part = not deviation(output, part, part).is_fault
                else:
                    is_part = not half.deviation(correct_result(half)).is_fault
            except Exception:  # shapes that do not fit are skipped
                continue
            if is_part and expected.same(half.fault(output)):
                smallest, actual = ReducedSubgraph(half, expected, smallest.halvings + 1), output
                break
        else:
            return smallest


def _halved_subgraphs(subgraph: Subgraph) -> Iterator[tuple[Subgraph, tuple[slice, ...]]]:
    """Yields the subgraph with half of one extent of its result, except the last axis, and that part of the result.

    The halved subgraph may or may not compute this part.
    """
    shape = subgraph.torch_value.shape
    if any(is_call(binding.value, "relax.call_tir") for binding in bindings_of(subgraph.module["main"])):
        return  # loops contain extents too
    for extent in dict.fromkeys(shape[:-1] or shape):
        if not extent or extent % 2:
            continue
        for flattened in (False, True):
            halve = _Halving(extent, flattened)
            try:
                module = halve.module(subgraph)
            except Exception:  # TVM refuses shapes that do not fit
                continue
            inputs = (array[halve.slices(array.shape)] for array in subgraph.arguments[: subgraph.num_inputs])
            arguments = (*inputs, *subgraph.arguments[subgraph.num_inputs :])
            slices = halve.slices(shape)
            torch_value, exact = subgraph.torch_value[slices], subgraph.exact[slices]
            half = replace(subgraph, module=module, arguments=arguments, torch_value=torch_value, exact=exact)
            yield half, slices


@dataclass(frozen=True)
class _Halving:
    """Takes the first half of an extent, wherever it occurs.

    Attributes:
        extent: The extent, even.
        flattened: Whether multiples of the extent are halved too, for axes that were joined.
    """

    extent: int
    flattened: bool

    def module(self, subgraph: Subgraph) -> tvm.IRModule:
        """Returns the module with halved inputs and halved shapes in its operators.

        Raises:
            Exception: TVM raised it because shapes do not fit.
        """
        main = subgraph.module["main"]
        inputs = [
            relax.Var(parameter.name, relax.TensorType(self._shape(parameter.ty.shape), str(parameter.ty.dtype)))
            for parameter in main.params[: subgraph.num_inputs]
        ]
        parameters = [*inputs, *main.params[subgraph.num_inputs :]]
        replacements: dict[relax.Var, Any] = dict(zip(main.params, parameters, strict=True))
        builder = relax.BlockBuilder()
        with builder.function("main", parameters):
            with builder.dataflow():
                *bindings, last = bindings_of(main)
                for binding in bindings:
                    replacements[binding.var] = builder.emit(self._expression(binding.value, replacements))
                output = builder.emit_output(self._expression(last.value, replacements))
            builder.emit_func_output(output)
        halved = subgraph.module.clone()
        halved["main"] = builder.get()["main"].with_attr("num_input", subgraph.num_inputs)
        return halved

    def slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Returns the remaining part of a tensor."""
        return tuple(slice(0, self._halve(extent)) for extent in shape)

    def _halve(self, extent: int) -> int:
        multiple = extent > 0 and extent % self.extent == 0
        return extent // 2 if extent == self.extent or (self.flattened and multiple) else extent

    def _shape(self, shape: Any) -> list[int]:
        if not all(isinstance(extent, tirx.IntImm) for extent in shape):
            raise ValueError("symbolic extents have no half")
        return [self._halve(int(extent)) for extent in shape]

    def _expression(self, value: Any, replacements: dict[relax.Var, Any]) -> Any:
        if isinstance(value, relax.Var):
            return replacements.get(value, value)
        if isinstance(value, relax.ShapeExpr):
            return relax.ShapeExpr(self._shape(value.values))
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._expression(member, replacements) for member in value.fields])
        if isinstance(value, relax.TupleGetItem):
            return relax.TupleGetItem(self._expression(value.tuple_value, replacements), value.index)
        if isinstance(value, ir.Call):
            arguments = [self._expression(argument, replacements) for argument in value.args]
            return ir.Call(value.op, arguments, value.attrs, value.ty_args)
        return value
