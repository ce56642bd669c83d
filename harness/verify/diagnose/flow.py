"""Reads the calls of compiled functions in one run, the values between them, and the nodes that these values belong to.

The calls are read from the module before memory is planned, when every value still has a variable. The virtual machine
makes the same calls in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from torch.fx import Node
from tvm import ir, relax, tirx

from harness.compiler.schedules.common.graph import is_call
from harness.compiler.schedules.common.origins import LOAD, Role, Site, bindings_of, callee, sites_of
from harness.core.precision import HALF_DTYPES
from harness.core.program import Array

CALLS = ("relax.call_tir", "relax.call_dps_packed")
"""Operators that call a compiled function, which writes into memory that is passed to it."""
_LAST_PASS = "RewriteDataflowReshape"
"""The last pass before calls write into memory: after it, each of `CALLS` is a call of the virtual machine."""


@dataclass(frozen=True)
class KernelCall:
    """One call of a compiled function.

    Attributes:
        function: Name of the function.
        at_load: Whether the call is made when the model is loaded.
        inputs: Indices of the values that the call reads, in the order of its parameters.
        outputs: Indices of the values that the call writes.
    """

    function: str
    at_load: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Flow:
    """The calls of a program, in order; a view of a value counts as the same value.

    Attributes:
        calls: The calls, those at load first.
        nodes: By index of a value, the node whose value it is: a placeholder, or a node that a call computes.
        constants: Values that are part of the code, by index.
        results: Indices of the values that the program returns.
        rounded: Nodes whose values the program stores in a half type.
    """

    calls: tuple[KernelCall, ...]
    nodes: Mapping[int, str]
    constants: Mapping[int, Array]
    results: tuple[int, ...]
    rounded: frozenset[str] = frozenset()

    def sources(self, position: int) -> tuple[frozenset[str], tuple[int, ...]]:
        """Returns the nodes on which a call depends, and the calls between them whose results belong to no node."""
        nodes: set[str] = set()
        between: set[int] = set()
        pending = list(self.calls[position].inputs)
        writers = {value: n for n, call in enumerate(self.calls[:position]) for value in call.outputs}
        visited: set[int] = set()
        while pending:
            value = pending.pop()
            if value in visited:
                continue
            visited.add(value)
            if value in self.nodes:
                nodes.add(self.nodes[value])
            elif value in writers:
                between.add(writers[value])
                pending += self.calls[writers[value]].inputs
        return frozenset(nodes), tuple(sorted(between))

    def earlier_sources(self, position: int) -> frozenset[str]:
        """Returns the nodes on which the calls depend that compute a call's `sources`: one step earlier."""
        makers = {self.nodes.get(value): n for n, call in enumerate(self.calls[:position]) for value in call.outputs}
        nodes, _ = self.sources(position)
        sources = [self.sources(makers[node])[0] for node in nodes if node in makers]
        return frozenset(node for node in nodes if node not in makers).union(*sources)

    def needed_calls(self, value: int) -> frozenset[int]:
        """Returns the positions of the calls on which a value depends."""
        values, positions = {value}, set()
        for n, call in reversed(list(enumerate(self.calls))):
            if not values.isdisjoint(call.outputs):
                positions.add(n)
                values.update(call.inputs)
        return frozenset(positions)


@tvm.ir.instrument.pass_instrument
class ModuleBeforeMemoryPlanning:
    """Keeps the module of a pipeline just before memory planning; an instrument for `lower_module`.

    Attributes:
        module: The module.
    """

    module: tvm.IRModule

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        """Stores the module after the last pass before memory planning; TVM calls it after each pass."""
        if str(info.name) == _LAST_PASS:
            self.module = module


