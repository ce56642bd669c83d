"""Adds diagnoses to the results of a verification whose outputs were judged wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness.core.budget import NO_GROUPS, Groups
from harness.core.errors import HarnessError
from harness.core.outcome import Status, VerdictKind
from harness.core.settings import Settings
from harness.diagnose.diagnosing import diagnose
from harness.diagnose.document import document
from harness.models.registry import subjects
from harness.report import Result

_WRONG = (VerdictKind.FAILED, VerdictKind.NOT_JUDGEABLE)


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
    wrong = [verdict.name for verdict in result.outcome.verdicts if verdict.kind in _WRONG]
    if not wrong:
        return f"it ended at {result.outcome.stage.value} with no output that could be followed"
    if result.outcome.device is not None:
        return f"it ran on {result.outcome.device.name}, and kernels are followed on this machine alone"
    subject = subjects()[result.case.component]
    if not subject.whole and not set(wrong).intersection(subject.outputs):
        return f"{wrong[0]} is of another sample than the main one, which alone can be followed"
    return ""
