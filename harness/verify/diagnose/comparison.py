"""Runs a compiled program once, and compares the values at each boundary between kernels.

A fault that only shows in the program does not show in operators that are compiled separately. It does show in the
program's compiled functions, whatever produced them: `WrongCalls` makes a module of them for TVM alone to compile.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import tvm
from torch.fx import Node
from tvm import relax

from harness.compiler import tir as T
from harness.compiler.execution.executors import poison
from harness.compiler.lowering.frontends.rewriting import source_line
from harness.compiler.lowering.frontends.torch_export.lifting import Graph
from harness.core.precision import HALF_DTYPES, Precision
from harness.core.program import Array
from harness.runtime.executable import TRANSFORM_PARAMETERS
from harness.runtime.loading import load_library
from harness.verify.diagnose.deviation import Fault, deviation
from harness.verify.diagnose.diagnosis import Boundary
from harness.verify.diagnose.flow import Flow, KernelCall, tensor_positions
from harness.verify.diagnose.reference import NodeValues, array_of, region
from harness.verify.diagnose.subgraph import Subgraph, replace_main

REPEAT_SECONDS = 0.01
"""Seconds for which a call is repeated, at least once, to check that its result always has the same bits."""


@dataclass
class RunComparison:
    """The comparisons of one run.

    Attributes:
        unnamed: Positions of the calls whose results belong to no node.
        boundaries: Comparisons of the calls, in order.
        faults: By position, the fault of the result of a call with PyTorch's values as inputs.
        changed: Positions of the calls whose inputs differ from the written values, before or after the call: memory
            was reused too early.
        altered: Nodes of the weights and inputs whose values in the run are not PyTorch's, with the position of their
            first reader.
        unsteady: Positions of the calls whose results for the same values do not always have the same bits.
        wrong: The calls that compute the first result that is wrong by itself; None if none is.
        outputs: Values of the outputs, in order.
        shapes: Shapes of PyTorch's outputs, in order.
        views: Names of the nodes between the last calls and the outputs.
    """

    unnamed: tuple[int, ...]
    boundaries: list[Boundary] = field(default_factory=list)
    faults: dict[int, Fault] = field(default_factory=dict)
    changed: list[int] = field(default_factory=list)
    altered: dict[str, int] = field(default_factory=dict)
    unsteady: list[int] = field(default_factory=list)
    wrong: WrongCalls | None = None
    outputs: tuple[Array, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    views: frozenset[str] = frozenset()


class Observer:
    """Runs a program, and compares the result of each call with PyTorch's value and with float64.

    The run makes each call. The call is also made separately with PyTorch's values as inputs, more than once: the bits
    are the same each time unless parallel tasks disturb each other. No value is kept beyond its last use.
    """

    def __init__(
        self,
        flow: Flow,
        graph: Graph,
        inputs: Sequence[torch.Tensor],
        device: tvm.runtime.Device,
        precision: Precision,
    ) -> None:
        """Computes no value yet.

        Args:
            flow: Calls of the program.
            graph: Nodes of the program (`Route.graph`).
            inputs: Inputs of the program.
            device: Device of the CPU.
            precision: Precision that the program was lowered to; in half precision PyTorch's values are those under
                autocast.
        """
        self.flow = flow
        self.inputs = inputs
        self.device = device
        self.functions = {call.function for call in flow.calls}
        # Calls with several results are compared with the calls that read these.
        self.results = {
            n: flow.nodes.get(call.outputs[0]) if len(call.outputs) == 1 else None for n, call in enumerate(flow.calls)
        }
        self.outputs = graph.outputs
        self.sources = [flow.sources(n) for n in range(len(flow.calls))]
        self.reference = NodeValues(
            graph,
            inputs,
            torch_nodes=[*(name for n in range(len(flow.calls)) for name in self._torch_nodes(n)), *self.outputs],
            exact_nodes=[*filter(None, self.results.values())],
            precision=precision,
            rounded=flow.rounded,
        )
        self.readers = Counter(value for call in flow.calls for value in call.inputs)
        self.intermediates: dict[int, Array] = dict(flow.constants)
        self.sums: dict[int, int] = {}
        self.position = 0
        self.placeholders = {value: node for value, node in flow.nodes.items() if graph.nodes[node].op == "placeholder"}
        self.written_types: dict[int, relax.TensorType] = {}
        self.read_types: dict[int, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self.calls_with_scalars: set[int] = set()
        self.seen = RunComparison(unnamed=tuple(n for n, node in self.results.items() if node is None))

    def run(self, library: Path, parameters: Sequence[Array]) -> RunComparison:
        """Runs the program once, and returns the comparisons.

        Args:
            library: The compiled program.
            parameters: Imported values of the parameters of `main` after its inputs.

        Raises:
            RuntimeError: The virtual machine makes other calls than those of the flow.
        """
        machine = load_library(library, self.device)
        machine["set_instrument"](self.on_call)
        tensors = [tvm.runtime.tensor(array, self.device) for array in parameters]
        if TRANSFORM_PARAMETERS in machine:
            tensors = list(machine[TRANSFORM_PARAMETERS](tensors))
        arguments = [tvm.runtime.tensor(value.numpy(), self.device) for value in self.inputs]
        outputs = list(machine.call("main", *arguments, *tensors))
        machine["set_instrument"](lambda *_: None)
        if self.position != len(self.flow.calls):
            raise RuntimeError(f"{self.position} calls were made instead of {len(self.flow.calls)}")
        nodes, names = self.reference.nodes, set(self.flow.nodes.values())
        compared = [nodes[name] for name in names]
        self.seen.outputs = tuple(output.numpy() for output in outputs)
        self.seen.shapes = tuple(array_of(self.reference.torch_value(name)).shape for name in self.outputs)
        self.seen.views = frozenset(
            view.name for name in self.outputs if name not in names for view in region(nodes[name], compared)
        )
        return self.seen

    def on_call(self, function: Any, name: str, before: bool, _result: Any, *arguments: Any) -> None:
        """Observes a call; TVM's virtual machine calls this instrument before and after each call."""
        if name not in self.functions:
            return
        call = self.flow.calls[self.position]
        if name != call.function:
            raise RuntimeError(f"call {self.position} is of {name} instead of {call.function}")
        self._check_inputs(call, arguments)
        if before:
            return
        tensors = tensor_positions(arguments)
        writes = tensors[len(call.inputs) :]
        for value, n in zip(call.outputs, writes, strict=True):
            self.sums[value] = _checksum(arguments[n].numpy())
            self.written_types[value] = relax.TensorType(tuple(arguments[n].shape), str(arguments[n].dtype))
        for value, n in zip(call.inputs, tensors, strict=False):
            self.read_types[value] = tuple(arguments[n].shape), _dtype_of(arguments[n])
        if len(tensors) < len(arguments):
            self.calls_with_scalars.add(self.position)
        local = self._call_locally(function, call, arguments, tensors)
        self._judge(call, arguments[writes[0]], local)
        for value in call.inputs:
            self.readers[value] -= 1
            if not self.readers[value]:
                self.intermediates.pop(value, None)
        self.reference.release(self._torch_nodes(self.position), filter(None, [self.results[self.position]]))
        self.position += 1

    def _torch_nodes(self, n: int) -> list[str]:
        """Returns the nodes whose PyTorch values a call gets or is compared with."""
        nodes = [self.flow.nodes[value] for value in self.flow.calls[n].inputs if value in self.flow.nodes]
        result = self.results[n]
        return nodes if result is None else [*nodes, *self.sources[n][0], result]

    def _check_inputs(self, call: KernelCall, arguments: Sequence[Any]) -> None:
        """Notes inputs of a call that differ from the written values, and weights and inputs that are not PyTorch's."""
        tensors = [argument for argument in arguments if hasattr(argument, "dtype")]
        for value, tensor in zip(call.inputs, tensors[: len(call.inputs)], strict=True):
            if value in self.placeholders and value not in self.sums:
                expected = array_of(self.reference.torch_value(self.placeholders[value]))
                self.sums[value] = _checksum(expected.astype(_dtype_of(tensor), copy=False))
            if value not in self.sums or self.sums[value] == _checksum(tensor.numpy()):
                continue
            if value in self.placeholders:
                self.seen.altered.setdefault(self.placeholders[value], self.position)
            elif self.position not in self.seen.changed:
                self.seen.changed.append(self.position)

    def _call_locally(
        self, function: Any, call: KernelCall, arguments: Sequence[Any], tensors: Sequence[int]
    ) -> list[list[Array]]:
        """Calls a function with PyTorch's values, and returns its results; two results if they differ."""
        local_arguments = list(arguments)
        for value, n in zip(call.inputs, tensors, strict=False):
            array = self._torch_value(value).reshape(tuple(arguments[n].shape))
            local_arguments[n] = tvm.runtime.tensor(np.asarray(array, _dtype_of(arguments[n]), order="C"), self.device)
        writes = tensors[len(call.inputs) :]

        def call_again() -> list[Array]:
            for n in writes:
                local_arguments[n] = tvm.runtime.empty(tuple(arguments[n].shape), str(arguments[n].dtype), self.device)
                poison(local_arguments[n])
            function(*local_arguments)
            return [local_arguments[n].numpy() for n in writes]

        results = call_again()
        different = _repeat(results, call_again)
        for value, array in zip(call.outputs, results, strict=True):
            if value not in self.flow.nodes and self.readers[value]:
                self.intermediates[value] = array
        if different is None:
            return [results]
        self.seen.unsteady.append(self.position)
        return [results, different]

    def _torch_value(self, value: int) -> Array:
        """Returns PyTorch's value of a node, or a value that follows from such values if it belongs to no node."""
        node = self.flow.nodes.get(value)
        return self.intermediates[value] if node is None else array_of(self.reference.torch_value(node))

    def _judge(self, call: KernelCall, written: Any, local: Sequence[Sequence[Array]]) -> None:
        """Compares the result of a call in the run, and its results with PyTorch's values, with the call's node."""
        node = self.results[self.position]
        if node is None:
            return
        sources, between = self.sources[self.position]
        nodes = self.reference.nodes
        torch_value = array_of(self.reference.torch_value(node))
        locally_exact = array_of(self.reference.locally_exact_value(node, sources - {node}))
        exact = array_of(self.reference.exact_value(node))
        values = [_half_to_float32(results[0]).reshape(torch_value.shape) for results in local]
        local_error, local_value = max(
            ((deviation(value, torch_value, locally_exact), value) for value in values), key=lambda pair: pair[0].excess
        )
        if local_error.is_fault and self.seen.wrong is None:
            self.seen.wrong = self._wrong_calls([*between, self.position], torch_value, locally_exact)
        if fault := Fault.from_value(local_error, local_value, torch_value, locally_exact):
            self.seen.faults[self.position] = fault
        inside = region(nodes[node], [nodes[name] for name in sources])
        self.seen.boundaries.append(
            Boundary(
                position=self.position,
                function=call.function,
                at_load=call.at_load,
                node=node,
                source=source_line(nodes[node]),
                operators=tuple(dict.fromkeys(map(_operator, inside))),
                inside=tuple(inner.name for inner in inside),
                between=tuple(dict.fromkeys(self.flow.calls[n].function for n in between)),
                shape=tuple(int(extent) for extent in written.shape),
                local=local_error,
                accumulated=deviation(_half_to_float32(written.numpy()).reshape(torch_value.shape), torch_value, exact),
            )
        )

    def _wrong_calls(self, positions: Sequence[int], torch_value: Array, exact: Array) -> WrongCalls:
        """Returns calls with the values that they read and none of them writes: values of nodes, and constants."""
        calls = [self.flow.calls[n] for n in positions]
        written = {value for call in calls for value in call.outputs}
        read = dict.fromkeys(value for call in calls for value in call.inputs if value not in written)
        values = {}
        for value in read:
            shape, dtype = self.read_types[value]
            node = self.flow.nodes.get(value)
            array = self.flow.constants[value] if node is None else array_of(self.reference.torch_value(node))
            values[value] = np.asarray(array.reshape(shape), dtype)
        written_types = {value: self.written_types[value] for value in written}
        only_tensors = self.calls_with_scalars.isdisjoint(positions)
        return WrongCalls(calls, only_tensors, values, written_types, torch_value, exact)


