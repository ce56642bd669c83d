"""The calls of compiled functions that one run makes, what flows between them, and the nodes whose values that is.

It is read off the module as it stands before memory is planned, when every value still has a variable. The virtual
machine makes the same calls in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import tvm
from tvm import ir, relax, tirx

from harness.core.precision import HALF_DTYPES
from harness.schedules.common.graph import is_call
from harness.schedules.common.origins import LOAD, Role, Site, bindings_of, callee, sites_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.fx import Node

    Array = npt.NDArray[Any]

CALLS = ("relax.call_tir", "relax.call_dps_packed")
"""Operators that call a compiled function, which writes into memory that is given to it."""
_LAST_PASS = "RewriteDataflowReshape"
"""The last pass before calls write into memory: from here on, each of `CALLS` is a call of the virtual machine."""


@dataclass(frozen=True)
class KernelCall:
    """One call of a compiled function.

    Attributes:
        function: Its name.
        at_load: Whether it is made when the model is loaded.
        inputs: Numbers of the values that it reads, in the order of its parameters.
        outputs: Numbers of the values that it writes.
    """

    function: str
    at_load: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Flow:
    """The calls of a program, in order; a view of a value is the same value.

    Attributes:
        calls: Those at load first.
        nodes: The node whose value it is, by the number of a value: a placeholder, or what a call computes.
        constants: Values that are part of the code.
        results: Numbers of the values that the program returns.
        rounded: Nodes whose values the program keeps in a half type.
    """

    calls: tuple[KernelCall, ...]
    nodes: Mapping[int, str]
    constants: Mapping[int, Array]
    results: tuple[int, ...]
    rounded: frozenset[str] = frozenset()

    def sources(self, position: int) -> tuple[frozenset[str], tuple[int, ...]]:
        """Returns the nodes on which a call depends, and the calls between: those whose results are of no node."""
        nodes: set[str] = set()
        between: set[int] = set()
        waiting = list(self.calls[position].inputs)
        writers = {value: n for n, call in enumerate(self.calls[:position]) for value in call.outputs}
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self.nodes:
                nodes.add(self.nodes[value])
            elif value in writers:
                between.add(writers[value])
                waiting += self.calls[writers[value]].inputs
        return frozenset(nodes), tuple(sorted(between))

    def before(self, position: int) -> frozenset[str]:
        """Returns the nodes on which the calls depend that make the values of a call's `sources`, one step before."""
        makers = {self.nodes.get(value): n for n, call in enumerate(self.calls[:position]) for value in call.outputs}
        nodes, _ = self.sources(position)
        made = [self.sources(makers[node])[0] for node in nodes if node in makers]
        return frozenset(node for node in nodes if node not in makers).union(*made)

    def needed(self, value: int) -> frozenset[int]:
        """Returns the numbers of the calls on which a value depends."""
        values, found = {value}, set()
        for n, call in reversed(list(enumerate(self.calls))):
            if not values.isdisjoint(call.outputs):
                found.add(n)
                values.update(call.inputs)
        return frozenset(found)


@tvm.ir.instrument.pass_instrument
class BeforeMemory:
    """Keeps the module that a pipeline has made just before it plans memory; for `lower_module`.

    Attributes:
        module: That module.
    """

    module: tvm.IRModule

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        """Is called by TVM after each pass."""
        if str(info.name) == _LAST_PASS:
            self.module = module


def flow_of(
    calls: tvm.IRModule,
    lowered: tvm.IRModule,
    source: tvm.IRModule,
    holding: Mapping[str, str],
    known: Mapping[str, Node],
) -> Flow:
    """Reads the calls off a module, and says of which nodes their results are.

    Args:
        calls: What `BeforeMemory` kept.
        lowered: What the pipeline made of a tagged module.
        source: The imported module before it was tagged.
        holding: The variable that holds each node's value (`nodes_of`).
        known: The nodes whose values are known, by name. A node that a rewriting before the import has made is not
            among them.

    Raises:
        RuntimeError: The pipeline has lost track of the operators.
    """
    return _Reader(calls, sites_of(lowered), source, holding, known).flow()


