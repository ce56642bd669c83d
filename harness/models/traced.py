"""Workloads that are traces: the same calls run in PyTorch fp32, in float64 and as compiled code, and are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict, VerdictKind
from harness.core.precision import PRECISIONS
from harness.core.program import Arrays, Program, Trace
from harness.core.weights import Weights
from harness.parity.distribution import with_distributions
from harness.parity.draws import judged_by_draws, names_of_few
from harness.parity.saved import load_outputs, save_outputs, saved_folder
from harness.parity.verdict import judge

if TYPE_CHECKING:
    from harness.execution.run import Run


@dataclass
class TracedWorkload:
    """A trace with its reference and its oracle.

    Attributes:
        programs: Entry points by name.
        trace: The calls.
        reference: Makes PyTorch's outputs, of two runs.
        oracle: Makes the float64 outputs.
        case: Says by its precision and its weights how outputs are judged, and where those of compiled code are kept.
        draws: Makes further errors of PyTorch, of the outputs with these names (`harness.parity.draws`).
    """

    programs: Mapping[str, Program]
    trace: Trace
    reference: Callable[[], tuple[Arrays, Arrays]]
    oracle: Callable[[], Arrays]
    case: Case
    draws: Callable[[Sequence[str]], Arrays] = lambda names: {}
    _actual: Arrays | None = None

    def run(self, run: Run) -> bool:
        """Does what `harness.models.subject.Workload` says."""
        self._actual = run.trace(self.programs, self.trace)
        if self._actual is None:
            return False
        save_outputs(saved_folder(self.case), self._actual)
        return True

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """Does what `harness.models.subject.Workload` says."""
        actual = load_outputs(saved_folder(self.case)) if self._actual is None else self._actual
        reference, again = self.reference()
        oracle = self.oracle()
        by_oracle = PRECISIONS[self.case.precision].judged_by_oracle
        strained = Weights(self.case.weights).strain_fp32 and not by_oracle
        verdicts = judge(
            actual,
            reference,
            oracle,
            reference_again=again,
            expectation=expectation,
            by_oracle=by_oracle,
            strained=strained,
        )
        draws = self.draws_of_few(reference)
        if strained and (failed := [verdict.name for verdict in verdicts if verdict.kind is VerdictKind.FAILED]):
            draws = self.draws(failed)
        if draws:
            verdicts = judged_by_draws(verdicts, actual, reference, oracle, draws, strained=strained)
        return with_distributions(verdicts, actual, reference)

    def draws_of_few(self, reference: Arrays) -> Arrays:
        """Further errors of half precision in the outputs of few numbers; nothing in fp32, which the gate judges."""
        names = names_of_few(reference) if PRECISIONS[self.case.precision].judged_by_oracle else ()
        return self.draws(names) if names else {}


def open_trace(case: Case, programs: Mapping[str, Program], trace: Trace) -> TracedWorkload:
    """Returns a workload whose reference and oracle are made when it is judged, and are not kept.

    Args:
        case: Says by its precision what the outputs are held to, and by its weights how strictly.
        programs: Entry points by name.
        trace: Calls of the programs.
    """
    from harness.parity.oracle import oracle
    from harness.parity.references import first_and_again, reference_of, run_twice
    from harness.parity.trace import run_trace

    run = reference_of(PRECISIONS[case.precision]).run
    return TracedWorkload(
        programs,
        trace,
        reference=lambda: first_and_again(run_twice(lambda: run_trace(programs, trace, run))),
        oracle=lambda: run_trace(programs, trace, oracle),
        case=case,
    )