def _repeat(results: Sequence[Array], call: Callable[[], list[Array]]) -> list[Array] | None:
    """Repeats a call for a while; returns results with other bits, or None if the bits are always the same."""
    expected, start = list(map(_checksum, results)), time.perf_counter()
    while True:
        repeated = call()
        if list(map(_checksum, repeated)) != expected:
            return repeated
        if time.perf_counter() - start > REPEAT_SECONDS:
            return None


def _operator(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")


def _dtype_of(tensor: Any) -> np.dtype[Any]:
    """Returns the NumPy dtype of a TVM tensor, including bfloat16."""
    return np.dtype(getattr(ml_dtypes, str(tensor.dtype), str(tensor.dtype)))


def _half_to_float32(array: Array) -> Array:
    return array.astype(np.float32) if str(array.dtype) in HALF_DTYPES else array


def _checksum(array: Array) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


@dataclass(frozen=True)
class WrongCalls:
    """The calls that compute a wrong result from values of nodes, in order.

    Attributes:
        calls: The calls; the last one writes the result.
        only_tensors: Whether all arguments of the calls are tensors.
        inputs: PyTorch's values, by index, that the calls read and none of them writes.
        written: Types of the values that the calls write, by index.
        torch_value: PyTorch's value of the result.
        exact: The float64 value that follows from the inputs.
    """

    calls: Sequence[KernelCall]
    only_tensors: bool
    inputs: Mapping[int, Array]
    written: Mapping[int, relax.TensorType]
    torch_value: Array
    exact: Array

    def subgraph(self, code: tvm.IRModule, nodes: Mapping[int, str], sources: frozenset[str]) -> Subgraph | None:
        """Returns a module whose `main` calls the same functions; None if Relax cannot express that.

        Args:
            code: The lowered module, which contains the functions.
            nodes: By index of a value, the node whose value it is.
            sources: Names of the nodes that the result is computed from.
        """
        functions = {variable.name_hint: function for variable, function in code.functions_items()}
        functions_called = {call.function: functions.get(call.function) for call in self.calls}
        are_loops = all(isinstance(function, T.PrimFunc) for function in functions_called.values())
        if not (self.only_tensors and are_loops):
            return None
        builder = relax.BlockBuilder()
        global_vars = {name: builder.add_func(function, name) for name, function in functions_called.items()}
        names = {value: nodes.get(value, f"constant{value}") for value in self.inputs}
        values: dict[int, Any] = {
            value: relax.Var(names[value], relax.TensorType(array.shape, str(array.dtype)))
            for value, array in self.inputs.items()
        }
        parameters = list(values.values())
        bindings: list[relax.VarBinding] = []
        for call in self.calls:
            types = [self.written[value] for value in call.outputs]
            arguments = relax.Tuple([values[value] for value in call.inputs])
            result_call = relax.call_tir(global_vars[call.function], arguments, types if len(types) > 1 else types[0])
            variable = relax.Var(f"value{len(bindings)}", relax.TupleType(types) if len(types) > 1 else types[0])
            bindings.append(relax.VarBinding(variable, result_call))
            values[call.outputs[0]] = variable
            for n, value in enumerate(call.outputs if len(types) > 1 else ()):
                values[value] = relax.Var(f"value{len(bindings)}", types[n])
                bindings.append(relax.VarBinding(values[value], relax.TupleGetItem(variable, n)))
        result = values[self.calls[-1].outputs[0]]
        return Subgraph(
            replace_main(builder.get(), bindings, result, parameters, ()),
            tuple(names.values()),
            tuple(np.asarray(array, order="C") for array in self.inputs.values()),
            sources,
            self.torch_value,
            self.exact,
            {},
        )
