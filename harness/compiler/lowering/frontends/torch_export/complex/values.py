"""Represents complex tensors as values of the lowered graph, writes the graph, and says what cannot be lowered."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from harness.compiler.lowering.frontends.rewriting import append_call, source_line

_aten = torch.ops.aten

_COPIED_META = ("stack_trace", "nn_module_stack")

PART_DTYPES = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Complex dtypes that are lowered → the dtype of each part."""


class ComplexOperatorError(NotImplementedError):
    """A complex tensor reaches an operator, a dtype or a structure that the pass does not know.

    It is the outcome of a case at import, like an operator that TVM's importer does not know. It is no HarnessError,
    because it is no mistake of the user.
    """


def unsupported(node: Node, problem: str = "has no rule for complex tensors") -> ComplexOperatorError:
    """Returns the error for a node, with the model's source line.

    Args:
        node: The call that cannot be lowered.
        problem: The problem, as a phrase that follows the operator's name.
    """
    name = str(node.target).removeprefix("torch.ops.")
    return ComplexOperatorError(
        f"{name} {problem}, called at {source_line(node)}: "
        "write that line with real tensors, or add a rule in harness/compiler/lowering/frontends/torch_export/complex."
    )


@dataclass(frozen=True)
class Pair:
    """A complex tensor as two real tensors of one shape and dtype.

    Attributes:
        re: The real part.
        im: The imaginary part; None if it is known to be zero.
        packed: The same values as one tensor with a last dimension of 2, if the graph already has it.
    """

    re: Node
    im: Node | None
    packed: Node | None = None


@dataclass(frozen=True)
class Interleaved:
    """torch.view_as_real of a pair, which is interleaved only when an operator needs that."""

    pair: Pair


Value: TypeAlias = Node | Pair | Interleaved | list[Pair]
"""A node of the original graph in the lowered graph; a list for an operator that returns several tensors."""


def as_real(value: Any) -> Any:
    """Returns a complex tensor [...] as a real tensor [..., 2]; any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value


def is_complex(node: Node) -> bool:
    """Returns whether a node's result is a complex tensor, or contains one."""
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(part, torch.Tensor) and part.is_complex() for part in parts)


def touches_complex(node: Node) -> bool:
    """Returns whether the result or an operand of a node is a complex tensor, or contains one."""
    return any(map(is_complex, (node, *node.all_input_nodes)))


TENSOR = (Node, Pair, Interleaved)
"""The types of one tensor, for isinstance; arguments of other types are Python values."""


class Writer:
    """A writer that appends calls to the lowered graph, each with the fake tensor of its result.

    Attributes:
        graph: The written graph.
        source: The node of the original graph that is being lowered; its source line goes into the metadata of every
            call.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.source: Any = None
        self.calls: list[Node] = []
        self._packed: dict[tuple[Node, Node | None], Node] = {}

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Appends a call of an operator on nodes of the lowered graph and plain values."""
        node = append_call(self.graph, target, args, kwargs)
        if self.source is not None:
            node.meta |= {key: self.source.meta[key] for key in _COPIED_META if key in self.source.meta}
        self.calls.append(node)
        return node

    @property
    def part_dtype(self) -> torch.dtype:
        """Returns the real dtype of each part of the complex result of `source`."""
        value = self.source.meta["val"]
        return real_dtype((value[0] if isinstance(value, list | tuple) else value).dtype)

    def item(self, results: Node, position: int) -> Node:
        """Returns one result of a call that returns several."""
        return self.call(operator.getitem, results, position)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Returns the node in a dtype."""
        return node if node.meta["val"].dtype == dtype else self.call(_aten._to_copy.default, node, dtype=dtype)

    def pair(self, value: Value, dtype: torch.dtype) -> Pair:
        """Returns a complex or real tensor as a pair in a real dtype."""
        if isinstance(value, Interleaved):
            value = self.packed(value.pair)
        if isinstance(value, Node):
            return Pair(self.cast(value, dtype), None)
        assert isinstance(value, Pair)
        if value.re.meta["val"].dtype == dtype:
            return value
        return Pair(self.cast(value.re, dtype), None if value.im is None else self.cast(value.im, dtype))

    def imaginary(self, pair: Pair) -> Node:
        """Returns the imaginary part, as zeros if it is known to be zero."""
        return self.call(_aten.full_like.default, pair.re, 0.0) if pair.im is None else pair.im

    def packed(self, pair: Pair) -> Node:
        """Returns the two parts interleaved along a last dimension of 2; written once for each pair."""
        if pair.packed is not None:
            return pair.packed
        key = (pair.re, pair.im)
        if key not in self._packed:
            self._packed[key] = self.call(_aten.stack.default, [pair.re, self.imaginary(pair)], -1)
        return self._packed[key]

    def unpacked(self, packed: Node) -> Pair:
        """Returns the pair in a real tensor with a last dimension of 2."""
        last_dimension = packed.meta["val"].dim() - 1
        re, im = (self.call(_aten.select.int, packed, last_dimension, part) for part in (0, 1))
        return Pair(re, im, packed)

    def real(self, value: Value) -> Node:
        """Returns a tensor of the original graph as a real tensor of the lowered graph, a complex one as [..., 2]."""
        if isinstance(value, Interleaved):
            value = value.pair
        if isinstance(value, Pair):
            return self.packed(value)
        assert isinstance(value, Node)
        return value

    def erase_unused(self) -> None:
        """Removes calls whose results are not read, such as one part where the other is enough."""
        for node in reversed(self.calls):
            if not node.users:
                self.graph.erase_node(node)
        self.calls.clear()


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the parts of a complex dtype; any other dtype unchanged."""
    return PART_DTYPES.get(dtype, dtype)
