"""Runs the model itself, before a strategy, an export or an import changes it, and judges outputs against it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import VerdictKind
from harness.core.precision import PRECISIONS
from harness.core.program import Arrays, Program
from harness.core.weights import Weights
from harness.diagnose.deviation import Deviation, deviation
from harness.parity.oracle import oracle
from harness.parity.references import reference_of, run_twice, split_runs
from harness.parity.verdict import judge

if TYPE_CHECKING:
    import numpy.typing as npt

_WRONG = (VerdictKind.FAILED, VerdictKind.NOT_JUDGEABLE)


@dataclass(frozen=True)
class Upstream:
    """The outputs of a model, including complex ones, as a verification computes them.

    Attributes:
        case: Its precision and weights say how strictly outputs are judged.
        reference: PyTorch's outputs by name.
        again: PyTorch's outputs of a second run.
        exact: The float64 outputs.
    """

    case: Case
    reference: Arrays
    again: Arrays
    exact: Arrays

    @classmethod
    def from_program(cls, program: Program, case: Case) -> Upstream:
        """Runs a program's module, unchanged, on its example inputs."""
        module, inputs, names = program.module, tuple(program.example.values()), program.outputs
        run = reference_of(PRECISIONS[case.precision]).run
        first, second = split_runs(run_twice(lambda: dict(run(module, inputs, names))))
        return cls(case, first, second, oracle(module, inputs, names))

    def failed(self, outputs: Arrays, expectation: Expectation | None) -> dict[str, str]:
        """Returns the outputs that a verification rejects, each with the reason."""
        by_oracle = PRECISIONS[self.case.precision].judged_by_oracle
        verdicts = judge(
            outputs,
            self.reference,
            self.exact,
            reference_again=self.again,
            expectation=expectation,
            by_oracle=by_oracle,
            ill_conditioned=Weights(self.case.weights).ill_conditioned and not by_oracle,
        )
        return {verdict.name: verdict.reason for verdict in verdicts if verdict.kind in _WRONG}

    def deviations(self, outputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, Deviation]:
        """Returns the errors of outputs, in any shape."""
        return {name: self._deviation(name, output) for name, output in outputs.items()}

    def _deviation(self, name: str, output: npt.NDArray[Any]) -> Deviation:
        expected, exact = self.reference[name], self.exact[name]
        if output.size != expected.size or exact.shape != expected.shape:
            return Deviation(math.inf, math.inf, math.inf, math.nan, output.size)
        return deviation(output.reshape(expected.shape), expected, exact)
