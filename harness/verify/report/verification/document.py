"""Builds, validates and reads the JSON report.

Schema 1:

    {"schema": 1, "created": ISO 8601 in UTC, "machine": {…}, "versions": {…},
     "cases": [{"component", "strategy", "target", "scale", "seed", "status", "stage",
                "precision": where it is not fp32, "frontend": where it is not torch,
                "weights": where they are not seeded,
                "expected": true, false, or null where the case was skipped as unavailable,
                "problem": why it is not expected, or why it was skipped, else null,
                "why": the cause of a known discrepancy, from the expectations, else null,
                "error": {"type", "message", "details"} or null,
                "device": the machine that ran it, if that was another one: {"told": in words, …},
                "seconds": {stage: s}, "sizes": {artifact: bytes}, "peak_rss_bytes", "repro",
                "outputs": [{"name", "shape", "dtype", "elements", "outside", "max_abs", "mean_abs", "max_rel",
                             "required_tolerance", "sqnr_db", "r_rms", "r_inf", "verdict", "reason",
                             "distribution": how the errors are distributed, where that was measured}],
                "emulated": true where the CPU ran the GPU's kernels,
                "lost_schedules": a sentence on each schedule that could not be applied, if there are any,
                "diagnosis": which kernel diverges, of a case that was diagnosed (`harness.verify.diagnose.report`),
                "not_diagnosed": why a case was not, where a diagnosis was asked for,
                "kernels": for a GPU target, {architecture: [[a value for each of `KERNEL_COLUMNS`], …]}}],
     "summary": {"cases", "passed", "expected_failures", "unexpected", "unavailable",
                 "compiled_only": those of the unavailable that were compiled,
                 "emulated", "outputs", "strict_outputs", "oracle_outputs", "elements_outside", "worst_r_rms"}}

The terms of a distribution are those of `harness.core.outcome.Distribution`, and it is of bounded size:

    {"histogram": counts by |error| / gate between `EDGES`, or [],
     "largest": the largest |error| in each cell of the image: a string of numbers with spaces for each row,
     "masks": [{"index": [index on all axes but the last two], "size": [height, width], "differing": pixels,
                "torch": a PNG file in base64, "tvm": likewise, or null if both pictures are equal,
                "marks": likewise, transparent except where a pixel differs, or null if none does}]}

Every case is counted once: cases = passed + expected_failures + unexpected + unavailable, where `passed` counts those
that passed as expected. `harness.verify.report.verification.schema` says how floats are stored.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from harness.core.errors import HarnessError
from harness.core.expectations import Expectation, check
from harness.core.outcome import METRICS, Distribution, Kernel, Outcome, Status, Verdict, VerdictKind
from harness.core.precision import PRECISIONS
from harness.runtime.decoding import convert, decode
from harness.verify.report.verification.schema import SCHEMA, Report, jsonable

if TYPE_CHECKING:
    from harness.core.case import Case

KERNEL_COLUMNS = tuple(field.name for field in fields(Kernel) if field.name != "architecture")
"""The stored properties of a kernel, in this order; null if one is unknown."""


@dataclass(frozen=True)
class Result:
    """A case with its outcome, and whether the outcome was expected.

    Attributes:
        case: The case.
        outcome: The outcome.
        expected: Whether the outcome was expected; None if the case was skipped as unavailable.
        problem: Why the outcome is not expected, or why the case was skipped.
        why: The cause of a known discrepancy, from the expectations.
        diagnosis: The diagnosis, as `harness.verify.diagnose.report` writes it; None if the case was not diagnosed.
        not_diagnosed: Why a requested diagnosis failed, in a sentence.
    """

    case: Case
    outcome: Outcome
    expected: bool | None
    problem: str = ""
    why: str = ""
    diagnosis: Mapping[str, Any] | None = None
    not_diagnosed: str = ""

    @property
    def compiled_only(self) -> bool:
        """Returns whether code was generated for the case, and no device here runs it."""
        return self.expected is None and self.outcome.compiled

    @classmethod
    def from_outcome(cls, case: Case, outcome: Outcome, expectation: Expectation | None) -> Result:
        """Returns the result of comparing the outcome with its expectation."""
        rating = check(case, outcome, expectation)
        return cls(case, outcome, rating.expected, rating.sentence, expectation.why if expectation else "")


def repro_command(case: Case, flags: Sequence[str] = ()) -> str:
    """Returns the command that runs this one case again; `flags` are appended (for instance `--checkpoint PATH`)."""
    words = ["sam3-tvm", "verify", "--component", case.component, "--strategy", case.strategy, "--target", case.target]
    options = [word for name, value in case.nondefaults.items() for word in (f"--{name}", value)]
    return shlex.join([*words, "--scale", case.scale, *options, "--seed", str(case.seed), *flags])


def build_report(
    results: Sequence[Result],
    machine: Mapping[str, Any],
    versions: Mapping[str, Any],
    *,
    flags: Sequence[str] = (),
    created: datetime | None = None,
) -> dict[str, Any]:
    """Builds the report as JSON-able data."""
    moment = (created or datetime.now(UTC)).astimezone(UTC)
    return {
        "schema": SCHEMA,
        "created": moment.isoformat(timespec="seconds"),
        "machine": dict(machine),
        "versions": dict(versions),
        "cases": [_case(result, flags) for result in results],
        "summary": _summary(results),
    }


def read_report(path: Path) -> dict[str, Any]:
    """Reads a JSON report and checks it against the schema.

    Raises:
        HarnessError: The file cannot be read, is not JSON, or is not a report of this schema.
    """
    try:
        data = decode(path.read_bytes())
    except OSError as error:
        raise HarnessError(f"cannot read the report {path}: {error}; write one with `sam3-tvm verify`") from error
    except ValueError as error:
        raise HarnessError(f"{path} is not JSON ({error}); write the report again") from error
    try:
        convert(data, Report)
    except ValueError as error:
        raise HarnessError(
            f"{path} is not a verification report of schema {SCHEMA}: {error}; write the report again"
        ) from error
    report: dict[str, Any] = data
    return report


def _case(result: Result, flags: Sequence[str]) -> dict[str, Any]:
    case, outcome = result.case, result.outcome
    optional = {
        "device": outcome.device and {**asdict(outcome.device), "told": str(outcome.device)},
        "emulated": outcome.emulated,
        "lost_schedules": list(outcome.lost_schedules),
        "diagnosis": result.diagnosis,
        "not_diagnosed": result.not_diagnosed,
        "kernels": _kernels(outcome.kernels),
    }
    return {
        "component": case.component,
        "strategy": case.strategy,
        "target": case.target,
        "scale": str(case.scale),
        "seed": case.seed,
        "status": outcome.status.value,
        "stage": outcome.stage.value,
        "expected": result.expected,
        "problem": result.problem or None,
        "why": result.why or None,
        "error": asdict(outcome.error) if outcome.error else None,
        "seconds": {stage: jsonable(seconds) for stage, seconds in outcome.seconds.items()},
        "sizes": dict(outcome.sizes),
        "peak_rss_bytes": outcome.peak_rss_bytes,
        "repro": repro_command(case, flags),
        "outputs": [_output(verdict) for verdict in outcome.verdicts],
        **case.nondefaults,
        **{name: value for name, value in optional.items() if value},
    }


def _kernels(kernels: Sequence[Kernel]) -> dict[str, list[list[Any]]]:
    """Groups kernels by architecture; kernels that samples of a component share are listed once."""
    rows: dict[str, dict[tuple[Any, ...], None]] = {}
    for kernel in kernels:
        row = tuple(getattr(kernel, column) for column in KERNEL_COLUMNS)
        rows.setdefault(kernel.architecture, {})[row] = None
    return {architecture: [list(row) for row in sorted(group, key=str)] for architecture, group in rows.items()}


def _output(verdict: Verdict) -> dict[str, Any]:
    return {
        "name": verdict.name,
        "shape": list(verdict.shape),
        "dtype": verdict.dtype,
        "elements": verdict.elements,
        "outside": verdict.outside,
        **{metric: jsonable(getattr(verdict, metric)) for metric in METRICS},
        "verdict": verdict.kind.value,
        "reason": verdict.reason,
        **({"distribution": _distribution(verdict.distribution)} if verdict.distribution else {}),
    }


def _distribution(distribution: Distribution) -> dict[str, Any]:
    return {
        "histogram": list(distribution.histogram),
        "largest": [" ".join(f"{value:.3g}" for value in row) for row in distribution.largest],
        "masks": to_builtins(distribution.masks),
    }


def _summary(results: Sequence[Result]) -> dict[str, Any]:
    verdicts = [verdict for result in results for verdict in result.outcome.verdicts]
    kinds = [verdict.kind for verdict in verdicts]
    ratios = [verdict.r_rms for verdict in verdicts if not math.isnan(verdict.r_rms)]
    expected = [result.outcome.status for result in results if result.expected]
    return {
        "cases": len(results),
        "passed": expected.count(Status.PASSED),
        "expected_failures": len(expected) - expected.count(Status.PASSED),
        "unexpected": sum(result.expected is False for result in results),
        "unavailable": sum(result.expected is None for result in results),
        "compiled_only": sum(result.compiled_only for result in results),
        "outputs": len(verdicts),
        "strict_outputs": kinds.count(VerdictKind.STRICT),
        "oracle_outputs": kinds.count(VerdictKind.ORACLE),
        "emulated": sum(result.outcome.emulated for result in results),
        "elements_outside": sum(
            verdict.outside
            for result in results
            if not PRECISIONS[result.case.precision].judged_by_oracle
            for verdict in result.outcome.verdicts
        ),
        "worst_r_rms": jsonable(max(ratios)) if ratios else None,
    }
