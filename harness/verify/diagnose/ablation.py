"""Finds the cause of a divergence: runs the operators of one kernel again, each time with more of this project."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from tvm import ir, relax

from harness.compiler.execution.executors import poison_allocation
from harness.compiler.lowering.frontends.running import Arrays, run_module
from harness.compiler.lowering.frontends.torch_export.importing import import_raw
from harness.compiler.schedules import Schedules
from harness.compiler.schedules.common.origins import bindings_of
from harness.compiler.schedules.common.vm import lower_to_vm
from harness.compiler.schedules.cpu.pipeline import LEGALIZE, loop_passes
from harness.compiler.targets.compiling import LIBRARY_SUFFIX, build_library
from harness.compiler.targets.target import Target
from harness.core.files import temporary_folder
from harness.core.processes.threads import run_on_tvm_threads
from harness.core.program import Array
from harness.runtime.executable import Executable
from harness.verify.diagnose.deviation import Deviation, Fault
from harness.verify.diagnose.diagnosis import WAYS, Ablation, Cause, Experiment, ImportWay, Rerun, Retrial
from harness.verify.diagnose.subgraph import (
    Subgraph,
    SubgraphExtractor,
    free_extents,
    read_variables,
    replace_main,
    weights_to_inputs,
)


@dataclass(frozen=True)
class Compiler:
    """The target and schedules that a program is compiled for.

    Attributes:
        target: The target.
        tvm_target: TVM's target.
        schedules: Tuned schedules.
    """

    target: Target
    tvm_target: tvm.target.Target
    schedules: Schedules

    def unoptimized(self) -> Compiler:
        """Returns a compiler that builds the same modules, without LLVM's optimizations."""
        return replace(self, tvm_target=tvm.target.Target({**self.tvm_target.export(), "opt-level": 0}))

    def run_experiment(self, subgraph: Subgraph, cause: Cause) -> list[Array]:
        """Compiles and runs a subgraph as `WAYS` says for a cause, and returns its one result in a list."""
        if cause is Cause.IMPORTER:
            pipeline = relax.get_default_pipeline(self.tvm_target)
            return self._run(weights_to_inputs(subgraph.module), pipeline, subgraph.arguments, len(subgraph.arguments))
        if cause is Cause.LEGALIZATION:
            return self._run(self.legalize(subgraph.module), lower_to_vm(), subgraph.arguments, len(subgraph.arguments))
        if cause is Cause.SCHEDULE:
            return _run_separately(subgraph, self)
        return self.run(subgraph.module, subgraph.arguments)

    def legalize(self, module: tvm.IRModule) -> tvm.IRModule:
        """Returns a module after this project's legalizations, with unscheduled loops and weights as inputs."""
        return relax.transform.LegalizeOps(dict(LEGALIZE))(weights_to_inputs(module))

    def run(self, module: tvm.IRModule, arguments: Sequence[Array]) -> list[Array]:
        """Compiles a module as the program is compiled, and runs it."""
        pipeline = self.target.pipeline(self.tvm_target, self.schedules)
        return self._run(module, pipeline, arguments, int(module["main"].attrs["num_input"]))

    def _run(
        self, module: tvm.IRModule, pipeline: tvm.transform.Pass, arguments: Sequence[Array], num_inputs: int
    ) -> list[Array]:
        """Lowers a module, generates code and runs it; the arguments after the first `num_inputs` are weights."""
        with self.tvm_target, tvm.transform.PassContext(opt_level=3):
            lowered = pipeline(module)
        with temporary_folder("diagnose") as folder:
            library = Path(folder) / f"piece{LIBRARY_SUFFIX}"
            build_library(lowered, self.tvm_target, library)
            executable = Executable(library, self.target.device(), arguments[num_inputs:], poison_allocation)
            return executable.run(arguments[:num_inputs])

    def after_each_pass(self, subgraph: Subgraph) -> Iterator[tuple[str, Callable[[], list[Array]]]]:
        """Yields each pass of the pipeline by name, with a function that runs a subgraph without the later passes.

        This project's legalizations and TVM's own passes replace the later passes.
        """
        module = subgraph.module
        remaining = tvm.transform.Sequential([relax.transform.LegalizeOps(dict(LEGALIZE)), lower_to_vm()])
        for next_pass in loop_passes(module, self.tvm_target, self.schedules):
            with self.tvm_target, tvm.transform.PassContext(opt_level=3):
                module = next_pass(module)
            run = partial(self._run, module, remaining, subgraph.arguments, subgraph.num_inputs)
            yield str(next_pass.info.name), run
        yield "PlanMemory", lambda: self.run(subgraph.module, subgraph.arguments)