class FlowReader:
    """Reads a module binding by binding, and numbers the values that calls read and write."""

    def __init__(
        self,
        calls: tvm.IRModule,
        lowered: tvm.IRModule,
        source: tvm.IRModule,
        variable_of: Mapping[str, str],
        known_nodes: Mapping[str, Node],
    ) -> None:
        """Reads nothing yet.

        Args:
            calls: The module that `ModuleBeforeMemoryPlanning` kept.
            lowered: The lowered tagged module.
            source: The imported module before it was tagged.
            variable_of: The variable of each node's value (`nodes_of`).
            known_nodes: Nodes with known values, by name, without nodes that a rewriting before the import has created.
        """
        self.module = calls
        self.sites = sites = sites_of(lowered)
        self.source = relax.transform.CanonicalizeBindings()(source)["main"]
        self.known_nodes = known_nodes
        self.calls: list[KernelCall] = []
        self.nodes: dict[int, str] = {}
        self.constants: dict[int, Array] = {}
        self.values: dict[Any, tuple[int, ...]] = {}
        self.types: list[Any] = []
        self.parts: set[int] = set()
        self.position = 0
        nodes_by_variable: dict[str, list[str]] = {}
        for node, variable in variable_of.items():
            nodes_by_variable.setdefault(variable, []).append(node)
        self.nodes_of_parameter = [nodes_by_variable.get(parameter.name, []) for parameter in self.source.params]
        self.nodes_of_operator = {
            number: nodes_by_variable.get(binding.var.name, [])
            for number, binding in enumerate(bindings_of(self.source))
        }
        self.last_position = {_result_operator(site): n for n, site in enumerate(sites)}
        self.last_position |= {
            _result_operator(site): n  # if a kernel computes the result, later operators only move it
            for n, site in enumerate(sites)
            if site.parts and site.parts[-1].role is Role.KERNEL
        }

    def flow(self) -> Flow:
        """Reads the calls, with the nodes that their results belong to.

        Raises:
            RuntimeError: The pipeline has lost track of the operators.
        """
        main = self.module["main"]
        inputs = int((main.attrs or {}).get("num_input", len(main.params)))
        parameter_values = [self._new_value(parameter.ty) for parameter in self.source.params]
        for value, nodes in zip(parameter_values, self.nodes_of_parameter, strict=True):
            self._assign_node(value, nodes)
        if LOAD in {variable.name_hint for variable in self.module.get_global_vars()}:
            load = self.module[LOAD]
            self.values[load.params[0]] = tuple(parameter_values[inputs:])
            self._read(load, at_load=True)
            parameter_values[inputs:] = self.values[load.body.body]
        self.values |= {parameter: (value,) for parameter, value in zip(main.params, parameter_values, strict=True)}
        self._read(main, at_load=False)
        if self.position != len(self.sites):
            raise RuntimeError(f"{len(self.sites)} calls were noted and {self.position} are made")
        rounded = frozenset(node for n, node in self.nodes.items() if str(self.types[n].dtype) in HALF_DTYPES)
        return Flow(tuple(self.calls), self.nodes, self.constants, self._indices(main.body.body), rounded)

    def _read(self, function: relax.Function, *, at_load: bool) -> None:
        for binding in bindings_of(function):
            if isinstance(binding.value, ir.Call):
                self._read_call(binding.var, binding.value, self.sites[self.position], at_load=at_load)
                self.position += 1
            else:
                self.values[binding.var] = self._indices(binding.value)

    def _read_call(self, variable: relax.Var, call: ir.Call, site: Site, *, at_load: bool) -> None:
        """Reads a call of a compiled function, or a view; the last call of an operator may have a node's value."""
        if is_call(call, *CALLS):
            types = variable.ty.fields if isinstance(variable.ty, relax.TupleType) else [variable.ty]
            outputs = tuple(map(self._new_value, types))
            self.values[variable] = outputs
            if len(outputs) > 1:  # only calls with one result are compared; these are compared with their readers
                self.parts.update(outputs)
            self.calls.append(KernelCall(callee(call), at_load, self._indices(call.args[1]), outputs))
        else:  # a view
            self.values[variable] = self._indices(call.args[0])
        number, values = _result_operator(site), self.values[variable]
        if self.last_position[number] == self.position and len(values) == 1 and values[0] not in self.parts:
            self._assign_node(values[0], self.nodes_of_operator.get(number, []))

    def _indices(self, value: Any) -> tuple[int, ...]:
        """Returns the indices of the values of an expression, several for a tuple."""
        if isinstance(value, relax.Tuple):
            return tuple(index for member in value.fields for index in self._indices(member))
        if isinstance(value, relax.TupleGetItem):
            return (self._indices(value.tuple_value)[value.index],)
        if isinstance(value, ir.GenericConst):
            index = self._new_value(value.ty)
            self.constants[index] = value.value.numpy()
            return (index,)
        if isinstance(value, relax.Var) and not isinstance(value.ty, ir.PrimType):  # a symbolic extent is no value
            return self.values[value]
        return ()

    def _new_value(self, ty: Any) -> int:
        number = len(self.types)
        self.types.append(ty)
        return number

    def _assign_node(self, value: int, names: Iterable[str]) -> None:
        """Assigns a value to the first known node that can have such values."""
        candidates = (self.known_nodes[name] for name in names if name in self.known_nodes)
        node = next((node for node in candidates if _can_hold(self.types[value], node.meta.get("val"))), None)
        if node is not None:
            self.nodes.setdefault(value, node.name)


def _result_operator(site: Site) -> int:
    """Returns the operator whose result a call returns: all other operators of the call come before."""
    return max(site.parts[-1].operators, default=-1) if site.parts else -1


def _can_hold(ty: Any, value: Any) -> bool:
    """Returns whether a tensor of this type can be a node's value, in any shape.

    A float32 node may be stored in a half type, and a complex node as pairs.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(ty, relax.TensorType) or ty.shape is None:
        return False
    dtype = str(_COMPONENT_DTYPES.get(value.dtype, value.dtype)).removeprefix("torch.")
    rounded = dtype == "float32" and str(ty.dtype) in HALF_DTYPES
    if str(ty.dtype) != dtype and not rounded:
        return False
    if not all(isinstance(extent, tirx.IntImm) for extent in ty.shape):
        return True  # symbolic extents have no number to compare
    return math.prod(map(int, ty.shape)) == value.numel() * (2 if value.dtype in _COMPONENT_DTYPES else 1)


_COMPONENT_DTYPES = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def tensor_positions(arguments: tuple[Any, ...]) -> list[int]:
    """Returns the positions of the tensors among a compiled function's arguments."""
    return [n for n, argument in enumerate(arguments) if hasattr(argument, "dtype")]
