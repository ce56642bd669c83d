"""Values of the nodes of an exported program: PyTorch's own, and float64's; each is kept until it was asked for.

In a half precision PyTorch's are those under autocast: what it rounds is rounded, and given as float32. Results that
the compiled program keeps in the half type are rounded, too, as products that read them round them under autocast, and
so are weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from harness.core.precision import DEFAULT_PRECISION, PRECISIONS, Precision
from harness.parity.autocast import gpu_autocast, half_to_float32, has_float32_sums
from harness.parity.oracle import float64_arithmetic

if TYPE_CHECKING:
    import numpy.typing as npt

    from harness.lowering.frontends.torch_export.graph import Graph

    Array = npt.NDArray[Any]


class Reference:
    """The values of a program's nodes for one set of inputs, in any order.

    A value is computed when it is first asked for, and dropped after the last node or demand that needs it, so that
    memory stays near that of one run.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[torch.Tensor],
        own: Iterable[str],
        exact: Iterable[str],
        precision: Precision = PRECISIONS[DEFAULT_PRECISION],
        rounded: Collection[str] = (),
    ) -> None:
        """Computes nothing yet.

        Args:
            graph: The nodes, and the values of the weights.
            inputs: The user's inputs, in order.
            own: Names of the nodes whose values PyTorch will be asked for, once for each time.
            exact: Names of the nodes whose float64 values will be taken, once for each time.
            precision: What PyTorch computes in.
            rounded: Names of the nodes whose results are rounded to a half precision.
        """
        self.nodes = graph.nodes
        self._module = graph.module
        values = {**graph.weights, **dict(zip(graph.inputs, inputs, strict=True))}
        self._given = {graph.nodes[name]: value for name, value in values.items()}
        self._own = _Values(self._module, self._given, self._demands(own), _arithmetic(precision, rounded))
        self._exact = _Values(self._module, self._given, self._demands(exact), _FLOAT64)

    def own(self, name: str) -> Any:
        """Returns PyTorch's value of a node, and keeps it until it is released."""
        return self._own.value(self.nodes[name])

    def exact(self, name: str) -> Any:
        """Returns the float64 value of a node, computed from the inputs in float64, and keeps it until it is released.

        Integers and booleans stay what they are.
        """
        return self._exact.value(self.nodes[name])

    def release(self, own: Iterable[str], exact: Iterable[str]) -> None:
        """Ends one demand of each of these nodes."""
        for name in own:
            self._own.release(self.nodes[name])
        for name in exact:
            self._exact.release(self.nodes[name])

    def locally_exact(self, name: str, sources: Iterable[str]) -> Any:
        """Returns the float64 value of a node, computed from PyTorch's values of others."""
        given = self._given | {self.nodes[other]: self.own(other) for other in sources}
        node = self.nodes[name]
        return _Values(self._module, given, Counter([node]), _FLOAT64).value(node)

    def _demands(self, names: Iterable[str]) -> Counter[Node]:
        return Counter(self.nodes[name] for name in names)


def needed(outputs: Iterable[Node]) -> list[Node]:
    """Returns the calls on which nodes depend, themselves included, in order."""
    return [node for node in _needed(outputs, ()) if node.op == "call_function"]


def region(node: Node, sources: Iterable[Node]) -> list[Node]:
    """Returns the calls that a node's value takes, from the values of some sources and of placeholders on.

    The node itself is the last one, even if it is a source.
    """
    given = set(sources) - {node}
    return [part for part in _needed([node], given) if part.op == "call_function" and part not in given]


def _needed(wanted: Iterable[Node], given: Iterable[Node]) -> list[Node]:
    """Returns the nodes that others depend on, themselves included, without what given ones depend on; in order."""
    known, found = set(given), set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        if node not in known:
            waiting += node.all_input_nodes
    return sorted(found)


@dataclass(frozen=True)
class _Arithmetic:
    """What nodes are computed in: a mode of PyTorch, the types that given values take before, and the half type."""

    mode: Callable[[], AbstractContextManager[None]] = nullcontext
    types: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    half: torch.dtype | None = None
    rounded: Collection[str] = ()

    def compute(self, node: Node, args: Any, kwargs: Any) -> Any:
        if self.half is None:
            return node.target(*args, **kwargs)
        if has_float32_sums(node.target):
            # Autocast rounds what upstream calls; some of that is another operator by the time it is exported.
            args, kwargs = tree_map(self._rounded, (args, kwargs))
        value = node.target(*args, **kwargs)
        if node.name in self.rounded:
            value = tree_map(self._rounded, value)
        return tree_map(half_to_float32, value)

    def _rounded(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(self.half) if is_float else value

    def given(self, node: Node, value: torch.Tensor) -> torch.Tensor:
        value = value.to(self.types.get(value.dtype, value.dtype))
        if node.name not in self.rounded:
            return value
        rounded: torch.Tensor = half_to_float32(self._rounded(value))
        return rounded


_FLOAT64 = _Arithmetic(float64_arithmetic, {torch.float32: torch.float64, torch.complex64: torch.complex128})


def _arithmetic(precision: Precision, rounded: Collection[str]) -> _Arithmetic:
    if not precision.is_half:
        return _Arithmetic()
    half: torch.dtype = getattr(torch, precision.dtype)
    return _Arithmetic(partial(gpu_autocast, half), half=half, rounded=frozenset(rounded))


class _Values:
    """Evaluates a graph by demand; a value goes when nothing needs it any more."""

    def __init__(
        self, module: GraphModule, given: Mapping[Node, Any], demands: Counter[Node], arithmetic: _Arithmetic
    ) -> None:
        self._module = module
        self._given = given
        self._arithmetic = arithmetic
        self._values: dict[Node, Any] = {}
        self._uses = Counter(demands)
        for node in _needed(demands, given):
            if node not in given:
                self._uses.update(node.all_input_nodes)

    def value(self, node: Node) -> Any:
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [] if self._known(last) else [part for part in last.all_input_nodes if not self._known(part)]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if not self._known(last):
                self._values[last] = self._computed(last)
                for part in last.all_input_nodes:
                    self.release(part)
        return self._of(node)

    def release(self, node: Node) -> None:
        self._uses[node] -= 1
        if self._uses[node] <= 0:
            self._values.pop(node, None)

    def _known(self, node: Node) -> bool:
        return node in self._values or node in self._given

    def _of(self, node: Node) -> Any:
        if node in self._values:
            return self._values[node]
        value = self._given[node]
        return self._arithmetic.given(node, value.detach()) if isinstance(value, torch.Tensor) else value

    def _computed(self, node: Node) -> Any:
        if node.op == "get_attr":
            return getattr(self._module, str(node.target))
        args, kwargs = map_arg((node.args, node.kwargs), self._of)
        with torch.no_grad(), torch.autocast("cpu", enabled=False), self._arithmetic.mode():
            return self._arithmetic.compute(node, args, kwargs)


def array_of(value: torch.Tensor) -> Array:
    """Returns a node's value as an array, a complex one as pairs."""
    value = value.detach().resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    array: Array = value.contiguous().numpy()
    return array
