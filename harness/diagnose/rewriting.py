"""Where the program that is compiled stops being the model: at a strategy's rotation, or already at its export."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.diagnose.diagnosis import Cause, Rewriting
from harness.diagnose.reference import Reference, array_of, needed
from harness.lowering.frontends.torch_export.rewriting import source_line
from harness.lowering.rope import STRATEGIES
from harness.lowering.rope.lowering import remove_traced_attributes
from harness.lowering.route import Route

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.fx import Node

    from harness.core.program import Program
    from harness.diagnose.deviation import Deviation
    from harness.diagnose.upstream import Upstream
    from harness.lowering.frontends.torch_export.graph import Graph
    from harness.lowering.strategy import Strategy

    Array = npt.NDArray[Any]

_SAME = 1e-8
"""Largest difference of the moments of a float64 value that two programs compute in other ways, in units of its rms."""


def rewriting(
    program: Program, route: Route, graph: Graph, inputs: tuple[torch.Tensor, ...], truth: Upstream
) -> Rewriting | None:
    """Returns how the exported program that is compiled differs from the model, or None if its outputs are the model's.

    Args:
        program: The model.
        route: How it is lowered, in fp32.
        graph: The nodes of what is compiled, after the strategy.
        inputs: The program's inputs.
        truth: The model's outputs.
    """
    found = _worst(program, graph, inputs, truth)
    if found is None:
        return None
    untouched = replace(STRATEGIES["none"], apply=remove_traced_attributes, symbolic=True)
    plain = replace(route, strategy=untouched)
    theirs = plain.graph(plain.export(program.module, inputs, program.axes))
    worst = _worst(program, theirs, inputs, truth)
    if worst is not None:
        return Rewriting(Cause.EXPORT, "", "", worst)
    moments, their_moments = (dict(_moments(each, inputs)) for each in (graph, theirs))
    source, by = _lost(theirs, their_moments, moments), _lost(graph, moments, their_moments)
    # torch.export records where a method `forward` calls something else, and no line of that
    return Rewriting(Cause.STRATEGY, source, by if by != source else _definition(route.strategy), found)


def _definition(strategy: str | Strategy) -> str:
    """Returns the line at which a strategy's own part begins."""
    chosen = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
    own = chosen.apply if chosen.transform is STRATEGIES["none"].transform else chosen.transform
    code = inspect.unwrap(own).__code__
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _worst(program: Program, graph: Graph, inputs: Sequence[torch.Tensor], truth: Upstream) -> Deviation | None:
    """Returns the largest error that PyTorch makes of an output when it computes a graph; None if that is rounding."""
    reference = Reference(graph, inputs, own=graph.outputs, exact=())
    outputs = {name: array_of(reference.own(node)) for name, node in zip(program.outputs, graph.outputs, strict=True)}
    worst = max(truth.deviations(outputs).values(), key=lambda each: each.excess)
    return worst if worst.excess > 1 else None


def _lost(graph: Graph, moments: dict[str, Array], others: dict[str, Array]) -> str:
    """Returns the line of the first node whose value another program has not, nor any value that follows from it."""
    known = np.stack(list(others.values())) if others else np.empty((0, 7))
    kept: set[Node] = set()
    nodes = needed(graph.nodes[name] for name in graph.outputs)
    for node in reversed(nodes):
        if any(user in kept for user in node.users) or _is_known(moments.get(node.name), known):
            kept.add(node)
    lost = next((node for node in nodes if node not in kept and node.name in moments), None)
    return "" if lost is None else source_line(lost)


def _is_known(value: Array | None, known: Array) -> bool:
    return value is not None and bool(np.any(np.all(np.abs(known - value) <= _SAME * value[1], axis=1)))


def _moments(graph: Graph, inputs: Sequence[torch.Tensor]) -> Iterator[tuple[str, Array]]:
    """Yields the float64 values of nodes, by moments that no permutation or view changes; of constants there are none.

    These are the number of elements, the root mean square, the mean of x, |x|, x|x| and x³, and the largest x, the last
    four divided by powers of the root mean square that give them the unit of x.
    """
    nodes = needed(graph.nodes[name] for name in graph.outputs)
    reference = Reference(graph, inputs, own=(), exact=[node.name for node in nodes])
    for node in nodes:
        value = reference.exact(node.name)
        reference.release((), [node.name])
        if not isinstance(value, torch.Tensor) or not (value.is_complex() or value.is_floating_point()):
            continue
        x = array_of(value).reshape(-1)
        if not x.size or x.min() == x.max() or not np.isfinite(x).all():
            continue
        size = np.abs(x)
        rms = float(np.sqrt(np.mean(np.square(x))))
        means = np.mean(x), np.mean(size), np.mean(x * size) / rms, np.mean(x * x * x) / rms**2
        yield node.name, np.array([float(x.size), rms, *means, x.max()])
