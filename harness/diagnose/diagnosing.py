"""From a case to its diagnosis: lowered and compiled as it always is, run, and compared call by call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.budget import NONE, Groups, check_known
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import Stage
from harness.core.precision import PRECISIONS, Precision
from harness.core.settings import Settings
from harness.diagnose.deviation import Deviation
from harness.diagnose.diagnosis import (
    Boundary,
    Coverage,
    Diagnosis,
    Misshapen,
    Reproduction,
    first_divergence,
)
from harness.files import temporary_folder
from harness.lowering.frontends import EXPORTING_PROGRAMS
from harness.models.registry import models, subjects
from harness.parity.draws import FEW
from harness.targets import HOST, TARGETS

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    import tvm

    from harness.core.expectations import Expectation
    from harness.core.program import Program
    from harness.diagnose.comparing import Compared, Result
    from harness.diagnose.compiler import Compiler
    from harness.diagnose.fault import Fault
    from harness.diagnose.flow import Flow
    from harness.diagnose.pieces import Pieces
    from harness.diagnose.upstream import Upstream
    from harness.lowering.frontends.torch_export.graph import Graph
    from harness.lowering.route import Lowered


Compiled = Callable[["tvm.IRModule", Path, "Sequence[npt.NDArray[Any]]"], None]
"""Takes the lowered module of a program, its library, and the values of its weights as imported."""


def diagnose(
    case: Case,
    settings: Settings,
    output: str | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    *,
    reproduce: bool = False,
    timeout: float | None = None,
    memory_limit_bytes: int | None = None,
    float32: Groups = NONE,
) -> Diagnosis:
    """Diagnoses the main program of a component, in a process of its own.

    Args:
        case: What to diagnose; its target runs on this CPU.
        settings: Weights, inputs, schedules and processors.
        output: Name of an output: only the calls on which it depends are reported. None for all.
        on_stage: Called with the name of each stage, soon after it was entered.
        reproduce: Whether to make what shows the fault of the first divergent kernel without this project.
        timeout: Seconds until it is given up; None for no limit.
        memory_limit_bytes: Resident bytes above which it is given up; None for no limit.
        float32: Groups of products that stay float32 in a half precision.

    Raises:
        HarnessError: The case cannot be diagnosed, or does not get as far as running.
    """
    from harness.processes import WorkerEnd, run_isolated

    subject = subjects().get(case.component)
    if subject is None or subject.whole:
        raise HarnessError(f"{case.component} is no component: diagnose the components that it is made of")
    if case.target != HOST.name:
        raise HarnessError(f"kernels of {case.target} cannot be followed yet: choose --target {HOST.name}")
    if reproduce and PRECISIONS[case.precision].is_half:
        raise HarnessError(f"a kernel in {case.precision} is named and not cut out: leave out --reproduce")
    if case.frontend not in EXPORTING_PROGRAMS:
        others = " or ".join(EXPORTING_PROGRAMS)
        raise HarnessError(f"the frontend {case.frontend} keeps no nodes of torch.export: choose --frontend {others}")
    if output is not None and output not in subject.outputs:
        raise HarnessError(f"{case.component} has no output {output!r}: choose from {', '.join(subject.outputs)}")
    request = (case, settings, output, reproduce, float32)
    ended = run_isolated(
        "harness.diagnose.diagnosing:diagnose_request",
        request,
        timeout=timeout,
        memory_limit_bytes=memory_limit_bytes,
        breadcrumb=on_stage,
    )
    if ended.kind is not WorkerEnd.OK:
        line = ended.error.message.partition("\n")[0] if ended.error else ended.kind.value
        raise HarnessError(f"cannot diagnose {case.id}: {ended.stage} {ended.kind.value.replace('_', ' ')}: {line}")
    diagnosis: Diagnosis = ended.value
    return diagnosis


def diagnose_request(
    request: tuple[Case, Settings, str | None, bool, Groups], announce: Callable[[str], None]
) -> Diagnosis:
    """Calls `diagnose` as `harness.processes` calls functions, in this process."""
    case, settings, output, reproduce, float32 = request
    subject = subjects()[case.component]
    with models()[subject.model].context():
        announce(Stage.BUILD)
        program = next(iter(subject.open(case, settings).programs.values()))
        return diagnose_program(program, case, settings, output, announce, reproduce=reproduce, float32=float32)


def diagnose_program(
    program: Program,
    case: Case,
    settings: Settings,
    output: str | None = None,
    announce: Callable[[str], None] = lambda stage: None,
    *,
    reproduce: bool = False,
    exported: Any = None,
    compiled: Compiled = lambda code, library, weights: None,
    float32: Groups = NONE,
) -> Diagnosis:
    """Diagnoses one program on its example inputs, in this process.

    Args:
        program: What to lower and run.
        case: How it is lowered.
        settings: Schedules and processors.
        output: As for `diagnose`.
        announce: Called with the name of each stage as it begins.
        reproduce: As for `diagnose`.
        exported: What `Route.export` has made of the program; it is exported if there is none.
        compiled: Called with what is to be followed, before it runs; what it raises ends the diagnosis.
        float32: As for `diagnose`.
    """
    from harness.diagnose.compiler import Compiler
    from harness.diagnose.rewriting import rewriting
    from harness.diagnose.upstream import Upstream
    from harness.lowering.frontends.torch_export import nodes_of
    from harness.lowering.route import Route
    from harness.tuned.database import chosen_schedules

    route = Route.from_case(case, float32)
    inputs = tuple(program.example.values())
    truth = Upstream.of(program, case)
    if exported is None:
        announce(Stage.EXPORT)
        exported = route.export(program.module, inputs, program.axes)
    graph = route.graph(exported)
    announce(Stage.IMPORT)
    lowered = route.lower(exported, program.module)
    check_known(float32, [lowered.float32], case.component)
    target = TARGETS[case.target]
    imported = _Imported(
        lowered,
        inputs,
        graph,
        nodes_of(lowered.module),
        Compiler(
            target,
            target.tvm_target(settings.processors),
            chosen_schedules(settings.database, case.target, settings.processors).schedules,
        ),
    )
    code, flow, compared = _run(imported, PRECISIONS[case.precision], announce, compiled)
    found = _diagnosis(program, case, imported, flow, compared, output, truth, settings.expectation)
    if PRECISIONS[case.precision].is_half:
        return found
    announce("cause")
    if found.beyond:
        found = replace(found, rewriting=rewriting(program, route, graph, inputs, truth))
    if found.first is None:
        return found
    told, pieces = _with_cause(found, imported, flow, compared)
    if not reproduce:
        return told
    announce("reproduction")
    return replace(told, reproduction=_reproduction(told, pieces, flow, compared, code, imported.compiler))


@dataclass(frozen=True)
class _Imported:
    """An imported program, and what it is compiled for.

    Attributes:
        lowered: Its module.
        inputs: Its inputs.
        graph: Its nodes.
        holding: The variable that holds each node's value (`nodes_of`).
        compiler: What it is compiled for.
    """

    lowered: Lowered
    inputs: Sequence[torch.Tensor]
    graph: Graph
    holding: Mapping[str, str]
    compiler: Compiler


def _run(
    imported: _Imported, precision: Precision, announce: Callable[[str], None], compiled: Compiled
) -> tuple[tvm.IRModule, Flow, Compared]:
    from harness.diagnose.comparing import compare
    from harness.diagnose.flow import BeforeMemory, flow_of
    from harness.schedules.common.origins import tagged
    from harness.targets.compiling import LIBRARY_SUFFIX, build_library, lower_module

    announce(Stage.COMPILE)
    module, compiler, kept = imported.lowered.module, imported.compiler, BeforeMemory()
    code = lower_module(tagged(module), compiler.target, compiler.tvm_target, compiler.schedules, [kept])
    flow = flow_of(kept.module, code, module, imported.holding, imported.graph.nodes)
    weights = list(imported.lowered.parameters().values())
    with temporary_folder("diagnose") as folder:
        library = Path(folder) / f"program{LIBRARY_SUFFIX}"
        build_library(code, compiler.tvm_target, library)
        announce(Stage.RUN)
        compiled(code, library, weights)
        device = compiler.target.device()
        return code, flow, compare(library, device, weights, imported.inputs, flow, imported.graph, precision)


def _with_cause(found: Diagnosis, imported: _Imported, flow: Flow, compared: Compared) -> tuple[Diagnosis, Pieces]:
    """Says why the first kernel diverges; returns also what cuts out operators that show it."""
    from harness.diagnose.ablation import ablate
    from harness.diagnose.pieces import Pieces

    assert found.first is not None
    wrong = found.first.boundary

    def pieces(sources: Iterable[str]) -> Pieces:
        module, holding, graph = imported.lowered.module, imported.holding, imported.graph
        return Pieces(module, holding, graph, imported.inputs, wrong.node, sources)

    kernel, before = pieces(flow.sources(wrong.position)[0]), pieces(flow.before(wrong.position))
    fault = _fault(compared, wrong.position)
    ablation = ablate(kernel, before, imported.compiler, fault, wrong.function in found.unsteady)
    return replace(found, ablation=ablation), pieces(imported.graph.inputs) if ablation.takes_before else kernel


def _fault(compared: Compared, position: int) -> Fault | None:
    (fault,) = (made.fault for made in compared.comparisons if made.position == position)
    return fault


def _reproduction(
    found: Diagnosis, pieces: Pieces, flow: Flow, compared: Compared, code: tvm.IRModule, compiler: Compiler
) -> Reproduction:
    from harness.diagnose.reproducing import reproduce

    assert found.first is not None
    position = found.first.boundary.position
    fault = _fault(compared, position)
    assert fault is not None
    assert compared.wrong is not None
    calls = compared.wrong.piece(code, flow.nodes, flow.sources(position)[0])
    return reproduce(found, pieces, calls, fault, compiler)


def _diagnosis(
    program: Program,
    case: Case,
    imported: _Imported,
    flow: Flow,
    compared: Compared,
    output: str | None,
    truth: Upstream,
    expectation: Expectation | None,
) -> Diagnosis:
    from harness.diagnose.reference import needed
    from harness.lowering.frontends.torch_export.rewriting import source_line

    graph = imported.graph
    results = dict(zip(program.outputs, map(graph.nodes.__getitem__, graph.outputs), strict=True))
    outputs = dict(zip(program.outputs, compared.outputs, strict=True))
    deviations, failed = truth.deviations(outputs), truth.failed(outputs, expectation)
    if output is not None:
        results, deviations = {output: results[output]}, {output: deviations[output]}
        failed = {name: reason for name, reason in failed.items() if name == output}
    calls = frozenset[int]().union(*(flow.needed(flow.results[program.outputs.index(name)]) for name in results))
    nodes = {node.name: node for node in needed(results.values())}
    boundaries = tuple(
        Boundary(
            position=found.position,
            function=flow.calls[found.position].function,
            at_load=flow.calls[found.position].at_load,
            node=found.node,
            source=source_line(nodes[found.node]),
            operators=tuple(dict.fromkeys(_operator(nodes[name]) for name in found.inside if name in nodes)),
            inside=found.inside,
            between=tuple(dict.fromkeys(flow.calls[n].function for n in found.between)),
            shape=found.shape,
            local=found.local,
            accumulated=found.accumulated,
        )
        for found in compared.comparisons
        if found.node in nodes
    )
    inside = {name for found in compared.comparisons for name in found.inside}
    inside |= {name for result in compared.results for name in result.inside}
    own = {found.node for found in compared.comparisons}
    coverage = Coverage(
        compared=sum(name in own for name in nodes),
        covered=sum(name in inside - own for name in nodes),
        skipped={name: "no call that was compared depends on it" for name in nodes if name not in inside | own},
        unnamed=dict(Counter(flow.calls[n].function for n in compared.unnamed if n in calls)),
    )
    changed = tuple(flow.calls[n].function for n in compared.changed if n in calls)
    altered = tuple(node for node, n in compared.altered.items() if n in calls)
    misshapen = tuple(
        _misshapen(name, result, imported)
        for name, result in zip(program.outputs, compared.results, strict=True)
        if name in results and result.shape != result.expected
    )
    unsteady = tuple(dict.fromkeys(flow.calls[n].function for n in compared.unsteady if n in calls))
    shapes = {name: result.shape for name, result in zip(program.outputs, compared.results, strict=True)}
    luck: tuple[str, ...] = ()
    luck_of_outputs: tuple[str, ...] = ()
    if PRECISIONS[case.precision].is_half:
        luck = tuple(boundary.node for boundary in boundaries if _is_luck(boundary.local, boundary.shape))
        luck_of_outputs = tuple(name for name, found in deviations.items() if _is_luck(found, shapes[name]))
    first = first_divergence([boundary for boundary in boundaries if boundary.node not in luck])
    return Diagnosis(
        case,
        program.name,
        boundaries,
        deviations,
        coverage,
        first,
        changed,
        altered,
        misshapen,
        unsteady,
        luck,
        luck_of_outputs,
        failed=failed,
    )


def _is_luck(made: Deviation, shape: Sequence[int]) -> bool:
    """Returns whether an error beyond the limits is of so few numbers that it says nothing."""
    return made.excess > 1 and math.prod(shape) < FEW


def _misshapen(output: str, result: Result, imported: _Imported) -> Misshapen:
    """Looks for the first node whose value is imported in another shape, among those that an output of one needs."""
    from harness.diagnose.reference import needed
    from harness.lowering.frontends.torch_export.rewriting import source_line
    from harness.schedules.common.origins import bindings_of

    types = {binding.var.name: binding.var.ty for binding in bindings_of(imported.lowered.module["main"])}
    wrong = (
        node
        for node in needed([imported.graph.nodes[result.node]])
        if node.name in imported.holding and not _has_shape(types.get(imported.holding[node.name]), node.meta["val"])
    )
    first = next(wrong, None)
    name, line = ("", "") if first is None else (first.name, source_line(first))
    return Misshapen(output, result.shape, result.expected, name, line)


def _has_shape(ty: Any, value: Any) -> bool:
    """Returns whether a type has the shape of a node's value, complex numbers as pairs; True where it is not known."""
    import torch
    from tvm import relax, tirx

    if not isinstance(value, torch.Tensor) or not isinstance(ty, relax.TensorType) or ty.shape is None:
        return True
    shape = (*value.shape, 2) if value.is_complex() else tuple(value.shape)
    return len(shape) == len(ty.shape) and all(
        int(mine) == its
        for mine, its in zip(ty.shape, shape, strict=True)
        if isinstance(mine, tirx.IntImm) and isinstance(its, int)
    )


def _operator(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