class _Reader:
    def __init__(
        self,
        module: tvm.IRModule,
        sites: list[Site],
        source: tvm.IRModule,
        holding: Mapping[str, str],
        known: Mapping[str, Node],
    ) -> None:
        self.module = module
        self.sites = sites
        self.source = relax.transform.CanonicalizeBindings()(source)["main"]
        self.known = known
        self.calls: list[KernelCall] = []
        self.nodes: dict[int, str] = {}
        self.constants: dict[int, Array] = {}
        self.values: dict[Any, tuple[int, ...]] = {}
        self.types: list[Any] = []
        self.parts: set[int] = set()
        self.position = 0
        held: dict[str, list[str]] = {}
        for node, variable in holding.items():
            held.setdefault(variable, []).append(node)
        self.nodes_of_parameter = [held.get(parameter.name, []) for parameter in self.source.params]
        self.nodes_of_operator = {
            number: held.get(binding.var.name, []) for number, binding in enumerate(bindings_of(self.source))
        }
        self.last = {_result(site): n for n, site in enumerate(sites)}
        self.last |= {_result(site): n for n, site in enumerate(sites) if site.parts[-1:] and _is_kernel(site)}

    def flow(self) -> Flow:
        main = self.module["main"]
        inputs = int((main.attrs or {}).get("num_input", len(main.params)))
        given = [self._new(parameter.ty) for parameter in self.source.params]
        for value, nodes in zip(given, self.nodes_of_parameter, strict=True):
            self._name(value, nodes)
        if LOAD in {variable.name_hint for variable in self.module.get_global_vars()}:
            load = self.module[LOAD]
            self.values[load.params[0]] = tuple(given[inputs:])
            self._read(load, at_load=True)
            given[inputs:] = self.values[load.body.body]
        self.values |= {parameter: (value,) for parameter, value in zip(main.params, given, strict=True)}
        self._read(main, at_load=False)
        if self.position != len(self.sites):
            raise RuntimeError(f"{len(self.sites)} calls were noted and {self.position} are made")
        rounded = frozenset(node for n, node in self.nodes.items() if str(self.types[n].dtype) in HALF_DTYPES)
        return Flow(tuple(self.calls), self.nodes, self.constants, self._numbers(main.body.body), rounded)

    def _read(self, function: relax.Function, *, at_load: bool) -> None:
        for binding in bindings_of(function):
            if isinstance(binding.value, ir.Call):
                self._call(binding.var, binding.value, self.sites[self.position], at_load=at_load)
                self.position += 1
            else:
                self.values[binding.var] = self._numbers(binding.value)

    def _call(self, variable: relax.Var, call: ir.Call, site: Site, *, at_load: bool) -> None:
        if is_call(call, *CALLS):
            types = variable.ty.fields if isinstance(variable.ty, relax.TupleType) else [variable.ty]
            outputs = tuple(map(self._new, types))
            self.values[variable] = outputs
            if len(outputs) > 1:  # only a call with one result is compared: these are, with what reads them
                self.parts.update(outputs)
            self.calls.append(KernelCall(callee(call), at_load, self._numbers(call.args[1]), outputs))
        else:  # a view
            self.values[variable] = self._numbers(call.args[0])
        number, values = _result(site), self.values[variable]
        if self.last[number] == self.position and len(values) == 1 and values[0] not in self.parts:
            self._name(values[0], self.nodes_of_operator.get(number, []))

    def _numbers(self, value: Any) -> tuple[int, ...]:
        """Returns the numbers of the values of an expression, several for a tuple."""
        if isinstance(value, relax.Tuple):
            return tuple(number for part in value.fields for number in self._numbers(part))
        if isinstance(value, relax.TupleGetItem):
            return (self._numbers(value.tuple_value)[value.index],)
        if isinstance(value, ir.GenericConst):
            number = self._new(value.ty)
            self.constants[number] = value.value.numpy()
            return (number,)
        if isinstance(value, relax.Var) and not isinstance(value.ty, ir.PrimType):  # a symbolic extent is no value
            return self.values[value]
        return ()

    def _new(self, ty: Any) -> int:
        number = len(self.types)
        self.types.append(ty)
        return number

    def _name(self, value: int, names: Iterable[str]) -> None:
        """Says of which node this is the value: of the first that is known and has such values."""
        known = (self.known[name] for name in names if name in self.known)
        node = next((node for node in known if _holds(self.types[value], node.meta.get("val"))), None)
        if node is not None:
            self.nodes.setdefault(value, node.name)


def _result(site: Site) -> int:
    """Returns the operator whose result a call returns: all others that it computes or folds come before."""
    return max(site.parts[-1].operators, default=-1) if site.parts else -1


def _is_kernel(site: Site) -> bool:
    """Returns whether a kernel of this project computes the result; what follows it only moves that."""
    return site.parts[-1].role is Role.KERNEL


def _holds(ty: Any, value: Any) -> bool:
    """Returns whether a tensor of this type can be a node's value, in any shape.

    One of float32 may be in a half type, and a complex one is pairs.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(ty, relax.TensorType) or ty.shape is None:
        return False
    dtype = str(_PARTS.get(value.dtype, value.dtype)).removeprefix("torch.")
    rounded = dtype == "float32" and str(ty.dtype) in HALF_DTYPES
    if str(ty.dtype) != dtype and not rounded:
        return False
    if not all(isinstance(extent, tirx.IntImm) for extent in ty.shape):
        return True  # symbolic extents have no number to compare
    return math.prod(map(int, ty.shape)) == value.numel() * (2 if value.dtype in _PARTS else 1)


_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