def _run_separately(subgraph: Subgraph, compiler: Compiler) -> list[Array]:
    """Computes each operator in a separate module, from the results of the operators before."""
    main = subgraph.module["main"]
    weights = {parameter.name for parameter in main.params[subgraph.num_inputs :]}
    values: dict[relax.Var, Any] = dict(zip(main.params, subgraph.arguments, strict=True))
    for binding in bindings_of(main):
        value, variable = binding.value, binding.var
        if isinstance(value, ir.Call):
            parameters = sorted(read_variables(value), key=lambda read: read.name in weights)
            free = free_extents([binding], parameters)
            depends_on_inputs = any(read.name not in weights for read in parameters)
            read_weights = weights if depends_on_inputs else ()
            single = replace_main(subgraph.module, [binding], variable, [*free, *parameters], read_weights)
            weights |= set() if depends_on_inputs else {variable.name}
            sizes = [np.zeros(subgraph.extents[extent.name], np.uint8) for extent in free]
            outputs = compiler.run(single, [*sizes, *(values[read] for read in parameters)])
            values[variable] = outputs if isinstance(variable.ty, relax.TupleType) else outputs[0]
        else:
            values[variable] = _evaluate(value, values)
    return list(values[main.body.body])


def _evaluate(value: Any, values: dict[relax.Var, Any]) -> Any:
    """Returns the value of a tuple, of a member of one, of a variable or of a constant."""
    if isinstance(value, relax.Tuple):
        return [_evaluate(member, values) for member in value.fields]
    if isinstance(value, relax.TupleGetItem):
        return values[value.tuple_value][value.index]
    return value.value.numpy() if isinstance(value, ir.GenericConst) else values[value]


def ablate(
    extractor: SubgraphExtractor,
    larger_extractor: SubgraphExtractor,
    compiler: Compiler,
    fault: Fault,
    unsteady: bool,
) -> Ablation:
    """Computes the operators of a kernel with more and more of this project, until the result is wrong.

    The result must be wrong in the same way as in the program: TVM alone may be too inaccurate where this project's
    kernels are not. If no experiment is wrong in the same way, the first wrong one decides. The wrong experiment runs
    again on one thread, and without LLVM's optimizations, to recognize loops whose tasks disturb each other and faults
    of code generation. If it contains nothing of this project, the nodes are imported in other ways. If fusion makes it
    wrong, the responsible pass is searched. Finally, the operators before the kernel are added, because loops are fused
    differently if a kernel begins with the end of an earlier operator; not if all of the others are wrong, each in
    another way, as operators are that read what no one has written.

    Args:
        extractor: Extracts the operators of the kernel.
        larger_extractor: Extracts these and the operators of the calls that compute its inputs.
        compiler: Compiler of the program.
        fault: Fault of the kernel's result in the program.
        unsteady: Whether the kernel's results for the same values do not always have the same bits, so that an
            experiment may be right by chance.
    """
    subgraph = extractor.extract()
    ways = [(cause, extractor) for cause in WAYS]
    ways += [(Cause.FUSION, larger_extractor)] if larger_extractor.sources != extractor.sources else []
    experiments: list[Experiment] = []
    differently_wrong: tuple[list[Experiment], SubgraphExtractor, Subgraph] | None = None
    for cause, chosen in ways:
        if chosen is not extractor and all(experiment.otherwise for experiment in experiments):
            break
        subgraph = subgraph if chosen is extractor else chosen.extract()
        result, problem, fault_found = _try(subgraph, partial(compiler.run_experiment, subgraph, cause))
        experiment = Experiment(cause, result, problem, with_before=chosen is not extractor)
        if fault.same(fault_found):
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


def _rerun(subgraph: Subgraph, cause: Cause, compiler: Compiler) -> Iterator[Retrial]:
    """Repeats a wrong experiment in each way of `Rerun`, until it is right."""
    runs = {
        Rerun.ONE_THREAD: lambda: run_on_tvm_threads(1, partial(compiler.run_experiment, subgraph, cause)),
        Rerun.UNOPTIMIZED: lambda: compiler.unoptimized().run_experiment(subgraph, cause),
    }
    for rerun, run in runs.items():
        result, problem, _ = _try(subgraph, run)
        yield Retrial(rerun, result, problem)
        if result is not None and not result.is_fault:
            return


def _try(subgraph: Subgraph, run: Callable[[], Arrays]) -> tuple[Deviation | None, str, Fault | None]:
    """Returns error and fault of the first result, or why there is no result, which decides nothing."""
    try:
        result = run()[0]
        return subgraph.deviation(result), "", subgraph.fault(result)
    except Exception as error:  # TVM cannot import or compile the subgraph in this way
        return None, (str(error).strip() or type(error).__name__).splitlines()[-1], None


def _import_again(extractor: SubgraphExtractor, subgraph: Subgraph, compiler: Compiler) -> Iterator[Retrial]:
    """Imports the nodes of a subgraph in each way of `ImportWay`, and runs them with TVM's default pipeline."""
    program, values = extractor.torch_module(subgraph.sources)
    inputs = tuple(values.values())

    def run_raw() -> Arrays:
        return _run(import_raw(program, inputs), inputs, compiler)

    def run_onnx() -> Arrays:
        from harness.compiler.lowering.frontends.onnx.importing import import_module

        module, weights = import_module(program, inputs)
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
        if result.is_fault:
            return tuple(names)
        names = []
    return tuple(names)
