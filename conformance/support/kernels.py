"""Compiles Relax operators with weights by the CPU pipeline, and compares them with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax

from conformance.support.operators import EPSILON, rms
from conformance.support.place import build, cpu_target, functions, virtual_machine
from harness.compiler.schedules.cpu import cpu_pipeline

RATIO = 1.5
"""How much larger than PyTorch's the rms error against float64 may be."""

Operator = Callable[..., relax.Expr]
Arrays = Sequence[np.ndarray]
Shape = Sequence[int | tvm.tirx.Var]
"""Extents, which may be symbolic."""


def lowered(
    operator: Operator, inputs: Arrays, weights: Arrays = (), target: tvm.target.Target | None = None
) -> tvm.IRModule:
    """Returns the operator of inputs and weights after the CPU pipeline."""
    types = [relax.TensorType(list(array.shape), str(array.dtype)) for array in [*inputs, *weights]]
    return _lowered(operator, types, len(inputs), target)


def lowered_for(
    operator: Operator, shapes: Sequence[Shape], target: tvm.target.Target | None = None, inputs: int | None = None
) -> tvm.IRModule:
    """Returns the same for fp32 tensors of these shapes: first inputs (all if None), then weights."""
    types = [relax.TensorType(list(shape), "float32") for shape in shapes]
    return _lowered(operator, types, len(types) if inputs is None else inputs, target)


def _lowered(
    operator: Operator, types: Sequence[relax.TensorType], inputs: int, target: tvm.target.Target | None
) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    parameters = [relax.Var(f"x{n}", ty) for n, ty in enumerate(types)]
    with builder.function("main", parameters, attrs={"num_input": inputs}):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(operator(*parameters)))
        builder.emit_func_output(result)
    target = target or cpu_target()
    return cpu_pipeline(target)(builder.get())


def run(
    operator: Operator, inputs: Arrays, weights: Arrays = (), target: tvm.target.Target | None = None
) -> np.ndarray:
    """Computes the result of the compiled operator."""
    target = target or cpu_target()
    return run_module(lowered(operator, inputs, weights, target), inputs, weights, target)


def run_module(module: tvm.IRModule, inputs: Arrays, weights: Arrays, target: tvm.target.Target) -> np.ndarray:
    """Computes the result of a lowered module for inputs and weights."""
    return call_of(machine_of(module, target), weights)(*inputs)


def call_of(machine: Any, weights: Arrays = ()) -> Callable[..., np.ndarray]:
    """Returns the function of its inputs that a module on a virtual machine is with weights that are loaded once."""

    def tensors(arrays: Arrays) -> list[tvm.runtime.Tensor]:
        return [tvm.runtime.tensor(np.asarray(array, order="C")) for array in arrays]

    loaded = list(machine["main_transform_params"](tensors(weights))) if weights else []
    return lambda *inputs: machine["main"](*tensors(inputs), *loaded).numpy()


def machine_of(module: tvm.IRModule, target: tvm.target.Target | None = None) -> Any:
    """Returns the virtual machine that runs a lowered module."""
    target = target or cpu_target()
    return virtual_machine(build(module, target), target)


def call_function(function: tvm.tirx.PrimFunc, x: np.ndarray, extent: int) -> np.ndarray:
    """Returns the second tensor, fp32 [extent], which a function of two tensors writes."""
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    result = tvm.runtime.tensor(np.zeros(extent, np.float32))
    functions(tvm.compile(module, cpu_target()))["main"](tvm.runtime.tensor(x), result)
    return result.numpy()


def hold(
    operator: Operator,
    reference: Callable[..., torch.Tensor],
    inputs: Arrays,
    weights: Arrays = (),
    *,
    target: tvm.target.Target | None = None,
    large: bool = False,
) -> np.ndarray:
    """Holds the compiled operator to PyTorch; see `hold_result`."""
    return hold_result(run(operator, inputs, weights, target), reference, [*inputs, *weights], large=large)


def hold_result(
    actual: np.ndarray, reference: Callable[..., torch.Tensor], arrays: Arrays, *, large: bool = False
) -> np.ndarray:
    """Holds a result to PyTorch's of the same arrays: strict gate, NaN mask, and rms error against float64.

    Where the result is too small for statistics, errors count from four roundings on, as in the report's r_rms; if it
    is `large`, from the rounding of an exact result on.
    """
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    with torch.no_grad():
        expected = reference(*tensors).numpy()
        exact = reference(*[t.double() if t.is_floating_point() else t for t in tensors]).numpy()
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    a, t, d = actual[finite], expected[finite], exact[finite]
    outside = np.abs(a - t) > 1e-5 + 1e-5 * np.abs(t)
    assert not outside.any(), f"{outside.sum()} of {outside.size} elements outside the strict gate"
    floor = 0.3 if large else 4.0
    assert rms(a - d) <= RATIO * max(rms(t - d), floor * EPSILON * rms(d))
    return actual


def functions_of(module: tvm.IRModule) -> list[str]:
    """Names of the compiled loops, without the Relax functions that call them."""
    return sorted(v.name_hint for v, f in module.functions_items() if isinstance(f, tvm.tirx.PrimFunc))
