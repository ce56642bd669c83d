"""One run of a compiled program, at each of whose boundaries between kernels values are compared as they come."""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from harness.core.precision import DEFAULT_PRECISION, HALF_DTYPES, PRECISIONS, Precision
from harness.diagnose.deviation import Deviation, deviation
from harness.diagnose.fault import Fault
from harness.diagnose.flow import Flow, KernelCall
from harness.diagnose.reference import Reference, array_of, region
from harness.diagnose.unwritten import tensors_of
from harness.diagnose.wrong_calls import Written, WrongCalls
from harness.execution.unwritten import fill
from harness.runtime.executable import TRANSFORM_PARAMETERS
from harness.runtime.loading import load_library

if TYPE_CHECKING:
    import numpy.typing as npt
    import tvm

    from harness.lowering.frontends.torch_export.graph import Graph

    Array = npt.NDArray[Any]


AGAIN_SECONDS = 0.01
"""How long a call is made again and again, once at least, to see whether its result is always the same bits."""


@dataclass(frozen=True)
class Comparison:
    """The result of one call, compared with the node whose value it is.

    Attributes:
        position: Number of the call in the flow.
        node: Name of the node.
        inside: Names of the nodes that the call computes, from its inputs to its result.
        between: Numbers of the calls before it whose results are of no node, and which it is compared together with.
        shape: Shape of the result.
        local: The error of the call that was given PyTorch's own values, the larger one if two such calls differ.
        accumulated: The error of the call in the run.
        fault: What is wrong with the result of the call that was given PyTorch's own values; None if nothing is.
    """

    position: int
    node: str
    inside: tuple[str, ...]
    between: tuple[int, ...]
    shape: tuple[int, ...]
    local: Deviation
    accumulated: Deviation
    fault: Fault | None


@dataclass(frozen=True)
class Result:
    """An output of the program, compared with its node.

    Attributes:
        node: Name of the node.
        inside: Names of the nodes between the last call and the output: views.
        shape: Its shape.
        expected: PyTorch's.
        accumulated: Its error, in any shape.
    """

    node: str
    inside: tuple[str, ...]
    shape: tuple[int, ...]
    expected: tuple[int, ...]
    accumulated: Deviation


@dataclass(frozen=True)
class Compared:
    """What a run showed.

    Attributes:
        comparisons: In the order of the calls.
        results: The outputs, in order.
        outputs: Their values, in order.
        unnamed: Numbers of the calls whose results are of no node.
        changed: Numbers of the calls whose inputs are not what was written, before the call or after it: memory was
            given away too early.
        altered: Nodes of the weights and inputs whose values in the run are not PyTorch's, with the number of the
            first call that reads them.
        unsteady: Numbers of the calls that do not always make the same bits of the same values.
        wrong: The calls that make the first result that is wrong by itself; None if none is.
    """

    comparisons: tuple[Comparison, ...]
    results: tuple[Result, ...]
    outputs: tuple[Array, ...]
    unnamed: tuple[int, ...]
    changed: tuple[int, ...]
    altered: Mapping[str, int]
    unsteady: tuple[int, ...]
    wrong: WrongCalls | None


def compare(
    library: Path,
    device: tvm.runtime.Device,
    parameters: Sequence[Array],
    inputs: Sequence[torch.Tensor],
    flow: Flow,
    graph: Graph,
    precision: Precision = PRECISIONS[DEFAULT_PRECISION],
) -> Compared:
    """Runs a program, and compares the result of each call with PyTorch's and with float64's.

    Each call is made by the run, and beside it with PyTorch's own values for its inputs, more than once, which makes
    the same bits each time unless tasks disturb each other. Nothing is kept longer than until its last use.

    Args:
        library: The compiled program.
        device: The CPU.
        parameters: Values of what `main` takes after its inputs, as imported.
        inputs: The inputs.
        flow: Its calls.
        graph: Its nodes (`Route.graph`).
        precision: What it was lowered to; in a half one PyTorch's values are those under autocast.

    Raises:
        RuntimeError: The virtual machine makes other calls than those of the flow.
    """
    import tvm

    observer = _Observer(flow, graph, inputs, device, precision)
    machine = load_library(library, device)
    machine["set_instrument"](observer.note)
    tensors = [tvm.runtime.tensor(array, device) for array in parameters]
    if TRANSFORM_PARAMETERS in machine:
        tensors = list(machine[TRANSFORM_PARAMETERS](tensors))
    arguments = [tvm.runtime.tensor(value.numpy(), device) for value in inputs]
    outputs = list(machine.call("main", *arguments, *tensors))
    machine["set_instrument"](lambda *_: None)
    return observer.compared([output.numpy() for output in outputs])


