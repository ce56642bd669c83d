"""Values of nodes: those of PyTorch and of float64, and never more of them at a time than one run needs."""

from __future__ import annotations

import gc

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.compiler.lowering.frontends.torch_export.lifting import Graph
from harness.compiler.lowering.route import Route
from harness.core.case import Case
from harness.verify.diagnose.deviation import deviation
from harness.verify.diagnose.reference import NodeValues, needed_calls, region

LENGTH = 30
EXTENT = 977
"""An extent that no other tensor has."""


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(LENGTH):
            x = torch.sin(x) * 1.5
        return x


def chain() -> tuple[Graph, torch.Tensor]:
    x = torch.linspace(-1, 1, EXTENT)
    route = Route.from_case(Case("chain", "real", "llvm"))
    return route.graph(route.export(Chain(), (x,))), x


def alive() -> int:
    gc.collect()
    return sum(type(item) is torch.Tensor and item.shape == (EXTENT,) for item in gc.get_objects())


def test_values_are_those_of_pytorch_and_of_float64_and_go_when_they_are_released() -> None:
    graph, x = chain()
    (output,) = graph.outputs
    before = alive()
    reference = NodeValues(graph, (x,), torch_nodes=[output], exact_nodes=[output])
    assert torch.equal(reference.torch_value(output), Chain()(x))
    exact = reference.exact_value(output)
    assert exact.dtype is torch.float64
    assert torch.equal(exact, Chain()(x.double()))
    del exact
    assert alive() - before == 2
    reference.release(torch_nodes=[output], exact_nodes=[output])
    assert alive() == before


def test_float64_from_sources_begins_with_pytorchs_own_values() -> None:
    graph, x = chain()
    output = graph.nodes[graph.outputs[0]]
    middle = needed_calls([output])[LENGTH]
    reference = NodeValues(graph, (x,), torch_nodes=[middle.name, output.name], exact_nodes=[])
    rest = needed_calls([output])[LENGTH + 1 :]
    assert region(output, [middle]) == rest
    value = reference.torch_value(middle.name).double()
    for node in rest:
        value = torch.sin(value) if "sin" in node.name else value * 1.5
    assert torch.equal(reference.locally_exact_value(output.name, [middle.name]), value)


@given(st.floats(0.1, 1000), st.integers(-20, 20), st.integers(0, 2**32 - 1))
def test_a_deviation_is_in_units_of_pytorchs_whatever_the_scale(times: float, exponent: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    exact = generator.normal(size=200) * 2.0**exponent
    error = 1e-5 * generator.normal(size=200) * 2.0**exponent  # far above the floor
    found = deviation(exact + times * error, exact + error, exact)
    assert np.isclose(found.r_rms, times, rtol=1e-6)
    assert np.isclose(found.r_inf, times, rtol=1e-6)
    assert np.isclose(found.error, times * found.torch_error, rtol=1e-6)


def test_what_had_to_be_equal_is_wrong_without_measure() -> None:
    truth = np.array([True, False, True])
    assert deviation(truth, truth, truth).excess == 0
    assert deviation(~truth, truth, truth).wrong == 3
    assert deviation(~truth, truth, ~truth).excess == 0  # float64 decides so as well
    whole = np.array([1.0, 2.0], np.float32)
    assert np.isinf(deviation(np.array([1.0, np.nan], np.float32), whole, whole.astype(np.float64)).excess)


def test_nan_is_wrong_also_where_pytorch_overflows_and_float64_does_not() -> None:
    value, exact = np.array([np.inf, 1], np.float32), np.array([1e39, 1])
    assert deviation(value, value, exact).excess == 0
    assert deviation(np.array([np.finfo(np.float32).max, 1], np.float32), value, exact).excess == 0
    assert deviation(np.array([np.nan, 1], np.float32), value, exact).wrong == 1
    assert np.isinf(deviation(np.full(2, np.nan, np.float32), value, exact).excess)
