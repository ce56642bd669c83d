"""Computes the expected values of a diagnosis: nodes of an exported program, and outputs of the model itself.

Nodes are evaluated on demand, in PyTorch's precision and in float64. In half precision, PyTorch's values are those
under autocast: values that autocast rounds are rounded, and returned as float32. Results and weights that the compiled
program stores in the half type are rounded too, as autocast rounds them for the products that read them.

The outputs of the model are computed before a strategy, an export or an import changes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from harness.compiler.lowering.frontends.torch_export.lifting import Graph
from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS, Precision
from harness.core.program import Array, Arrays, Program
from harness.parity.autocast import gpu_autocast, half_to_float32, has_float32_sums
from harness.parity.oracle import float64_arithmetic, oracle
from harness.parity.references import Reference, runner_of
from harness.parity.verdict import judge
from harness.verify.diagnose.deviation import Deviation, deviation


class NodeValues:
    """The values of a program's nodes for one set of inputs, in any order.

    A value is computed on first demand, and dropped after its last reader or demand, so that memory stays near that of
    one run.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[torch.Tensor],
        torch_nodes: Iterable[str],
        exact_nodes: Iterable[str],
        precision: Precision = PRECISIONS[DEFAULT_PRECISION],
        rounded: Collection[str] = (),
    ) -> None:
        """Computes no value yet.

        Args:
            graph: The nodes and the values of the weights.
            inputs: The user's inputs, in order.
            torch_nodes: Names of the nodes whose PyTorch values will be requested, once per request.
            exact_nodes: Names of the nodes whose float64 values will be requested, once per request.
            precision: Precision of PyTorch's values.
            rounded: Names of the nodes whose results are rounded to half precision.
        """
        self.nodes = graph.nodes
        self._module = graph.module
        values = {**graph.weights, **dict(zip(graph.inputs, inputs, strict=True))}
        self._inputs = {graph.nodes[name]: value for name, value in values.items()}
        arithmetic = _Arithmetic()
        if precision.is_half:
            half: torch.dtype = getattr(torch, precision.dtype)
            arithmetic = _Arithmetic(partial(gpu_autocast, half), half=half, rounded=frozenset(rounded))
        torch_demands, exact_demands = (Counter(self.nodes[n] for n in names) for names in (torch_nodes, exact_nodes))
        self._torch_values = _Evaluator(self._module, self._inputs, torch_demands, arithmetic)
        self._exact_values = _Evaluator(self._module, self._inputs, exact_demands, _FLOAT64)

    def torch_value(self, name: str) -> Any:
        """Returns PyTorch's value of a node, and keeps it until it is released."""
        return self._torch_values.value(self.nodes[name])

    def exact_value(self, name: str) -> Any:
        """Returns the float64 value of a node, computed from float64 inputs, and keeps it until it is released.

        Integers and booleans keep their types.
        """
        return self._exact_values.value(self.nodes[name])

    def release(self, torch_nodes: Iterable[str], exact_nodes: Iterable[str]) -> None:
        """Ends one demand for each of these nodes."""
        for name in torch_nodes:
            self._torch_values.release(self.nodes[name])
        for name in exact_nodes:
            self._exact_values.release(self.nodes[name])

    def locally_exact_value(self, name: str, sources: Iterable[str]) -> Any:
        """Returns the float64 value of a node, computed from PyTorch's values of the sources."""
        inputs = self._inputs | {self.nodes[source]: self.torch_value(source) for source in sources}
        node = self.nodes[name]
        return _Evaluator(self._module, inputs, Counter([node]), _FLOAT64).value(node)


def needed_calls(outputs: Iterable[Node]) -> list[Node]:
    """Returns the calls on which nodes depend, including the nodes, in order."""
    return [node for node in _dependencies(outputs) if node.op == "call_function"]


def region(node: Node, sources: Iterable[Node]) -> list[Node]:
    """Returns the calls that compute a node's value from the values of some sources and of placeholders.

    The node is the last call, even if it is a source.
    """
    boundary = set(sources) - {node}
    parts = _dependencies([node], boundary.__contains__)
    return [part for part in parts if part.op == "call_function" and part not in boundary]


def _dependencies(targets: Iterable[Node], is_boundary: Callable[[Node], bool] = lambda node: False) -> list[Node]:
    """Returns the nodes that others depend on, including themselves, but not beyond a boundary, in order."""
    visited: set[Node] = set()
    pending = list(targets)
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if not is_boundary(node):
            pending += node.all_input_nodes
    return sorted(visited)


