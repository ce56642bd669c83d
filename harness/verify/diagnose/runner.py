"""Diagnoses cases: lowers and compiles a program as usual, runs it, and compares it call by call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compiler.lowering.frontends import EXPORTING_PROGRAMS
from harness.compiler.targets import HOST, TARGETS
from harness.core.budget import NO_GROUPS, Groups, check_groups
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.files import temporary_folder
from harness.core.outcome import Stage, Status
from harness.core.precision import PRECISIONS, Precision
from harness.core.settings import Settings
from harness.models.registry import models, subjects
from harness.parity.monte_carlo import SMALL_SIZE
from harness.verify.diagnose.deviation import Deviation
from harness.verify.diagnose.diagnosis import (
    Boundary,
    Cause,
    Coverage,
    Diagnosis,
    Misshapen,
    Reproduction,
    first_divergence,
)
from harness.verify.diagnose.report import document
from harness.verify.report import Result

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    import tvm

    from harness.compiler.lowering.frontends.torch_export.graph import Graph
    from harness.compiler.lowering.route import Lowered
    from harness.core.expectations import Expectation
    from harness.core.program import Program
    from harness.verify.diagnose.ablation import Compiler
    from harness.verify.diagnose.comparison import OutputComparison, RunComparison
    from harness.verify.diagnose.deviation import Fault
    from harness.verify.diagnose.flow import Flow
    from harness.verify.diagnose.reference import Upstream
    from harness.verify.diagnose.subgraph import SubgraphExtractor

OnCompiled = Callable[["tvm.IRModule", Path, "Sequence[npt.NDArray[Any]]"], None]
"""Takes the lowered module of a program, its library, and the imported values of its weights."""


def diagnose(
    case: Case,
    settings: Settings,
    output: str | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    *,
    reproduce: bool = False,
    timeout: float | None = None,
    memory_limit_bytes: int | None = None,
    float32: Groups = NO_GROUPS,
) -> Diagnosis:
    """Diagnoses the main program of a component, in a separate process.

    Args:
        case: The case; its target must run on this CPU.
        settings: Weights, inputs, schedules and processors.
        output: Name of an output, to report only the calls on which it depends; None for all.
        on_stage: Called with the name of each stage, soon after the process has entered it.
        reproduce: Whether to build a reproduction of the first divergent kernel without this project.
        timeout: Time limit in seconds; None for no limit.
        memory_limit_bytes: Limit on resident bytes; None for no limit.
        float32: Groups of products that stay float32 in half precision.

    Raises:
        HarnessError: The case cannot be diagnosed, or does not run.
    """
    from harness.core.processes.call import WorkerEnd, run_isolated

    subject = subjects().get(case.component)
    if subject is None or subject.whole:
        raise HarnessError(f"{case.component} is no component: diagnose the components that it is made of")
    if case.target != HOST.name:
        raise HarnessError(f"kernels of {case.target} cannot be followed yet: choose --target {HOST.name}")
    if reproduce and PRECISIONS[case.precision].is_half:
        raise HarnessError(f"a kernel in {case.precision} is named and not cut out: leave out --reproduce")
    if case.frontend not in EXPORTING_PROGRAMS:
        alternatives = " or ".join(EXPORTING_PROGRAMS)
        raise HarnessError(
            f"the frontend {case.frontend} keeps no nodes of torch.export: choose --frontend {alternatives}"
        )
    if output is not None and output not in subject.outputs:
        raise HarnessError(f"{case.component} has no output {output!r}: choose from {', '.join(subject.outputs)}")
    request = (case, settings, output, reproduce, float32)
    result = run_isolated(
        "harness.verify.diagnose.runner:diagnose_request",
        request,
        timeout=timeout,
        memory_limit_bytes=memory_limit_bytes,
        on_stage=on_stage,
    )
    if result.kind is not WorkerEnd.OK:
        line = result.error.message.partition("\n")[0] if result.error else result.kind.value
        raise HarnessError(f"cannot diagnose {case.id}: {result.stage} {result.kind.value.replace('_', ' ')}: {line}")
    diagnosis: Diagnosis = result.value
    return diagnosis


def diagnose_request(
    request: tuple[Case, Settings, str | None, bool, Groups], on_stage: Callable[[str], None]
) -> Diagnosis:
    """Diagnoses a case in this process, with the signature that `harness.core.processes` needs."""
    case, settings, output, reproduce, float32 = request
    subject = subjects()[case.component]
    with models()[subject.model].context():
        on_stage(Stage.BUILD)
        program = next(iter(subject.open(case, settings).programs.values()))
        return diagnose_program(program, case, settings, output, on_stage, reproduce=reproduce, float32=float32)


def diagnose_program(
    program: Program,
    case: Case,
    settings: Settings,
    output: str | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    *,
    reproduce: bool = False,
    exported: Any = None,
    on_compiled: OnCompiled = lambda code, library, weights: None,
    float32: Groups = NO_GROUPS,
) -> Diagnosis:
    """Diagnoses one program on its example inputs, in this process.

    Args:
        program: The program.
        case: Strategy, precision and other parameters of the lowering.
        settings: Schedules and processors.
        output: As for `diagnose`.
        on_stage: Called with the name of each stage as it begins.
        reproduce: As for `diagnose`.
        exported: Result of `Route.export`; None to export the program.
        on_compiled: Called with the compiled program before it runs; its exceptions end the diagnosis.
        float32: As for `diagnose`.
    """
    from harness.compiler.lowering.frontends.torch_export import nodes_of
    from harness.compiler.lowering.route import Route
    from harness.compiler.tuned.database import choose_schedules
    from harness.verify.diagnose.ablation import Compiler
    from harness.verify.diagnose.reference import Upstream
    from harness.verify.diagnose.rewriting import find_rewriting

    route = Route.from_case(case, float32)
    inputs = tuple(program.example.values())
    upstream = Upstream.from_program(program, case)
    if exported is None:
        on_stage(Stage.EXPORT)
        exported = route.export(program.module, inputs, program.axes)
    graph = route.graph(exported)
    on_stage(Stage.IMPORT)
    lowered = route.lower(exported, program.module)
    check_groups(float32, [lowered.float32], case.component)
    target = TARGETS[case.target]
    imported = _ImportedProgram(
        lowered,
        inputs,
        graph,
        nodes_of(lowered.module),
        Compiler(
            target,
            target.tvm_target(settings.processors),
            choose_schedules(settings.database, case.target, settings.processors).schedules,
        ),
    )
    code, flow, comparison = _run(imported, PRECISIONS[case.precision], on_stage, on_compiled)
    diagnosis = _diagnosis(program, case, imported, flow, comparison, output, upstream, settings.expectation)
    if PRECISIONS[case.precision].is_half:
        return diagnosis
    on_stage("cause")
    if diagnosis.wrong_outputs:
        diagnosis = replace(diagnosis, rewriting=find_rewriting(program, route, graph, inputs, upstream))
    if diagnosis.first is None:
        return diagnosis
    with_cause, extractor = _add_cause(diagnosis, imported, flow, comparison)
    if not reproduce:
        return with_cause
    on_stage("reproduction")
    return replace(
        with_cause, reproduction=_reproduction(with_cause, extractor, flow, comparison, code, imported.compiler)
    )


@dataclass(frozen=True)
class _ImportedProgram:
    """An imported program, and its compiler.

    Attributes:
        lowered: Imported module and weights.
        inputs: Inputs of the program.
        graph: Nodes of the program.
        variable_of: The variable of each node's value (`nodes_of`).
        compiler: Target and schedules.
    """

    lowered: Lowered
    inputs: Sequence[torch.Tensor]
    graph: Graph
    variable_of: Mapping[str, str]
    compiler: Compiler


def _run(
    imported: _ImportedProgram, precision: Precision, on_stage: Callable[[str], None], on_compiled: OnCompiled
) -> tuple[tvm.IRModule, Flow, RunComparison]:
    """Compiles and runs the program; returns the lowered module, its calls, and their comparisons."""
    from harness.compiler.schedules.common.origins import tagged
    from harness.compiler.targets.compiling import LIBRARY_SUFFIX, build_library, lower_module
    from harness.verify.diagnose.comparison import compare
    from harness.verify.diagnose.flow import ModuleBeforeMemoryPlanning, read_flow

    on_stage(Stage.COMPILE)
    module, compiler, before_memory = imported.lowered.module, imported.compiler, ModuleBeforeMemoryPlanning()
    code = lower_module(tagged(module), compiler.target, compiler.tvm_target, compiler.schedules, [before_memory])
    flow = read_flow(before_memory.module, code, module, imported.variable_of, imported.graph.nodes)
    weights = list(imported.lowered.parameters().values())
    with temporary_folder("diagnose") as folder:
        library = Path(folder) / f"program{LIBRARY_SUFFIX}"
        build_library(code, compiler.tvm_target, library)
        on_stage(Stage.RUN)
        on_compiled(code, library, weights)
        device = compiler.target.device()
        return code, flow, compare(library, device, weights, imported.inputs, flow, imported.graph, precision)


def _add_cause(
    diagnosis: Diagnosis, imported: _ImportedProgram, flow: Flow, comparison: RunComparison
) -> tuple[Diagnosis, SubgraphExtractor]:
    """Adds the cause of the first divergence; returns also the extractor of operators that show it.

    What a strategy makes of an operator of its own is imported by the strategy, which is the cause if that is wrong.
    """
    from harness.compiler.lowering.rope import STRATEGIES
    from harness.verify.diagnose.ablation import ablate
    from harness.verify.diagnose.subgraph import SubgraphExtractor

    assert diagnosis.first is not None
    boundary = diagnosis.first.boundary

    def make_extractor(sources: Iterable[str]) -> SubgraphExtractor:
        module, variable_of, graph = imported.lowered.module, imported.variable_of, imported.graph
        return SubgraphExtractor(module, variable_of, graph, imported.inputs, boundary.node, sources)

    kernel, larger = (
        make_extractor(flow.sources(boundary.position)[0]),
        make_extractor(flow.earlier_sources(boundary.position)),
    )
    fault = _fault(comparison, boundary.position)
    ablation = ablate(kernel, larger, imported.compiler, fault, boundary.function in diagnosis.unsteady)
    imported_by_strategy = {name.removesuffix(".default") for name in STRATEGIES[diagnosis.case.strategy].converters()}
    if ablation.cause is Cause.IMPORTER and not imported_by_strategy.isdisjoint(boundary.operators):
        ablation = replace(ablation, cause=Cause.STRATEGY)
    return replace(diagnosis, ablation=ablation), make_extractor(
        imported.graph.inputs
    ) if ablation.needs_context else kernel


def _fault(comparison: RunComparison, position: int) -> Fault | None:
    """Returns the fault of the call at a position."""
    (fault,) = (call.fault for call in comparison.comparisons if call.position == position)
    return fault


def _reproduction(
    diagnosis: Diagnosis,
    extractor: SubgraphExtractor,
    flow: Flow,
    comparison: RunComparison,
    code: tvm.IRModule,
    compiler: Compiler,
) -> Reproduction:
    """Builds the reproduction of the first divergence, whose cause is known."""
    from harness.verify.diagnose.reproduction import reproduce

    assert diagnosis.first is not None
    position = diagnosis.first.boundary.position
    fault = _fault(comparison, position)
    assert fault is not None
    assert comparison.wrong is not None
    calls = comparison.wrong.subgraph(code, flow.nodes, flow.sources(position)[0])
    return reproduce(diagnosis, extractor, calls, fault, compiler)


def _diagnosis(
    program: Program,
    case: Case,
    imported: _ImportedProgram,
    flow: Flow,
    run: RunComparison,
    output: str | None,
    upstream: Upstream,
    expectation: Expectation | None,
) -> Diagnosis:
    """Returns the diagnosis without a cause: boundaries, coverage and outputs, of one output alone if it is named."""
    from harness.compiler.lowering.frontends.rewriting import source_line
    from harness.verify.diagnose.reference import needed_calls

    graph = imported.graph
    results = dict(zip(program.outputs, map(graph.nodes.__getitem__, graph.outputs), strict=True))
    outputs = dict(zip(program.outputs, run.outputs, strict=True))
    deviations, failed = upstream.deviations(outputs), upstream.failed(outputs, expectation)
    if output is not None:
        results, deviations = {output: results[output]}, {output: deviations[output]}
        failed = {name: reason for name, reason in failed.items() if name == output}
    calls = frozenset[int]().union(*(flow.needed_calls(flow.results[program.outputs.index(name)]) for name in results))
    nodes = {node.name: node for node in needed_calls(results.values())}
    boundaries = tuple(
        Boundary(
            position=call.position,
            function=flow.calls[call.position].function,
            at_load=flow.calls[call.position].at_load,
            node=call.node,
            source=source_line(nodes[call.node]),
            operators=tuple(dict.fromkeys(_operator(nodes[name]) for name in call.inside if name in nodes)),
            inside=call.inside,
            between=tuple(dict.fromkeys(flow.calls[n].function for n in call.between)),
            shape=call.shape,
            local=call.local,
            accumulated=call.accumulated,
        )
        for call in run.comparisons
        if call.node in nodes
    )
    inner_nodes = {name for call in run.comparisons for name in call.inside}
    inner_nodes |= {name for result in run.results for name in result.inside}
    compared_nodes = {call.node for call in run.comparisons}
    coverage = Coverage(
        compared=sum(name in compared_nodes for name in nodes),
        covered=sum(name in inner_nodes - compared_nodes for name in nodes),
        skipped={
            name: "no call that was compared depends on it"
            for name in nodes
            if name not in inner_nodes | compared_nodes
        },
        unnamed=dict(Counter(flow.calls[n].function for n in run.unnamed if n in calls)),
    )
    changed_functions = tuple(flow.calls[n].function for n in run.changed if n in calls)
    altered = tuple(node for node, n in run.altered.items() if n in calls)
    misshapen = tuple(
        _misshapen(name, result, imported)
        for name, result in zip(program.outputs, run.results, strict=True)
        if name in results and result.shape != result.expected
    )
    unsteady = tuple(dict.fromkeys(flow.calls[n].function for n in run.unsteady if n in calls))
    shapes = {name: result.shape for name, result in zip(program.outputs, run.results, strict=True)}
    luck: tuple[str, ...] = ()
    luck_of_outputs: tuple[str, ...] = ()
    if PRECISIONS[case.precision].is_half:
        luck = tuple(boundary.node for boundary in boundaries if _is_luck(boundary.local, boundary.shape))
        luck_of_outputs = tuple(name for name, error in deviations.items() if _is_luck(error, shapes[name]))
    first = first_divergence([boundary for boundary in boundaries if boundary.node not in luck])
    return Diagnosis(
        case,
        program.name,
        boundaries,
        deviations,
        coverage,
        first,
        changed_functions,
        altered,
        misshapen,
        unsteady,
        luck,
        luck_of_outputs,
        failed=failed,
    )


def _is_luck(error: Deviation, shape: Sequence[int]) -> bool:
    """Returns whether an error exceeds the limits, but belongs to too few numbers to mean anything."""
    return error.excess > 1 and math.prod(shape) < SMALL_SIZE


def _misshapen(output: str, result: OutputComparison, imported: _ImportedProgram) -> Misshapen:
    """Finds the first node whose value is imported in another shape, among those that the output needs."""
    from harness.compiler.lowering.frontends.rewriting import source_line
    from harness.compiler.schedules.common.origins import bindings_of
    from harness.verify.diagnose.reference import needed_calls

    types = {binding.var.name: binding.var.ty for binding in bindings_of(imported.lowered.module["main"])}
    misshapen_nodes = (
        node
        for node in needed_calls([imported.graph.nodes[result.node]])
        if node.name in imported.variable_of
        and not _has_shape(types.get(imported.variable_of[node.name]), node.meta["val"])
    )
    first = next(misshapen_nodes, None)
    name, line = ("", "") if first is None else (first.name, source_line(first))
    return Misshapen(output, result.shape, result.expected, name, line)


def _has_shape(ty: Any, value: Any) -> bool:
    """Returns whether a type has the shape of a node's value, with complex numbers as pairs; True if unknown."""
    import torch
    from tvm import relax, tirx

    if not isinstance(value, torch.Tensor) or not isinstance(ty, relax.TensorType) or ty.shape is None:
        return True
    shape = (*value.shape, 2) if value.is_complex() else tuple(value.shape)
    return len(shape) == len(ty.shape) and all(
        int(extent) == expected
        for extent, expected in zip(ty.shape, shape, strict=True)
        if isinstance(extent, tirx.IntImm) and isinstance(expected, int)
    )


