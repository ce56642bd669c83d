"""Finds where the compiled program stops being the model: at a strategy's rotation, or already at its export."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.compiler.lowering.frontends.rewriting import source_line
from harness.compiler.lowering.frontends.torch_export.lifting import Graph
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.rope.lowering import remove_traced_attributes
from harness.compiler.lowering.route import Route
from harness.compiler.lowering.strategy import Strategy
from harness.core.program import Array, Program
from harness.parity.oracle import oracle
from harness.verify.diagnose.deviation import Deviation
from harness.verify.diagnose.diagnosis import Cause, Rewriting
from harness.verify.diagnose.reference import NodeValues, Upstream, array_of, needed_calls

_TOLERANCE = 1e-8
"""Largest difference of the moments of one float64 value in two programs, relative to its rms."""


def find_rewriting(
    program: Program, route: Route, graph: Graph, inputs: tuple[torch.Tensor, ...], upstream: Upstream
) -> Rewriting | None:
    """Returns the difference between the exported program and the model; None if the outputs are the model's.

    Args:
        program: The model.
        route: Lowering of the program, in fp32.
        graph: Nodes of the compiled program, after the strategy.
        inputs: The program's inputs.
        upstream: Outputs of the model.
    """
    error = _worst(program, graph, inputs, upstream)
    if error is None:
        return None
    untouched = replace(STRATEGIES["none"], apply=remove_traced_attributes, symbolic=True)
    plain_route = replace(route, strategy=untouched)
    plain_graph = plain_route.graph(plain_route.export(program.module, inputs, program.axes))
    plain_error = _worst(program, plain_graph, inputs, upstream)
    if plain_error is not None:
        with _Observer() as observer:
            oracle(program.module, inputs, program.outputs)
        line = _first_lost_line(plain_graph, dict(_moments(plain_graph, inputs)), observer.moments)
        return Rewriting(Cause.EXPORT, line, "", plain_error)
    moments, plain_moments = (dict(_moments(item, inputs)) for item in (graph, plain_graph))
    source = _first_lost_line(plain_graph, plain_moments, list(moments.values()))
    replacement = _first_lost_line(graph, moments, list(plain_moments.values()))
    if replacement == source:
        # torch.export records the line where a method `forward` calls another function, but no line of that function
        replacement = _definition(route.strategy)
    return Rewriting(Cause.STRATEGY, source, replacement, error)


def _definition(strategy: str | Strategy) -> str:
    """Returns the line at which a strategy's own code begins."""
    chosen = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
    function = chosen.apply if chosen.transform is STRATEGIES["none"].transform else chosen.transform
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _worst(program: Program, graph: Graph, inputs: Sequence[torch.Tensor], upstream: Upstream) -> Deviation | None:
    """Returns the largest error of an output if PyTorch computes a graph; None if it is rounding."""
    reference = NodeValues(graph, inputs, torch_nodes=graph.outputs, exact_nodes=())
    outputs = {
        name: array_of(reference.torch_value(node)) for name, node in zip(program.outputs, graph.outputs, strict=True)
    }
    worst = max(upstream.deviations(outputs).values(), key=lambda error: error.excess)
    return worst if worst.is_fault else None


def _first_lost_line(graph: Graph, moments: dict[str, Array], other_moments: Sequence[Array]) -> str:
    """Returns the line of the first node whose value, and all that follows from it, is missing in another program."""
    other_values = np.stack(other_moments) if other_moments else np.empty((0, 7))
    preserved: set[Node] = set()
    nodes = needed_calls(graph.nodes[name] for name in graph.outputs)
    for node in reversed(nodes):
        if any(user in preserved for user in node.users) or _occurs(moments.get(node.name), other_values):
            preserved.add(node)
    lost = next((node for node in nodes if node not in preserved and node.name in moments), None)
    return "" if lost is None else source_line(lost)


def _occurs(value: Array | None, values: Array) -> bool:
    """Returns whether the moments of a value are among those [n, 7] of another program's values."""
    return value is not None and bool(np.any(np.all(np.abs(values - value) <= _TOLERANCE * value[1], axis=1)))


def _moments(graph: Graph, inputs: Sequence[torch.Tensor]) -> Iterator[tuple[str, Array]]:
    """Yields the moments of the nodes' float64 values, by name, without those that have none."""
    nodes = needed_calls(graph.nodes[name] for name in graph.outputs)
    reference = NodeValues(graph, inputs, torch_nodes=(), exact_nodes=[node.name for node in nodes])
    for node in nodes:
        moments = _moments_of(reference.exact_value(node.name))
        reference.release((), [node.name])
        if moments is not None:
            yield node.name, moments


class _Observer(TorchDispatchMode):
    """Keeps the moments of every operator's results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's constructor is untyped
        self.moments: list[Array] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = (_moments_of(value) for value in tree_leaves(result))
        self.moments += [moments for moments in found if moments is not None]
        return result


def _moments_of(value: Any) -> Array | None:
    """Returns the moments of a tensor that no permutation or view changes; None if it is constant or of integers.

    The moments are the number of elements, the root mean square, the mean of x, |x|, x|x| and x³, and the largest x.
    Powers of the root mean square give the last moments the unit of x.
    """
    if not isinstance(value, torch.Tensor) or not (value.is_complex() or value.is_floating_point()):
        return None
    x = array_of(value).reshape(-1)
    if not x.size or x.min() == x.max() or not np.isfinite(x).all():
        return None
    size = np.abs(x)
    rms = float(np.sqrt(np.mean(np.square(x))))
    means = np.mean(x), np.mean(size), np.mean(x * size) / rms, np.mean(x * x * x) / rms**2
    return np.array([float(x.size), rms, *means, x.max()])