@dataclass(frozen=True)
class _Arithmetic:
    """The arithmetic of nodes: a mode of PyTorch, the types that inputs are converted to, and the half type."""

    mode: Callable[[], AbstractContextManager[None]] = nullcontext
    types: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    half: torch.dtype | None = None
    rounded: Collection[str] = ()

    def compute(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Calls a node's operator, and returns its result with half types widened to float32."""
        if self.half is None:
            return node.target(*args, **kwargs)
        if has_float32_sums(node.target):
            # Autocast rounds the operators that upstream calls; export replaces some of them by other operators.
            args, kwargs = tree_map(self._round, (args, kwargs))
        value = node.target(*args, **kwargs)
        if node.name in self.rounded:
            value = tree_map(self._round, value)
        return tree_map(half_to_float32, value)

    def _round(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(self.half) if is_float else value

    def convert_input(self, node: Node, value: torch.Tensor) -> torch.Tensor:
        value = value.to(self.types.get(value.dtype, value.dtype))
        if node.name not in self.rounded:
            return value
        rounded: torch.Tensor = half_to_float32(self._round(value))
        return rounded


_FLOAT64 = _Arithmetic(float64_arithmetic, {torch.float32: torch.float64, torch.complex64: torch.complex128})


class _Evaluator:
    """Evaluates a graph on demand; a value is dropped when nothing needs it any more."""

    def __init__(
        self, module: GraphModule, inputs: Mapping[Node, Any], demands: Counter[Node], arithmetic: _Arithmetic
    ) -> None:
        self._module = module
        self._inputs = inputs
        self._arithmetic = arithmetic
        self._values: dict[Node, Any] = {}
        self._uses = Counter(demands)
        for node in _dependencies(demands, inputs.__contains__):
            if node not in inputs:
                self._uses.update(node.all_input_nodes)

    def value(self, node: Node) -> Any:
        """Returns a node's value, after computing those that it depends on."""
        for needed in _dependencies([node], self._is_available):
            if not self._is_available(needed):
                self._values[needed] = self._compute(needed)
                for operand in needed.all_input_nodes:
                    self.release(operand)
        return self._get(node)

    def release(self, node: Node) -> None:
        self._uses[node] -= 1
        if self._uses[node] <= 0:
            self._values.pop(node, None)

    def _is_available(self, node: Node) -> bool:
        return node in self._values or node in self._inputs

    def _get(self, node: Node) -> Any:
        if node in self._values:
            return self._values[node]
        value = self._inputs[node]
        return self._arithmetic.convert_input(node, value.detach()) if isinstance(value, torch.Tensor) else value

    def _compute(self, node: Node) -> Any:
        if node.op == "get_attr":
            return getattr(self._module, str(node.target))
        args, kwargs = map_arg((node.args, node.kwargs), self._get)
        with torch.no_grad(), torch.autocast("cpu", enabled=False), self._arithmetic.mode():
            return self._arithmetic.compute(node, args, kwargs)


def array_of(value: torch.Tensor) -> Array:
    """Returns a node's value as an array; complex numbers become pairs."""
    value = value.detach().resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    array: Array = value.contiguous().numpy()
    return array


@dataclass(frozen=True)
class Upstream:
    """The outputs of a model, including complex ones, as a verification computes them.

    Attributes:
        case: Its precision and weights say how strictly outputs are judged.
        reference: PyTorch's outputs by name.
    """

    case: Case
    reference: Reference

    @classmethod
    def from_program(cls, program: Program, case: Case) -> Upstream:
        """Runs a program's module, unchanged, on its example inputs."""
        module, inputs, names = program.module, tuple(program.example.values()), program.outputs
        run = runner_of(PRECISIONS[case.precision]).run
        first, again = (dict(run(module, inputs, names)) for _ in range(2))
        return cls(case, Reference(first, again, oracle(module, inputs, names)))

    def failed(self, outputs: Arrays, expectation: Expectation | None) -> dict[str, str]:
        """Returns the outputs that a verification rejects, each with the reason."""
        verdicts = judge(
            outputs,
            self.reference,
            expectation=expectation,
            by_oracle=PRECISIONS[self.case.precision].judged_by_oracle,
            ill_conditioned=self.case.ill_conditioned,
        )
        return {verdict.name: verdict.reason for verdict in verdicts if not verdict.kind.passes}

    def deviations(self, outputs: Mapping[str, Array]) -> dict[str, Deviation]:
        """Returns the errors of outputs, in any shape."""
        return {name: self._deviation(name, output) for name, output in outputs.items()}

    def _deviation(self, name: str, output: Array) -> Deviation:
        expected, exact = self.reference.first[name], self.reference.exact[name]
        if output.size != expected.size or exact.shape != expected.shape:
            return Deviation(math.inf, math.inf, math.inf, math.nan, output.size)
        return deviation(output.reshape(expected.shape), expected, exact)
