"""Workloads that are traces: the same calls run in PyTorch fp32, in float64 and as compiled code, and are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict, VerdictKind
from harness.core.precision import PRECISIONS
from harness.core.program import Arrays, Program, Trace
from harness.core.progress import Progress
from harness.core.weights import Weights
from harness.parity.distribution import add_distributions
from harness.parity.monte_carlo import (
    PERTURBATION_SCALE,
    ambiguous_outputs,
    draw_errors,
    judge_by_draws,
    judge_by_typical_errors,
    small_outputs,
)
from harness.parity.saved_outputs import load_outputs, save_outputs, saved_folder
from harness.parity.verdict import judge

if TYPE_CHECKING:
    from harness.execution.run import Compiled, Run

_THEIRS, _OURS = "errors of PyTorch: ", "errors of compiled code: "
"""What the names of errors of further runs begin with, among the outputs that are saved."""


@dataclass
class TracedWorkload:
    """A trace with its reference and its oracle.

    Attributes:
        programs: Entry points by name.
        trace: The calls.
        reference: Makes PyTorch's outputs, of two runs.
        oracle: Makes the float64 outputs.
        case: Says by its precision and its weights how outputs are judged, and where those of compiled code are kept.
        draws: Makes further errors of PyTorch, of the outputs with these names (`harness.parity.monte_carlo`).
    """

    programs: Mapping[str, Program]
    trace: Trace
    reference: Callable[[], tuple[Arrays, Arrays]]
    oracle: Callable[[], Arrays]
    case: Case
    draws: Callable[[Sequence[str]], Arrays] = lambda names: {}
    _actual: Arrays | None = None
    _compiled: Compiled | None = None

    def run(self, run: Run) -> bool:
        """Does what `harness.models.subject.Workload` says."""
        compiled = run.compiled(self.programs)
        if compiled is None:
            return False
        with ExitStack() as stack:
            stack.enter_context(closing(compiled))
            self._actual = compiled.outputs(self.trace)
            save_outputs(saved_folder(self.case), self._actual)
            if self._ill_conditioned:
                self._compiled = compiled
                stack.pop_all()  # it is closed when its outputs are judged
        return True

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """Does what `harness.models.subject.Workload` says."""
        with closing(self._compiled) if self._compiled is not None else nullcontext():
            return self._judged(expectation)

    def _judged(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        actual, theirs, ours = self._outputs()
        reference, again = self.reference()
        oracle = self.oracle()
        verdicts = judge(
            actual,
            reference,
            oracle,
            reference_again=again,
            expectation=expectation,
            by_oracle=PRECISIONS[self.case.precision].judged_by_oracle,
            ill_conditioned=self._ill_conditioned,
        )
        draws = self.draws_of_few(reference)
        if self._ill_conditioned and (
            failed := [verdict.name for verdict in verdicts if verdict.kind is VerdictKind.FAILED]
        ):
            draws = self.draws(failed)
        if draws:
            verdicts = judge_by_draws(verdicts, actual, reference, oracle, draws, ill_conditioned=self._ill_conditioned)
        if self._ill_conditioned and (doubtful := ambiguous_outputs(verdicts, actual, reference, oracle, draws)):
            if self._compiled is not None and self._actual is not None:
                theirs, ours = self._errors_of_further_runs(doubtful, self._compiled)
                save_outputs(saved_folder(self.case), self._actual | _named(_THEIRS, theirs) | _named(_OURS, ours))
            verdicts = judge_by_typical_errors(verdicts, actual, reference, oracle, draws, theirs, ours)
        return add_distributions(verdicts, actual, reference)

    @property
    def _ill_conditioned(self) -> bool:
        """Whether the weights strain fp32, and the case is held to the gate."""
        return Weights(self.case.weights).ill_conditioned and not PRECISIONS[self.case.precision].judged_by_oracle

    def _outputs(self) -> tuple[Arrays, Arrays, Arrays]:
        """Returns the outputs of compiled code, and the errors of further runs that an earlier judgement asked for."""
        if self._actual is not None:
            return self._actual, {}, {}
        saved = load_outputs(saved_folder(self.case))
        theirs, ours = (
            {name.removeprefix(prefix): saved.pop(name) for name in list(saved) if name.startswith(prefix)}
            for prefix in (_THEIRS, _OURS)
        )
        return saved, theirs, ours

    def _errors_of_further_runs(self, names: Sequence[str], compiled: Compiled) -> tuple[Arrays, Arrays]:
        """Runs PyTorch and compiled code on the same inputs and weights, moved further than by their last place."""
        from harness.parity.references import reference_of
        from harness.parity.trace import run_trace

        precision = PRECISIONS[self.case.precision]
        pytorch = partial(run_trace, self.programs, run=reference_of(precision).run)
        code = partial(compiled.outputs, progress=Progress(lambda stage: None))
        theirs, ours = draw_errors(
            self.programs, self.trace, names, (pytorch, code), precision, self.case.seed, scale=PERTURBATION_SCALE
        )
        return theirs, ours

    def draws_of_few(self, reference: Arrays) -> Arrays:
        """Further errors of half precision in the outputs of few numbers; nothing in fp32, which the gate judges."""
        names = small_outputs(reference) if PRECISIONS[self.case.precision].judged_by_oracle else ()
        return self.draws(names) if names else {}


def _named(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def open_trace(case: Case, programs: Mapping[str, Program], trace: Trace) -> TracedWorkload:
    """Returns a workload whose reference and oracle are made when it is judged, and are not kept.

    Args:
        case: Says by its precision what the outputs are held to, and by its weights how strictly.
        programs: Entry points by name.
        trace: Calls of the programs.
    """
    from harness.parity.oracle import oracle
    from harness.parity.references import reference_of, run_twice, split_runs
    from harness.parity.trace import run_trace

    run = reference_of(PRECISIONS[case.precision]).run
    return TracedWorkload(
        programs,
        trace,
        reference=lambda: split_runs(run_twice(lambda: run_trace(programs, trace, run))),
        oracle=lambda: run_trace(programs, trace, oracle),
        case=case,
    )