class _Observer:
    """Is told of each call by the virtual machine, before and after it."""

    def __init__(
        self,
        flow: Flow,
        graph: Graph,
        inputs: Sequence[torch.Tensor],
        device: tvm.runtime.Device,
        precision: Precision,
    ) -> None:
        self.flow = flow
        self.device = device
        self.functions = {call.function for call in flow.calls}
        self.results = {n: self._node_of_result(call) for n, call in enumerate(flow.calls)}
        self.outputs = graph.outputs
        self.sources = [flow.sources(n) for n in range(len(flow.calls))]
        self.reference = Reference(
            graph,
            inputs,
            own=[*(name for n in range(len(flow.calls)) for name in self._own_of(n)), *self.outputs],
            exact=[*filter(None, self.results.values()), *self.outputs],
            precision=precision,
            rounded=flow.rounded,
        )
        self.readers = Counter(value for call in flow.calls for value in call.inputs)
        self.held: dict[int, Array] = dict(flow.constants)
        self.sums: dict[int, int] = {}
        self.position = 0
        self.found: list[Comparison] = []
        self.changed: list[int] = []
        self.given = {value: node for value, node in flow.nodes.items() if graph.nodes[node].op == "placeholder"}
        self.altered: dict[str, int] = {}
        self.unsteady: list[int] = []
        self.written: dict[int, Written] = {}
        self.read: dict[int, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self.with_numbers: set[int] = set()
        self.wrong: WrongCalls | None = None

    def compared(self, outputs: Sequence[Array]) -> Compared:
        if self.position != len(self.flow.calls):
            raise RuntimeError(f"{self.position} calls were made instead of {len(self.flow.calls)}")
        unnamed = tuple(n for n, node in self.results.items() if node is None)
        results = tuple(map(self._result, self.outputs, outputs))
        changed = tuple(dict.fromkeys(self.changed))
        unsteady = tuple(self.unsteady)
        found, values = tuple(self.found), tuple(outputs)
        return Compared(found, results, values, unnamed, changed, self.altered, unsteady, self.wrong)

    def note(self, function: Any, name: str, before: bool, _result: Any, *arguments: Any) -> None:
        if name not in self.functions:
            return
        call = self.flow.calls[self.position]
        if name != call.function:
            raise RuntimeError(f"call {self.position} is of {name} instead of {call.function}")
        self._check_inputs(call, arguments)
        if before:
            return
        tensors = tensors_of(arguments)
        writes = tensors[len(call.inputs) :]
        for value, n in zip(call.outputs, writes, strict=True):
            self.sums[value] = _checksum(arguments[n].numpy())
            self.written[value] = Written(tuple(arguments[n].shape), str(arguments[n].dtype))
        for value, n in zip(call.inputs, tensors, strict=False):
            self.read[value] = tuple(arguments[n].shape), _type_of(arguments[n])
        if len(tensors) < len(arguments):
            self.with_numbers.add(self.position)
        local = self._called_locally(function, call, arguments, tensors)
        self._judge(call, arguments[writes[0]], local)
        for value in call.inputs:
            self._read(value)
        self.reference.release(self._own_of(self.position), filter(None, [self.results[self.position]]))
        self.position += 1

    def _result(self, name: str, output: Array) -> Result:
        torch_value, exact = array_of(self.reference.own(name)), array_of(self.reference.exact(name))
        named = [self.reference.nodes[other] for other in self.flow.nodes.values()]
        inside = region(self.reference.nodes[name], named) if name not in self.flow.nodes.values() else []
        shape, expected = output.shape, torch_value.shape
        found = (
            deviation(output.reshape(expected), torch_value, exact)
            if output.size == torch_value.size
            else Deviation(math.inf, math.inf, math.inf, math.nan, output.size)
        )
        return Result(name, tuple(node.name for node in inside), shape, expected, found)

    def _node_of_result(self, call: KernelCall) -> str | None:
        return self.flow.nodes.get(call.outputs[0]) if len(call.outputs) == 1 else None

    def _own_of(self, n: int) -> list[str]:
        """Returns the nodes whose PyTorch values a call is given or is compared with."""
        own = [self.flow.nodes[value] for value in self.flow.calls[n].inputs if value in self.flow.nodes]
        result = self.results[n]
        return own if result is None else [*own, *self.sources[n][0], result]

    def _check_inputs(self, call: KernelCall, arguments: Sequence[Any]) -> None:
        tensors = [argument for argument in arguments if hasattr(argument, "dtype")]
        for value, tensor in zip(call.inputs, tensors[: len(call.inputs)], strict=True):
            if value in self.given and value not in self.sums:
                given = array_of(self.reference.own(self.given[value]))
                self.sums[value] = _checksum(given.astype(_type_of(tensor), copy=False))
            if value not in self.sums or self.sums[value] == _checksum(tensor.numpy()):
                continue
            if value in self.given:
                self.altered.setdefault(self.given[value], self.position)
            else:
                self.changed.append(self.position)

    def _called_locally(
        self, function: Any, call: KernelCall, arguments: Sequence[Any], tensors: Sequence[int]
    ) -> list[list[Array]]:
        """Calls a function with PyTorch's values, and returns what it writes; twice if that is not always the same."""
        import tvm

        own = list(arguments)
        for value, n in zip(call.inputs, tensors, strict=False):
            array = self._given(value).reshape(tuple(arguments[n].shape))
            own[n] = tvm.runtime.tensor(np.asarray(array, _type_of(arguments[n]), order="C"), self.device)
        writes = tensors[len(call.inputs) :]

        def called() -> list[Array]:
            for n in writes:
                own[n] = tvm.runtime.empty(tuple(arguments[n].shape), str(arguments[n].dtype), self.device)
                fill(own[n])
            function(*own)
            return [own[n].numpy() for n in writes]

        results = called()
        other = _other(results, called)
        for value, array in zip(call.outputs, results, strict=True):
            if value not in self.flow.nodes and self.readers[value]:
                self.held[value] = array
        if other is None:
            return [results]
        self.unsteady.append(self.position)
        return [results, other]

    def _given(self, value: int) -> Array:
        node = self.flow.nodes.get(value)
        return self.held[value] if node is None else array_of(self.reference.own(node))

    def _read(self, value: int) -> None:
        self.readers[value] -= 1
        if not self.readers[value]:
            self.held.pop(value, None)

    def _judge(self, call: KernelCall, written: Any, local: Sequence[Sequence[Array]]) -> None:
        node = self.results[self.position]
        if node is None:
            return
        sources, between = self.sources[self.position]
        nodes = self.reference.nodes
        torch_value = array_of(self.reference.own(node))
        near = array_of(self.reference.locally_exact(node, sources - {node}))
        exact = array_of(self.reference.exact(node))
        shape = tuple(int(extent) for extent in written.shape)
        values = [_not_half(results[0]).reshape(torch_value.shape) for results in local]
        made, own = max(
            ((deviation(value, torch_value, near), value) for value in values), key=lambda each: each[0].excess
        )
        if made.excess > 1 and self.wrong is None:
            self.wrong = self._calls([*between, self.position], torch_value, near)
        self.found.append(
            Comparison(
                self.position,
                node,
                tuple(part.name for part in region(nodes[node], [nodes[name] for name in sources])),
                between,
                shape,
                made,
                deviation(_not_half(written.numpy()).reshape(torch_value.shape), torch_value, exact),
                Fault.of(made, own, torch_value, near),
            )
        )

    def _calls(self, positions: Sequence[int], torch_value: Array, exact: Array) -> WrongCalls:
        """Returns calls with what they read that none of them writes: values of nodes, and constants."""
        calls = [self.flow.calls[n] for n in positions]
        made = {value for call in calls for value in call.outputs}
        given = dict.fromkeys(value for call in calls for value in call.inputs if value not in made)
        values = {}
        for value in given:
            shape, dtype = self.read[value]
            node = self.flow.nodes.get(value)
            array = self.flow.constants[value] if node is None else array_of(self.reference.own(node))
            values[value] = np.asarray(array.reshape(shape), dtype)
        written = {value: self.written[value] for value in made}
        return WrongCalls(calls, self.with_numbers.isdisjoint(positions), values, written, torch_value, exact)


def _other(results: Sequence[Array], called: Callable[[], list[Array]]) -> list[Array] | None:
    """Makes a call again for a while; returns results of other bits, or None if they are always the same."""
    expected, start = list(map(_checksum, results)), time.perf_counter()
    while True:
        again = called()
        if list(map(_checksum, again)) != expected:
            return again
        if time.perf_counter() - start > AGAIN_SECONDS:
            return None


def _type_of(tensor: Any) -> np.dtype[Any]:
    """Returns the type of the elements of a tensor of TVM, bfloat16 among them."""
    return np.dtype(getattr(ml_dtypes, str(tensor.dtype), str(tensor.dtype)))


def _not_half(array: Array) -> Array:
    return array.astype(np.float32) if str(array.dtype) in HALF_DTYPES else array


def _checksum(array: Array) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)
