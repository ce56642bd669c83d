"""Prepares a component for its benchmark: compiles the program of a sample and writes what the sides load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
import tvm_ffi

from harness.compiler.lowering.frontends import EXPORTING_PROGRAMS
from harness.compiler.lowering.route import Route
from harness.compiler.schedules import UNTUNED as NO_SCHEDULES
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import LIBRARY_SUFFIX, build_library, lower_module
from harness.compiler.tuned.database import choose_schedules
from harness.core.budget import NO_GROUPS, Groups, check_groups
from harness.core.case import Case, Weights
from harness.core.errors import HarnessError
from harness.core.expectations import expectation_for
from harness.core.precision import PRECISIONS
from harness.core.processors import THIS_MACHINE, Processors
from harness.core.program import Arrays, Call, Output
from harness.core.settings import SEEDED
from harness.models.registry import models, subjects
from harness.models.traced import TracedWorkload
from harness.parity.monte_carlo import judge_by_draws
from harness.parity.references import Reference
from harness.parity.verdict import judge
from harness.verify.runner import expectations
from perf.profiling import Work, flop_of_program, work_of_functions
from perf.results import NOTHING_FOUND, TUNED, UNTUNED, judged
from perf.sides import IMPORTED, save

Judge = Callable[[Sequence[np.ndarray]], dict[str, Any]]
"""Takes the outputs of a side in order and returns the worst verdict with its figures."""


@dataclass
class Prepared:
    """A component that is compiled and saved.

    Attributes:
        judge: Judges the outputs of a side.
        flop: Operations of the component's products, convolutions and attention.
        module: The Relax module in the case's precision, as every library is compiled from it.
        libraries: The libraries that TVM compiled, by side.
        compile_seconds: Seconds from PyTorch's module to a library, by side.
        work: The work of one call of each compiled function, by side.
        note: Why there is no tuned side, if there is none.
    """

    judge: Judge
    flop: int
    module: tvm.IRModule
    libraries: dict[str, Path] = field(default_factory=dict)
    compile_seconds: dict[str, float] = field(default_factory=dict)
    work: dict[str, dict[str, Work]] = field(default_factory=dict)
    note: str = ""


def prepare(
    case: Case,
    folder: Path,
    database: Path | None,
    processors: Processors = THIS_MACHINE,
    sample: str = "",
    float32: Groups = NO_GROUPS,
) -> Prepared:
    """Compiles the program of one of a subject's calls, without and with tuned schedules; writes what the sides load.

    Args:
        case: The component, and how it is lowered and compiled.
        folder: The folder that modules, weights, inputs and libraries are written to.
        database: Folder of a tuning database; None for no tuned side.
        processors: The processors to compile for.
        sample: Name of the call; the first one if there is none.
        float32: Groups of products that stay float32 in a half precision.

    Raises:
        HarnessError: The subject is no trace of calls, so that there is no reference of a single call; it has no such
            sample; the program has not all of the groups; or a weight is beyond the range of the precision's dtype.
    """
    import timm  # noqa: F401  (pickle finds its layers by name; the model's context alone imports and forgets them)

    subject, route = subjects()[case.component], Route.from_case(case, float32)
    with models()[subject.model].context():
        workload = subject.open(case, SEEDED)
        if not isinstance(workload, TracedWorkload):
            raise HarnessError(f"{case.component} is no trace of calls: measure a component that is one")
        call = call_of(workload, case.component, sample)
        program, inputs = workload.programs[call.program], inputs_of(call, case.component)
        start = time.perf_counter()
        exported = route.export(program.module, inputs, program.axes)
        imported = route.lower(exported, program.module)
        check_groups(float32, [imported.float32], case.component)
        importing = time.perf_counter() - start
        # Operations are counted in a program of torch.export for the shapes of these inputs, whatever is compiled.
        static = route.frontend in EXPORTING_PROGRAMS and not any(program.axes)
        counted = exported if static else Route().export(program.module, inputs)
        flop = flop_of_program(counted)
        del exported, counted
        names = [f"{call.prefix}{name}" for name in program.outputs]
        reference = workload.reference()
        check = judge_of(names, reference, case, workload.draw_small_outputs(reference.first))
        prepared = Prepared(check, flop, imported.module)
        save(program.module, inputs, list(imported.parameters().values()), folder)
        (folder / IMPORTED).write_text(tvm.ir.save_json(imported.module), encoding="utf-8")
    del imported, program, workload, reference
    _compile(case, folder, database, processors, importing, prepared)
    return prepared


def call_of(workload: TracedWorkload, component: str, sample: str) -> Call:
    """Returns the call of a sample, or the first one if none is named.

    Raises:
        HarnessError: There is no such sample.
    """
    calls = {call.name: call for call in workload.trace}
    call = calls.get(sample) if sample else workload.trace[0]
    if call is None:
        raise HarnessError(f"{component} has no sample {sample!r}: choose one of {', '.join(calls)}")
    return call


def inputs_of(call: Call, component: str) -> tuple[torch.Tensor, ...]:
    """Returns the arguments of a call that needs no other.

    Raises:
        HarnessError: It reads what another call returns.
    """
    inputs = tuple(argument for argument in call.arguments if not isinstance(argument, Output))
    if len(inputs) < len(call.arguments):
        raise HarnessError(f"{component} cannot be measured on {call.name!r}, which reads what another call returns")
    return inputs


def _compile(
    case: Case, folder: Path, database: Path | None, processors: Processors, importing: float, prepared: Prepared
) -> None:
    """Writes a library for each side of ours and describes it in `prepared`."""
    target = TARGETS[case.target]
    lowered: tvm.IRModule | None = None
    sides = {UNTUNED: NO_SCHEDULES}
    if database is not None:
        sides[TUNED] = choose_schedules(database, case.target, processors).schedules
    for side, chosen in sides.items():
        start = time.perf_counter()
        tvm_target = target.tvm_target(processors)
        before, lowered = lowered, lower_module(prepared.module, target, tvm_target, chosen)
        if side == TUNED and tvm_ffi.structural_equal(before, lowered):
            prepared.note = NOTHING_FOUND
            break
        library = folder / f"{side}{LIBRARY_SUFFIX}"
        build_library(lowered, tvm_target, library)
        prepared.compile_seconds[side] = importing + time.perf_counter() - start
        prepared.libraries[side] = library
        prepared.work[side] = work_of_functions(lowered)


def judge_of(names: Sequence[str], reference: Reference, case: Case, draws: Arrays) -> Judge:
    """Returns the judge of a side's outputs, which keeps nothing of the model.

    Args:
        names: Of the outputs, in order.
        reference: PyTorch's outputs that the precision is held to, and others; of the first run and in float64.
        case: Says by its precision, its weights and what is expected of it whether outputs may pass by the oracle.
        draws: What `harness.parity.monte_carlo.draw_errors` returns, of these outputs and others.
    """
    first, exact = (
        {name: arrays[name] for name in names if name in arrays} for arrays in (reference.first, reference.exact)
    )
    expected = Reference.from_run(first, exact)
    drawn = {name: draws[name] for name in names if name in draws}
    by_oracle = PRECISIONS[case.precision].judged_by_oracle
    ill_conditioned = Weights(case.weights).ill_conditioned
    expectation = expectation_for(case, expectations())

    def check(outputs: Sequence[np.ndarray]) -> dict[str, Any]:
        actual = dict(zip(names, outputs, strict=True))
        verdicts = judge(
            actual, expected, expectation=expectation, by_oracle=by_oracle, ill_conditioned=ill_conditioned
        )
        return judged(judge_by_draws(verdicts, actual, expected, drawn) if drawn else verdicts)

    return check
