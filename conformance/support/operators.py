"""Relax operators as functions on NumPy arrays: compiled by the CPU pipeline, for the tests of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from conformance.support.place import cpu_target, virtual_machine
from harness.compiler.schedules.common.code_generation import generate
from harness.compiler.schedules.cpu import cpu_pipeline

EPSILON = float(np.finfo(np.float32).eps)


def module_of(
    operator: Callable[..., relax.Expr], shapes: Sequence[tuple[int, ...]], dtype: str = "float32"
) -> tvm.IRModule:
    """A module whose `main` applies the operator to parameters of these shapes."""
    builder = relax.BlockBuilder()
    parameters = [relax.Var(f"x{n}", relax.TensorType(list(shape), dtype)) for n, shape in enumerate(shapes)]
    with builder.function("main", parameters):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(operator(*parameters)))
        builder.emit_func_output(result)
    return builder.get()


def compiled(
    operator: Callable[..., relax.Expr],
    shapes: Sequence[tuple[int, ...]],
    dtype: str = "float32",
    target: tvm.target.Target | None = None,
) -> Callable[..., np.ndarray]:
    """The operator, compiled by `cpu_pipeline` for this machine's CPU or for `target`."""
    target = target or cpu_target()
    module = module_of(operator, shapes, dtype)
    executable = generate(lambda chosen: relax.build(module, chosen, relax_pipeline=cpu_pipeline(target)), target)
    machine = virtual_machine(executable, target)

    def run(*arrays: np.ndarray) -> np.ndarray:
        return machine["main"](*[tvm.runtime.tensor(np.asarray(a, order="C"), tvm.cpu()) for a in arrays]).numpy()

    return run


def normal(shape: Sequence[int], seed: int = 0, scale: float = 1.0, offset: float = 0.0) -> np.ndarray:
    """Seeded fp32 normal numbers."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale + offset).astype(np.float32)


def rms(values: Any) -> float:
    """Root mean square in fp64."""
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64))))) if np.size(values) else 0.0


def error_ratio(actual: np.ndarray, reference: np.ndarray, oracle: np.ndarray) -> float:
    """Rms error of `actual` over that of `reference`, both against fp64; a single rounding is the floor."""
    finite = np.isfinite(oracle)
    np.testing.assert_array_equal(actual[~finite], reference[~finite])
    exact = oracle[finite]
    floor = 0.3 * EPSILON * rms(exact)
    return rms(actual[finite] - exact) / max(rms(reference[finite] - exact), floor, 1e-45)
