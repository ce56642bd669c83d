"""Judges detections in a photograph: the kept queries, their masks, boxes and scores.

Detections are decisions and positions, not activations, so they have their own criteria besides the strict gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np

from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Array, Arrays
from harness.parity import metrics
from harness.parity.references import Reference
from harness.parity.verdict import unmeasured_verdict

UNDECIDED = 1e-4
"""Pixels whose logit is within this distance of zero may fall on either side."""
BOX_PIXELS = 0.01
"""Limit on the error of a box's coordinates, in pixels of the photograph."""
SCORE = 1e-5
"""Limit on the error of a score."""


Criterion = Callable[[Array, Array], Array]
"""Takes actual and reference values of equal shape; returns where a criterion is violated."""


def judge_detections(prefix: str, actual: Arrays, reference: Reference) -> tuple[Verdict, ...]:
    """Judges detections: equal queries, equal masks except undecided pixels, boxes and scores within limits.

    Detections of K kept queries, in the order of the queries, are

    - queries: bool [200], True where kept.
    - masks: bool [K, h, w].
    - boxes: fp32 [K, 4], (x0, y0, x1, y1) in pixels.
    - scores: fp32 [K].

    Args:
        prefix: Prefix of the names of the verdicts.
        actual: The compiled model's detections.
        reference: Upstream's detections in two runs, the first with `undecided`, bool [K, h, w], True for pixels whose
            logit is within `UNDECIDED` of zero; boxes and scores in float64 if there are any, for the queries that the
            first run keeps.

    Returns:
        Four verdicts. The verdict on masks says how many undecided pixels differ, even if it is strict.
    """
    first, again = reference.first, reference.again

    def judge_field(name: str, criterion: Criterion, problem: str) -> Verdict:
        exact = reference.exact.get(name)
        return _judge(f"{prefix}{name}", actual[name], first[name], again[name], criterion, problem, exact)

    return (
        judge_field("queries", np.not_equal, "queries are kept on one side only"),
        judge_masks(f"{prefix}masks", actual["masks"], first["masks"], again["masks"], first["undecided"]),
        judge_field("boxes", _exceeds(BOX_PIXELS), f"coordinates are off by more than {BOX_PIXELS:g} pixel"),
        judge_field("scores", _exceeds(SCORE), f"scores are off by more than {SCORE:g}"),
    )


def judge_masks(name: str, actual: Array, reference: Array, second: Array, undecided: Array) -> Verdict:
    """Judges masks: they must be equal except for undecided pixels, whose number a strict verdict tells.

    Args:
        name: Name of the verdict.
        actual: The compiled model's masks, bool [K, h, w].
        reference: Upstream's masks.
        second: Upstream's masks in a second run.
        undecided: bool [K, h, w], True for pixels whose logit is within `UNDECIDED` of zero.
    """

    def criterion(a: Array, r: Array) -> Array:
        different: Array = (a != r) & ~undecided
        return different

    masks = _judge(name, actual, reference, second, criterion, "pixels differ, and their logit is not near zero", None)
    if masks.kind is VerdictKind.STRICT and (near := metrics.unequal(actual, reference)):
        return replace(masks, reason=f"{near} pixels differ, all of which have a logit within {UNDECIDED:g} of zero")
    return masks


def _exceeds(limit: float) -> Criterion:
    # A negated "less": NaN must exceed every limit.
    return lambda a, r: ~(np.abs(a.astype(np.float64) - r) <= limit)


def _judge(
    name: str, a: Array, r: Array, second: Array, outside: Criterion, problem: str, exact: Array | None
) -> Verdict:
    """Judges one field of the detections by its criterion; `exact` is the field in float64, None if there is none."""
    if a.shape != r.shape:
        return unmeasured_verdict(name, a, f"shape {list(a.shape)} instead of {list(r.shape)}")
    if a.dtype != r.dtype:
        return unmeasured_verdict(name, a, f"dtype {a.dtype.name} instead of {r.dtype.name}")
    verdict = unmeasured_verdict(name, a, "")
    if second.shape != r.shape or metrics.bitwise_different(r, second):
        reason = "the reference differs from its own second run"
        return replace(verdict, kind=VerdictKind.NOT_JUDGEABLE, reason=reason)
    violations = int(np.count_nonzero(outside(a, r)))
    verdict = replace(verdict, outside=violations)
    if not metrics.is_exact(r.dtype):
        ratio = metrics.OracleRatio(math.nan, math.nan) if exact is None else metrics.oracle_ratio(a, r, exact)
        measured = asdict(metrics.difference(a, r)) | asdict(ratio) | {"outside": violations}
        verdict = replace(verdict, **measured)
    if violations:
        return replace(verdict, reason=f"{violations} of {a.size} {problem}")
    return replace(verdict, kind=VerdictKind.STRICT)
