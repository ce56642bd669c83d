"""The cause of a divergence: the operators of one kernel are computed again, each time with more of this project."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import tvm

from harness.diagnose.compiler import Compiler
from harness.diagnose.diagnosis import WAYS, Ablation, Cause, Experiment, ImportWay, Rerun, Retrial
from harness.diagnose.pieces import Piece, Pieces
from harness.lowering.frontends.running import Arrays, run_module
from harness.processes.threads import run_on_tvm_threads

if TYPE_CHECKING:
    from harness.diagnose.deviation import Deviation
    from harness.diagnose.fault import Fault


def ablate(pieces: Pieces, before: Pieces, compiler: Compiler, fault: Fault | None, unsteady: bool = False) -> Ablation:
    """Computes the operators of a kernel in ways that have more and more of this project in them, until one is wrong.

    It must be wrong as the program is: TVM alone may be too inaccurate where this project's kernels are not. If none is
    wrong in the same way, the first that is wrong decides.
    What is wrong runs again on one thread, and without LLVM's optimizations: loops whose tasks disturb each other and
    faults of code generation are told apart so. What is wrong without any of this project is imported in other ways;
    where fusing makes it wrong, the pass is looked for.
    Loops are fused otherwise where a kernel begins with the end of an operator before it: these are added at last.

    Args:
        pieces: Cuts out the operators of the kernel.
        before: Cuts out these and those of the calls that make its inputs.
        compiler: What the program is compiled for.
        fault: What is wrong with the result of the kernel in the program; None if that is not known.
        unsteady: Whether the kernel does not always make the same bits of the same values; an experiment may be right
            by chance then.
    """
    piece = pieces.cut()
    ways = [(cause, pieces) for cause in WAYS]
    ways += [(Cause.FUSION, before)] if before.sources != pieces.sources else []
    experiments: list[Experiment] = []
    other: tuple[list[Experiment], Pieces, Piece] | None = None
    for cause, cutting in ways:
        piece = piece if cutting is pieces else cutting.cut()
        result, problem, found = _tried(piece, partial(compiler.result, piece, cause))
        made = Experiment(cause, result, problem, with_before=cutting is not pieces)
        if found is not None and (fault is None or fault.same(found)):
            return _decided([*experiments, made], cutting, piece, compiler)
        if found is not None and other is None:
            other = [*experiments, made], cutting, piece
        experiments.append(replace(made, otherwise=found is not None))
    if other is not None:
        return _decided(*other, compiler)
    undecided = experiments[len(WAYS) - 1].result is None
    return Ablation(tuple(experiments), None if undecided else Cause.SCHEDULE if unsteady else Cause.RUNTIME)


def _decided(experiments: list[Experiment], pieces: Pieces, piece: Piece, compiler: Compiler) -> Ablation:
    """Looks closer at a piece with which the last experiment is wrong."""
    cause = experiments[-1].decides
    found = Ablation(tuple(experiments), cause, tuple(_reruns(piece, cause, compiler)))
    if found.mended is Rerun.UNOPTIMIZED:
        return replace(found, cause=Cause.CODE_GENERATION)
    if cause is Cause.IMPORTER:
        return replace(found, imports=tuple(_imports(pieces, piece, compiler)))
    return replace(found, passes=_passes(piece, compiler)) if cause is Cause.FUSION else found


def _reruns(piece: Piece, way: Cause, compiler: Compiler) -> Iterator[Retrial]:
    """Makes an experiment that is wrong again, until it is right."""
    runs = {
        Rerun.ONE_THREAD: lambda: run_on_tvm_threads(1, partial(compiler.result, piece, way)),
        Rerun.UNOPTIMIZED: lambda: compiler.unoptimized().result(piece, way),
    }
    for how, run in runs.items():
        result, problem, _ = _tried(piece, run)
        yield Retrial(how, result, problem)
        if result is not None and result.excess <= 1:
            return


def _tried(piece: Piece, run: Callable[[], Arrays]) -> tuple[Deviation | None, str, Fault | None]:
    """Returns the error of the first result and what is wrong with it, or why there is none: that decides nothing."""
    try:
        result = run()[0]
        return piece.judged(result), "", piece.fault(result)
    except Exception as error:  # what TVM cannot import or compile in this way
        return None, (str(error).strip() or type(error).__name__).splitlines()[-1], None


def _imports(pieces: Pieces, piece: Piece, compiler: Compiler) -> Iterator[Retrial]:
    from harness.lowering.frontends import onnx
    from harness.lowering.frontends.torch_export.running import import_raw

    program, values = pieces.program(piece.sources)
    given = tuple(values.values())

    def raw() -> Arrays:
        return _run(import_raw(program, given), given, compiler)

    def by_onnx() -> Arrays:
        module, weights = onnx.import_module(program, given)
        return _run(module, (*given, *map(torch.from_numpy, weights.values())), compiler)

    yield Retrial(ImportWay.RAW, *_tried(piece, raw)[:2])
    yield Retrial(ImportWay.ONNX, *_tried(piece, by_onnx)[:2])


def _run(module: tvm.IRModule, given: tuple[torch.Tensor, ...], compiler: Compiler) -> Arrays:
    return run_module(module, [value.detach().numpy() for value in given], compiler.tvm_target)


def _passes(piece: Piece, compiler: Compiler) -> tuple[str, ...]:
    """Returns the pass before which a piece is right and after which it is wrong; see `Ablation.passes`."""
    since: list[str] = []
    for name, run in compiler.after_each_pass(piece):
        since.append(name)
        result, _, _ = _tried(piece, run)
        if result is None:
            continue
        if result.excess > 1:
            return tuple(since)
        since = []
    return tuple(since)
