"""Compiles many small expressions as one program for a GPU, emulates it, and compares it with PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm

from conformance.support.operators import EPSILON, rms
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.importing import import_program
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import build_library, lower_module, target_for
from harness.core.processes.call import WorkerEnd, run_isolated
from harness.core.processors import Processors

KINDS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cuda", "metal")]
"""What a test of both kinds is parametrized with."""
ORDERS = {"cuda": ("run_descending",), "metal": ("run",)}
"""CUDA's threads take turns in one order and Metal's in the other: a missing barrier shows in one of them."""
ONE_ARCHITECTURE = Processors(cuda="sm_80")
"""Kernels that are emulated need no machine code of others."""
RATIO = 1.5
"""How much larger than PyTorch's the rms error against float64 may be."""


@dataclass(frozen=True)
class Expression:
    """A function of tensors, with its arguments."""

    name: str
    function: Callable[..., torch.Tensor]
    arguments: tuple[torch.Tensor, ...]


class Program(torch.nn.Module):
    """All expressions; it takes their arguments one after the other."""

    def __init__(self, expressions: Sequence[Expression]) -> None:
        super().__init__()
        self.expressions = expressions

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        waiting = iter(arguments)
        return tuple(e.function(*(next(waiting) for _ in e.arguments)) for e in self.expressions)


def skip_unless_emulated(kind: str) -> None:
    """Skips a test where the kind cannot be compiled, or need not be emulated."""
    if problem := TARGETS[kind].compile_problem():
        pytest.skip(problem)
    if TARGETS[kind].run_problem() is None:
        pytest.skip(f"{kind} runs on this machine, and nothing needs to be emulated")


def target_of(kind: str, processors: Processors = ONE_ARCHITECTURE) -> tvm.target.Target:
    """Returns TVM's target with this machine's CPU as its host."""
    return target_for(TARGETS[kind], processors, for_emulation=True)


def lowered(expressions: Sequence[Expression], kind: str, before: Sequence[tvm.transform.Pass] = ()) -> tvm.IRModule:
    """Returns the program after the target's pipeline; passes of TVM may come before it."""
    arguments = tuple(argument for e in expressions for argument in e.arguments)
    program, _ = import_program(export_program(Program(expressions), arguments))
    with target_of(kind):
        program = tvm.transform.Sequential(list(before))(program)
    return lower_module(program, TARGETS[kind], target_of(kind))


def emulated(
    expressions: Sequence[Expression],
    kind: str,
    folder: Path,
    orders: Sequence[str] = ("run",),
    before: Sequence[tvm.transform.Pass] = (),
) -> list[list[np.ndarray]]:
    """Results of all expressions, once for each order of threads: `run`, `run_descending`; `before` as of `lowered`."""
    library = folder / "program.so"
    build_library(lowered(expressions, kind, before), target_of(kind), library, keep_source=True)
    arrays = [argument.numpy() for e in expressions for argument in e.arguments]
    results = []
    for order in orders:
        ended = run_isolated(f"conformance.support.emulated:{order}", (kind, str(library), [], arrays), timeout=600)
        assert ended.kind is WorkerEnd.OK, ended.error
        results.append(ended.value)
    return results


def hold(expression: Expression, actual: np.ndarray) -> None:
    """Holds a result to PyTorch: infinities, NaN, and the rms error against float64, of four roundings at least."""
    arguments = expression.arguments
    with torch.no_grad():
        expected = expression.function(*arguments).numpy()
        wide = [a.double() if a.is_floating_point() else a for a in arguments]
        exact = expression.function(*wide).numpy()
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, expression.name
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], err_msg=expression.name)
    a, t, d = actual[finite], expected[finite], exact[finite]
    ratio = rms(a - d) / max(rms(t - d), 4 * EPSILON * rms(d), 1e-45)
    assert ratio <= RATIO, f"{expression.name}: r_rms {ratio:.2f}"