def _operator(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")


def add_diagnosis(
    result: Result,
    settings: Settings,
    on_stage: Callable[[str], None] = lambda stage: None,
    *,
    timeout: float | None = None,
    memory_limit_bytes: int | None = None,
    float32: Groups = NO_GROUPS,
) -> Result:
    """Returns the result with a diagnosis, or why it has none; a result as expected is unchanged.

    Args:
        result: Result of a verified case.
        settings: Settings of the verification.
        on_stage: Called with the name of each stage, soon after the process has entered it.
        timeout: Time limit in seconds; None for no limit.
        memory_limit_bytes: Limit on resident bytes; None for no limit.
        float32: Groups of products that stay float32 in half precision.
    """
    if result.expected is not False or result.outcome.status is Status.PASSED:
        return result
    problem = _problem(result)
    if problem:
        return replace(result, not_diagnosed=problem)
    try:
        diagnosis = diagnose(
            result.case,
            settings,
            on_stage=lambda stage: on_stage(f"diagnosis: {stage}"),
            timeout=timeout,
            memory_limit_bytes=memory_limit_bytes,
            float32=float32,
        )
    except HarnessError as error:
        return replace(result, not_diagnosed=str(error))
    return replace(result, diagnosis=document(diagnosis))


def _problem(result: Result) -> str:
    """Returns why a case cannot be diagnosed; empty if it can."""
    wrong = [verdict.name for verdict in result.outcome.verdicts if not verdict.kind.passes]
    if not wrong:
        return f"it ended at {result.outcome.stage.value} with no output that could be followed"
    if result.outcome.device is not None:
        return f"it ran on {result.outcome.device.name}, and kernels are followed on this machine alone"
    subject = subjects()[result.case.component]
    if not subject.whole and not set(wrong).intersection(subject.outputs):
        return f"{wrong[0]} is of another sample than the main one, which alone can be followed"
    return ""
