"""Inputs with axes whose extents are not known when a program is compiled, from PyTorch to a library."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, tirx

from conformance.support.examples import examples
from conformance.support.kernels import machine_of
from conformance.support.sentences import sentence
from harness.compiler.lowering.frontends.torch_export.slices import mark_inbound_slices
from harness.compiler.lowering.route import Lowered, Route
from harness.compiler.lowering.symbolic import describe_symbolic_support, takes_symbolic_axes
from harness.compiler.schedules.cpu import cpu_pipeline
from harness.compiler.targets import TARGETS
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.program import Axis

pytestmark = pytest.mark.smoke

ROWS, MORE = Axis("rows", 1, 16), Axis("more", 4, 64)
AXES = ({0: ROWS}, {0: MORE}, {})


class Joined(torch.nn.Module):
    """Cuts a joined tensor where its first part ends, as attention to memories and pointers does."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined = torch.cat([x.flatten(0, 1), y])
        first = joined.shape[0] - y.shape[0]
        doubled = torch.cat([joined[:first] * 2, joined[first:]])
        return doubled + z, joined[:2], joined[-y.shape[0] :]


def example(rows: int, more: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 100 + more)
    return tuple(torch.randn(shape, generator=generator) for shape in ((rows, 6, 8), (more, 8), (8,)))


def lowered(rows: int, more: int) -> Lowered:
    route = Route()
    return route.lower(route.export(Joined(), example(rows, more), AXES), Joined())


def machine(rows: int, more: int) -> relax.VirtualMachine:
    return machine_of(cpu_pipeline(TARGETS["llvm"].tvm_target())(lowered(rows, more).module))


@pytest.fixture(scope="module")
def compiled() -> relax.VirtualMachine:
    return machine(3, 8)


@examples(20)
@given(rows=st.integers(1, 16), more=st.integers(4, 64))
def test_one_library_for_every_extent(compiled: relax.VirtualMachine, rows: int, more: int) -> None:
    inputs = example(rows, more)
    results = compiled["main"](*(tvm.runtime.tensor(tensor.numpy()) for tensor in inputs))
    for actual, expected in zip(results, Joined()(*inputs), strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected.numpy())


def test_an_example_of_one() -> None:
    """Of an extent of one, torch.export would make a constant."""
    inputs = example(5, 7)
    results = machine(1, 4)["main"](*(tvm.runtime.tensor(tensor.numpy()) for tensor in inputs))
    np.testing.assert_array_equal(results[0].numpy(), Joined()(*inputs)[0].numpy())


def test_extents_are_simple() -> None:
    """What slices leave has no minima in it, and every axis of an input is a variable of its own."""
    main = lowered(3, 8).module["main"]
    assert [isinstance(parameter.ty.shape.values[0], tirx.Var) for parameter in main.params[:2]] == [True, True]
    shapes = [
        binding.var.ty.shape
        for block in main.body.blocks
        for binding in block.bindings
        if hasattr(binding.var.ty, "shape")
    ]
    assert shapes and not any("min" in str(shape) for shape in shapes)


def test_a_slice_that_may_end_outside_is_left_alone() -> None:
    n = tirx.Var("n", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([n, 4], "float32"))
    ranges = {"tir_var_lower_bound": {"n": 6}, "tir_var_upper_bound": {"n": 20}}
    with builder.function("main", [x], attrs=ranges):
        with builder.dataflow():
            parts = [builder.emit(relax.op.strided_slice(x, [0], [0], [end])) for end in (6, 7)]
            result = builder.emit_output(relax.Tuple(parts))
        builder.emit_func_output(result)
    inside, outside, *_ = mark_inbound_slices(builder.get())["main"].body.blocks[0].bindings
    assert inside.value.attrs.assume_inbound and not outside.value.attrs.assume_inbound


def test_the_frontend_onnx_takes_none() -> None:
    with pytest.raises(HarnessError, match=sentence("no-symbolic-axes", name="onnx")):
        Route(frontend="onnx").export(Joined(), example(3, 8), AXES)
    assert not Route(frontend="onnx").symbolic and Route().symbolic


@pytest.mark.parametrize("strategy", ["none", "lowering", "converter", "llm", "tensorir"])
def test_strategies_that_take_none(strategy: str) -> None:
    assert not Route(strategy=strategy).symbolic
    with pytest.raises(HarnessError, match=sentence("no-symbolic-axes", kind="strategy", name=strategy)):
        Route(strategy=strategy).export(Joined(), example(3, 8), AXES)


def test_what_takes_symbolic_axes_is_what_takes_them() -> None:
    assert describe_symbolic_support() == "the target llvm, the strategy real and the frontend torch"
    case = Case("memory_attention", "real", "llvm")
    assert takes_symbolic_axes(case)
    for other in ({"target": "cuda"}, {"strategy": "lowering"}, {"frontend": "onnx"}):
        assert not takes_symbolic_axes(replace(case, **other))
