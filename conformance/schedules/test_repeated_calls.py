"""Calls with the same arguments are made once and told with all operators that they compute; results stay the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from tvm import ir, relax

from conformance.support.examples import examples
from conformance.support.operators import compiled, module_of
from conformance.support.place import cpu_target
from harness.compiler.schedules.common.origins import bindings_of, callee
from harness.compiler.schedules.common.provenance import How, trace
from harness.compiler.schedules.cpu.pipeline import to_loops
from harness.compiler.targets import TARGETS

op = relax.op
SIDE = 16
STEPS = ("add", "subtract", "maximum", "matmul", "transpose")
programs = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=8)
"""What each step does with which two of the values so far, counted back from the last."""


def layers(memory: relax.Expr, position: relax.Expr, *weights: relax.Expr) -> relax.Expr:
    """Linear layers that all read the same sum, as keys do in the layers of a decoder."""
    builder = relax.BlockBuilder.current()
    keys = [builder.emit(op.matmul(builder.emit(op.add(memory, position)), weight)) for weight in weights]
    return op.concat(keys, 1)


LAYERS = module_of(layers, [(40, 48)] * 2 + [(48, 48)] * 3)


def test_what_all_layers_need_is_computed_once() -> None:
    main = to_loops(LAYERS, cpu_target())["main"]
    called = Counter(callee(binding.value) for binding in bindings_of(main) if isinstance(binding.value, ir.Call))
    assert (called["add"], called["matmul"]) == (1, 3)


@pytest.mark.parametrize("target", TARGETS)
def test_every_layer_finds_its_operators(target: str) -> None:
    tvm_target = TARGETS[target].tvm_target()
    operators = trace(LAYERS, TARGETS[target].pipeline(tvm_target), tvm_target)
    sums = [operator for operator in operators if operator.name == "add"]
    assert [(operator.how, operator.beside) for operator in sums] == [(How.DEFAULT, ("add",) * 3)] * 3
    assert [operator.how for operator in operators if operator.name == "matmul"] == [How.KERNEL] * 3


def test_a_result_is_no_name_of_another() -> None:
    """A caller may write into one of two results that are alike."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([SIDE, SIDE], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            results = [builder.emit_output(op.exp(x)), builder.emit_output(op.exp(x))]
        builder.emit_func_output(relax.Tuple(results))
    body = to_loops(builder.get(), cpu_target())["main"].body
    assert len(set(body.body.fields)) == 2


@examples(12, deadline=None)
@given(programs)
def test_programs_compute_what_they_did(program: list[tuple[str, int, int]]) -> None:
    def relaxed(x: relax.Expr, y: relax.Expr) -> relax.Expr:
        builder, values = relax.BlockBuilder.current(), [x, y]
        for step, i, j in program:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            made = op.permute_dims(a) if step == "transpose" else getattr(op, step)(a, y if step == "matmul" else b)
            values.append(builder.emit(made))
        return op.concat(values, 0)

    def computed(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        values = [x, y]
        for step, i, j in program:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(a.T if step == "transpose" else getattr(np, step)(a, y if step == "matmul" else b))
        return np.concatenate(values)

    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (SIDE, SIDE)).astype(np.float32)
    y = np.eye(SIDE, dtype=np.float32)[rng.permutation(SIDE)]  # so that every sum is exact
    np.testing.assert_array_equal(compiled(relaxed, [x.shape, y.shape])(x, y), computed(x, y))
    assert not _repeated(to_loops(module_of(relaxed, [x.shape, y.shape]), cpu_target()))


def _repeated(module: tvm.IRModule) -> bool:
    calls = [
        tvm_ffi.structural_hash(binding.value)
        for binding in bindings_of(module["main"])
        if isinstance(binding.value, ir.Call) and isinstance(binding.var, relax.DataflowVar)
    ]
    return len(set(calls)) < len(calls)
