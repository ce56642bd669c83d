"""Runs the same calls in PyTorch fp32, in float64 and as compiled code, and compares their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Progress, Verdict, VerdictKind
from harness.core.precision import PRECISIONS
from harness.core.program import Arrays, Program, Trace
from harness.parity.cache import load_outputs, save_outputs, saved_folder
from harness.parity.distribution import add_distributions
from harness.parity.monte_carlo import (
    PERTURBATION_SCALE,
    ambiguous_outputs,
    draw_errors,
    judge_by_draws,
    judge_by_typical_errors,
    small_outputs,
)
from harness.parity.references import Reference, add_prefix, run_trace, runner_of, select
from harness.parity.verdict import judge

if TYPE_CHECKING:
    from harness.compiler.execution.run import CompiledPrograms, Run

_PYTORCH_ERRORS, _COMPILED_ERRORS = "errors/PyTorch", "errors/compiled code"
"""Prefixes of the names of errors of further runs, among the saved outputs."""


@dataclass
class TracedWorkload:
    """A trace of calls with its reference.

    Attributes:
        programs: Entry points by name.
        trace: The calls.
        reference: Returns PyTorch's outputs of two runs and in float64.
        case: Determines by its precision and weights how outputs are judged, and where the outputs of compiled code are
            saved.
        draws: Returns further errors of PyTorch in the named outputs (`harness.parity.monte_carlo`).
    """

    programs: Mapping[str, Program]
    trace: Trace
    reference: Callable[[], Reference]
    case: Case
    draws: Callable[[Sequence[str]], Arrays] = lambda names: {}
    _actual: Arrays | None = None
    _compiled: CompiledPrograms | None = None

    def run(self, run: Run) -> bool:
        """Compiles the programs, runs the trace and saves the outputs; returns False if the code cannot be run here."""
        compiled = run.compile(self.programs)
        if compiled is None:
            return False
        with ExitStack() as stack:
            stack.enter_context(closing(compiled))
            self._actual = compiled.run_trace(self.trace)
            save_outputs(saved_folder(self.case), self._actual)
            if self.case.ill_conditioned:
                self._compiled = compiled
                stack.pop_all()  # `judge` closes it
        return True

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """Returns the verdicts on the outputs of the last run, in this process or an earlier one."""
        with closing(self._compiled) if self._compiled is not None else nullcontext():
            return self._verdicts(expectation)

    def _verdicts(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        actual, reference = self._outputs(), self.reference()
        ill_conditioned = self.case.ill_conditioned
        verdicts = judge(
            actual,
            reference,
            expectation=expectation,
            by_oracle=PRECISIONS[self.case.precision].judged_by_oracle,
            ill_conditioned=ill_conditioned,
        )
        draws = self.draw_small_outputs(reference.first)
        failed = [verdict.name for verdict in verdicts if verdict.kind is VerdictKind.FAILED]
        if ill_conditioned and failed:
            draws = self.draws(failed)
        if draws:
            verdicts = judge_by_draws(verdicts, actual, reference, draws, ill_conditioned=ill_conditioned)
        if ill_conditioned and (doubtful := ambiguous_outputs(verdicts, actual, reference, draws)):
            errors = self._errors_of_further_runs(doubtful)
            verdicts = judge_by_typical_errors(verdicts, actual, reference, draws, *errors)
        return add_distributions(verdicts, actual, reference.first)

    def _outputs(self) -> Arrays:
        """Returns the outputs of compiled code, of this run or an earlier one."""
        if self._actual is not None:
            return self._actual
        saved = load_outputs(saved_folder(self.case))
        return {name: array for name, array in saved.items() if not name.startswith("errors/")}

    def _errors_of_further_runs(self, names: Sequence[str]) -> tuple[Arrays, Arrays]:
        """Runs PyTorch and compiled code on inputs and weights that are moved by more than their last place.

        The errors are saved. Where compiled code was not run, they are those that an earlier judgement saved.
        """
        folder = saved_folder(self.case)
        if self._compiled is None:
            saved = load_outputs(folder)
            return select(saved, _PYTORCH_ERRORS), select(saved, _COMPILED_ERRORS)
        precision = PRECISIONS[self.case.precision]
        pytorch = partial(run_trace, self.programs, run=runner_of(precision).run)
        code = partial(self._compiled.run_trace, progress=Progress(lambda stage: None))
        pytorch_errors, compiled_errors = draw_errors(
            self.programs, self.trace, names, (pytorch, code), precision, self.case.seed, scale=PERTURBATION_SCALE
        )
        errors = add_prefix(_PYTORCH_ERRORS, pytorch_errors) | add_prefix(_COMPILED_ERRORS, compiled_errors)
        save_outputs(folder, self._outputs() | errors)
        return pytorch_errors, compiled_errors

    def draw_small_outputs(self, reference: Arrays) -> Arrays:
        """Returns further half-precision errors of outputs with few elements; none in fp32, which the gate judges."""
        names = small_outputs(reference) if PRECISIONS[self.case.precision].judged_by_oracle else ()
        return self.draws(names) if names else {}


def open_trace(case: Case, programs: Mapping[str, Program], trace: Trace) -> TracedWorkload:
    """Returns a workload that computes its reference when it is judged, and does not cache it.

    Args:
        case: Determines by its precision what the outputs are held to, and by its weights how strictly.
        programs: Entry points by name.
        trace: Calls of the programs.
    """
    from harness.parity.oracle import oracle

    run = runner_of(PRECISIONS[case.precision]).run

    def reference() -> Reference:
        return Reference(*(run_trace(programs, trace, each_run) for each_run in (run, run, oracle)))

    return TracedWorkload(programs, trace, reference, case)
