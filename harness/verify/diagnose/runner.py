"""Diagnoses a program: lowers and compiles it as usual, runs it, compares it call by call, and finds the cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tvm
from torch.fx import Node
from tvm import relax, tirx

from harness.compiler.lowering.frontends.rewriting import source_line
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.route import Route
from harness.compiler.schedules.common.origins import bindings_of, tagged
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import LIBRARY_SUFFIX, build_library, lower_module
from harness.compiler.tuned.database import choose_schedules
from harness.core.budget import check_groups
from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.files import temporary_folder
from harness.core.outcome import Stage
from harness.core.precision import PRECISIONS, Precision
from harness.core.program import Array, Program
from harness.core.settings import Settings
from harness.models.registry import models, subjects
from harness.parity.monte_carlo import SMALL_SIZE
from harness.verify.diagnose.ablation import Compiler, ablate
from harness.verify.diagnose.comparison import Observer, RunComparison
from harness.verify.diagnose.deviation import Deviation
from harness.verify.diagnose.diagnosis import Cause, Coverage, Diagnosis, Misshapen, first_divergence
from harness.verify.diagnose.flow import Flow, FlowReader, ModuleBeforeMemoryPlanning
from harness.verify.diagnose.reference import Upstream, needed_calls
from harness.verify.diagnose.reproduction import reproduce as build_reproduction
from harness.verify.diagnose.rewriting import find_rewriting
from harness.verify.diagnose.subgraph import ImportedProgram, SubgraphExtractor

OnCompiled = Callable[[tvm.IRModule, Path, Sequence[Array]], None]
"""Takes the lowered module of a program, its library, and the imported values of its weights."""


def diagnose_component(
    case: Case, settings: Settings, output: str | None, reproduce: bool, on_stage: Callable[[str], None]
) -> Diagnosis:
    """Diagnoses the main program of a component, in this process; the arguments are those of `diagnose_program`."""
    subject = subjects()[case.component]
    with models()[subject.model].context():
        on_stage(Stage.BUILD)
        program = next(iter(subject.open(case, settings).programs.values()))
        return diagnose_program(program, case, settings, output, on_stage, reproduce=reproduce)


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
) -> Diagnosis:
    """Diagnoses one program on its example inputs, in this process.

    Args:
        program: The program.
        case: Strategy, precision and other parameters of the lowering.
        settings: Schedules, processors and the groups of products that stay float32.
        output: Name of an output, to report only the calls on which it depends; None for all.
        on_stage: Called with the name of each stage as it begins.
        reproduce: Whether to build a reproduction of the first divergent kernel without this project.
        exported: Result of `Route.export`; None to export the program.
        on_compiled: Called with the compiled program before it runs; its exceptions end the diagnosis.
    """
    route = Route.from_case(case, settings.float32)
    inputs = tuple(program.example.values())
    upstream = Upstream.from_program(program, case)
    if exported is None:
        on_stage(Stage.EXPORT)
        exported = route.export(program.module, inputs, program.axes)
    graph = route.graph(exported)
    on_stage(Stage.IMPORT)
    lowered = route.lower(exported, program.module)
    check_groups(settings.float32, [lowered.float32], case.component)
    target = TARGETS[case.target]
    imported = ImportedProgram(lowered.module, graph, inputs)
    compiler = Compiler(
        target,
        target.tvm_target(settings.processors),
        choose_schedules(settings.database, case.target, settings.processors).schedules,
    )
    weights = list(lowered.parameters().values())
    code, flow, comparison = _run(imported, weights, compiler, PRECISIONS[case.precision], on_stage, on_compiled)
    diagnosis = _compared(program, case, imported, flow, comparison, output, upstream, settings.expectation)
    if PRECISIONS[case.precision].is_half:
        return diagnosis
    on_stage("cause")
    if diagnosis.wrong_outputs:
        diagnosis = replace(diagnosis, rewriting=find_rewriting(program, route, graph, inputs, upstream))
    if diagnosis.first is None:
        return diagnosis
    boundary = diagnosis.first.boundary
    sources, fault = flow.sources(boundary.position)[0], comparison.faults[boundary.position]
    kernel = SubgraphExtractor(imported, boundary.node, sources)
    larger = SubgraphExtractor(imported, boundary.node, flow.earlier_sources(boundary.position))
    ablation = ablate(kernel, larger, compiler, fault, boundary.function in diagnosis.unsteady)
    # A strategy imports the operators that it makes, so it is the cause if their import is wrong.
    imported_by_strategy = {name.removesuffix(".default") for name in STRATEGIES[case.strategy].converters()}
    if ablation.cause is Cause.IMPORTER and not imported_by_strategy.isdisjoint(boundary.operators):
        ablation = replace(ablation, cause=Cause.STRATEGY)
    diagnosis = replace(diagnosis, ablation=ablation)
    if not reproduce:
        return diagnosis
    on_stage("reproduction")
    assert comparison.wrong is not None
    calls = comparison.wrong.subgraph(code, flow.nodes, sources)
    extractor = SubgraphExtractor(imported, boundary.node, graph.inputs) if ablation.needs_context else kernel
    return replace(diagnosis, reproduction=build_reproduction(diagnosis, extractor, calls, fault, compiler))


def _run(
    imported: ImportedProgram,
    weights: Sequence[Array],
    compiler: Compiler,
    precision: Precision,
    on_stage: Callable[[str], None],
    on_compiled: OnCompiled,
) -> tuple[tvm.IRModule, Flow, RunComparison]:
    """Compiles and runs the program; returns the lowered module, its calls, and their comparisons."""
    on_stage(Stage.COMPILE)
    module, before_memory = imported.module, ModuleBeforeMemoryPlanning()
    code = lower_module(tagged(module), compiler.target, compiler.tvm_target, compiler.schedules, [before_memory])
    flow = FlowReader(before_memory.module, code, module, imported.variable_of, imported.graph.nodes).flow()
    observer = Observer(flow, imported.graph, imported.inputs, compiler.target.device(), precision)
    with temporary_folder("diagnose") as folder:
        library = Path(folder) / f"program{LIBRARY_SUFFIX}"
        build_library(code, compiler.tvm_target, library)
        on_stage(Stage.RUN)
        on_compiled(code, library, weights)
        return code, flow, observer.run(library, weights)


def _compared(
    program: Program,
    case: Case,
    imported: ImportedProgram,
    flow: Flow,
    run: RunComparison,
    output: str | None,
    upstream: Upstream,
    expectation: Expectation | None,
) -> Diagnosis:
    """Returns the diagnosis without a cause: boundaries, coverage and outputs, of one output alone if it is named."""
    graph = imported.graph
    outputs = dict(zip(program.outputs, run.outputs, strict=True))
    deviations, failed = upstream.deviations(outputs), upstream.failed(outputs, expectation)
    if output is not None:
        deviations = {output: deviations[output]}
        failed = {name: reason for name, reason in failed.items() if name == output}
    numbers = [n for n, name in enumerate(program.outputs) if name in deviations]
    results = {n: graph.nodes[graph.outputs[n]] for n in numbers}
    calls = frozenset[int]().union(*(flow.needed_calls(flow.results[n]) for n in numbers))
    nodes = [node.name for node in needed_calls(results.values())]
    boundaries = tuple(boundary for boundary in run.boundaries if boundary.node in nodes)
    luck: tuple[str, ...] = ()
    luck_of_outputs: tuple[str, ...] = ()
    if PRECISIONS[case.precision].is_half:
        luck = tuple(boundary.node for boundary in boundaries if _is_luck(boundary.local, boundary.shape))
        luck_of_outputs = tuple(name for name, error in deviations.items() if _is_luck(error, outputs[name].shape))
    return Diagnosis(
        case,
        program.name,
        boundaries,
        deviations,
        _coverage(nodes, run, [flow.calls[n].function for n in run.unnamed if n in calls]),
        first=first_divergence([boundary for boundary in boundaries if boundary.node not in luck]),
        changed=tuple(flow.calls[n].function for n in run.changed if n in calls),
        altered=tuple(node for node, n in run.altered.items() if n in calls),
        misshapen=tuple(
            Misshapen(program.outputs[n], run.outputs[n].shape, run.shapes[n], *_first_misshapen(node, imported))
            for n, node in results.items()
            if run.outputs[n].shape != run.shapes[n]
        ),
        unsteady=tuple(dict.fromkeys(flow.calls[n].function for n in run.unsteady if n in calls)),
        luck=luck,
        luck_of_outputs=luck_of_outputs,
        failed=failed,
    )


def _coverage(nodes: Sequence[str], run: RunComparison, unnamed: Sequence[str]) -> Coverage:
    """Returns the compared part of some nodes, with the functions of the calls whose results belong to no node."""
    compared = {boundary.node for boundary in run.boundaries}
    covered = run.views.union(*(boundary.inside for boundary in run.boundaries)) - compared
    skipped = [name for name in nodes if name not in covered | compared]
    return Coverage(
        compared=sum(name in compared for name in nodes),
        covered=sum(name in covered for name in nodes),
        skipped=dict.fromkeys(skipped, "no call that was compared depends on it"),
        unnamed=dict(Counter(unnamed)),
    )


def _is_luck(error: Deviation, shape: Sequence[int]) -> bool:
    """Returns whether an error exceeds the limits, but belongs to too few numbers to mean anything."""
    return error.is_fault and math.prod(shape) < SMALL_SIZE


def _first_misshapen(output: Node, imported: ImportedProgram) -> tuple[str, str]:
    """Returns the first node that an output needs and whose value is imported in another shape, and its source line."""
    types = {binding.var.name: binding.var.ty for binding in bindings_of(imported.module["main"])}
    for node in needed_calls([output]):
        variable = imported.variable_of.get(node.name)
        if variable is not None and not _has_shape(types.get(variable), node.meta["val"]):
            return node.name, source_line(node)
    return "", ""


def _has_shape(ty: Any, value: Any) -> bool:
    """Returns whether a type has the shape of a node's value, with complex numbers as pairs; True if unknown."""
    if not isinstance(value, torch.Tensor) or not isinstance(ty, relax.TensorType) or ty.shape is None:
        return True
    shape = (*value.shape, 2) if value.is_complex() else tuple(value.shape)
    return len(shape) == len(ty.shape) and all(
        int(extent) == expected
        for extent, expected in zip(ty.shape, shape, strict=True)
        if isinstance(extent, tirx.IntImm) and isinstance(expected, int)
    )
