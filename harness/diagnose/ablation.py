"""Finds the cause of a divergence: runs the operators of one kernel again, each time with more of this project."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import tvm

from harness.diagnose.compiler import Compiler
from harness.diagnose.diagnosis import WAYS, Ablation, Cause, Experiment, ImportWay, Rerun, Retrial
from harness.diagnose.pieces import Subgraph, SubgraphExtractor
from harness.lowering.frontends.running import Arrays, run_module
from harness.processes.threads import run_on_tvm_threads

if TYPE_CHECKING:
    from harness.diagnose.deviation import Deviation
    from harness.diagnose.fault import Fault


def ablate(
    extractor: SubgraphExtractor,
    larger_extractor: SubgraphExtractor,
    compiler: Compiler,
    fault: Fault | None,
    unsteady: bool = False,
) -> Ablation:
    """Computes the operators of a kernel with more and more of this project, until the result is wrong.

    The result must be wrong in the same way as in the program: TVM alone may be too inaccurate where this project's
    kernels are not. If no experiment is wrong in the same way, the first wrong one decides. The wrong experiment runs
    again on one thread, and without LLVM's optimizations, to recognize loops whose tasks disturb each other and faults
    of code generation. If it contains nothing of this project, the nodes are imported in other ways. If fusion makes it
    wrong, the responsible pass is searched. Finally, the operators before the kernel are added, because loops are fused
    differently if a kernel begins with the end of an earlier operator.

    Args:
        extractor: Extracts the operators of the kernel.
        larger_extractor: Extracts these and the operators of the calls that compute its inputs.
        compiler: Compiler of the program.
        fault: Fault of the kernel's result in the program; None if it is unknown.
        unsteady: Whether the kernel's results for the same values do not always have the same bits, so that an
            experiment may be right by chance.
    """
    subgraph = extractor.extract()
    ways = [(cause, extractor) for cause in WAYS]
    ways += [(Cause.FUSION, larger_extractor)] if larger_extractor.sources != extractor.sources else []
    experiments: list[Experiment] = []
    differently_wrong: tuple[list[Experiment], SubgraphExtractor, Subgraph] | None = None
    for cause, chosen in ways:
        subgraph = subgraph if chosen is extractor else chosen.extract()
        result, problem, fault_found = _try(subgraph, partial(compiler.result, subgraph, cause))
        experiment = Experiment(cause, result, problem, with_before=chosen is not extractor)
        if fault_found is not None and (fault is None or fault.same(fault_found)):
            return _examine([*experiments, experiment], chosen, subgraph, compiler)
        if fault_found is not None and differently_wrong is None:
            differently_wrong = [*experiments, experiment], chosen, subgraph
        experiments.append(replace(experiment, otherwise=fault_found is not None))
    if differently_wrong is not None:
        return _examine(*differently_wrong, compiler)
    undecided = experiments[len(WAYS) - 1].result is None
    return Ablation(tuple(experiments), None if undecided else Cause.SCHEDULE if unsteady else Cause.RUNTIME)


def _examine(
    experiments: list[Experiment], extractor: SubgraphExtractor, subgraph: Subgraph, compiler: Compiler
) -> Ablation:
    """Examines a subgraph whose last experiment is wrong."""
    cause = experiments[-1].decides
    ablation = Ablation(tuple(experiments), cause, tuple(_rerun(subgraph, cause, compiler)))
    if ablation.fixed_by is Rerun.UNOPTIMIZED:
        return replace(ablation, cause=Cause.CODE_GENERATION)
    if cause is Cause.IMPORTER:
        return replace(ablation, imports=tuple(_import_again(extractor, subgraph, compiler)))
    return replace(ablation, passes=_wrong_passes(subgraph, compiler)) if cause is Cause.FUSION else ablation


def _rerun(subgraph: Subgraph, way: Cause, compiler: Compiler) -> Iterator[Retrial]:
    """Repeats a wrong experiment in other ways, until it is right."""
    runs = {
        Rerun.ONE_THREAD: lambda: run_on_tvm_threads(1, partial(compiler.result, subgraph, way)),
        Rerun.UNOPTIMIZED: lambda: compiler.unoptimized().result(subgraph, way),
    }
    for rerun, run in runs.items():
        result, problem, _ = _try(subgraph, run)
        yield Retrial(rerun, result, problem)
        if result is not None and result.excess <= 1:
            return


def _try(subgraph: Subgraph, run: Callable[[], Arrays]) -> tuple[Deviation | None, str, Fault | None]:
    """Returns error and fault of the first result, or why there is no result, which decides nothing."""
    try:
        result = run()[0]
        return subgraph.deviation(result), "", subgraph.fault(result)
    except Exception as error:  # TVM cannot import or compile the subgraph in this way
        return None, (str(error).strip() or type(error).__name__).splitlines()[-1], None


def _import_again(extractor: SubgraphExtractor, subgraph: Subgraph, compiler: Compiler) -> Iterator[Retrial]:
    from harness.lowering.frontends import onnx
    from harness.lowering.frontends.torch_export.running import import_raw

    program, values = extractor.torch_module(subgraph.sources)
    inputs = tuple(values.values())

    def run_raw() -> Arrays:
        return _run(import_raw(program, inputs), inputs, compiler)

    def run_onnx() -> Arrays:
        module, weights = onnx.import_module(program, inputs)
        return _run(module, (*inputs, *map(torch.from_numpy, weights.values())), compiler)

    yield Retrial(ImportWay.RAW, *_try(subgraph, run_raw)[:2])
    yield Retrial(ImportWay.ONNX, *_try(subgraph, run_onnx)[:2])


def _run(module: tvm.IRModule, inputs: tuple[torch.Tensor, ...], compiler: Compiler) -> Arrays:
    return run_module(module, [value.detach().numpy() for value in inputs], compiler.tvm_target)


def _wrong_passes(subgraph: Subgraph, compiler: Compiler) -> tuple[str, ...]:
    """Returns the pass before which a subgraph is right and after which it is wrong; see `Ablation.passes`."""
    names: list[str] = []
    for name, run in compiler.after_each_pass(subgraph):
        names.append(name)
        result, _, _ = _try(subgraph, run)
        if result is None:
            continue
        if result.excess > 1:
            return tuple(names)
        names = []
    return tuple(names)
