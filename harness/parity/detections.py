"""The judge of what a user gets: which queries are kept, their masks, boxes and scores in the photograph.

These are decisions and positions, not activations, so they have criteria of their own beside the strict gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.outcome import Verdict, VerdictKind
from harness.parity import metrics
from harness.parity.verdict import unmeasured

Array = npt.NDArray[Any]

UNDECIDED = 1e-4
"""Pixels whose logit is as near to zero may fall on either side of it."""
BOX_PIXELS = 0.01
"""Limit on the error of a box's coordinates, in pixels of the photograph."""
SCORE = 1e-5
"""Limit on the error of a score."""


@dataclass(frozen=True)
class Detections:
    """The detections in one photograph: K kept queries of 200, in the order of the queries.

    Attributes:
        queries: bool [200], True where kept.
        masks: bool [K, h, w].
        boxes: fp32 [K, 4], (x0, y0, x1, y1) in pixels.
        scores: fp32 [K].
    """

    queries: Array
    masks: Array
    boxes: Array
    scores: Array


@dataclass(frozen=True)
class ReferenceDetections:
    """Upstream's detections.

    Attributes:
        found: The first run.
        again: The second run.
        undecided: bool [K, h, w], the pixels whose logit is so near to zero that they may fall on either side.
        boxes, scores: float64, the oracle's, of the queries that the first run keeps; None without an oracle.
    """

    found: Detections
    again: Detections
    undecided: Array
    boxes: Array | None = None
    scores: Array | None = None


Outside = Callable[[Array, Array], Array]
"""Takes what was found and what upstream finds, of one shape; returns where the criterion is violated."""


def judge_detections(prefix: str, actual: Detections, truth: ReferenceDetections) -> tuple[Verdict, ...]:
    """Judges one answer: the same queries kept; masks equal but for undecided pixels; boxes and scores within limits.

    Args:
        prefix: Put before the names of the verdicts, which are `queries`, `masks`, `boxes` and `scores`.
        actual: What the compiled model found.
        truth: What upstream finds.

    Returns:
        Four verdicts; that on masks says how many undecided pixels differ, also where it is strict.
    """
    first, again = truth.found, truth.again

    def judged(name: str, outside: Outside, what: str, exact: Array | None = None) -> Verdict:
        a, r, second = (getattr(found, name) for found in (actual, first, again))
        return _judge(f"{prefix}{name}", a, r, second, outside, what, exact)

    return (
        judged("queries", np.not_equal, "queries are kept on one side only"),
        judge_masks(f"{prefix}masks", actual.masks, first.masks, again.masks, truth.undecided),
        judged("boxes", _beyond(BOX_PIXELS), f"coordinates are off by more than {BOX_PIXELS:g} pixel", truth.boxes),
        judged("scores", _beyond(SCORE), f"scores are off by more than {SCORE:g}", truth.scores),
    )


def judge_masks(name: str, actual: Array, reference: Array, again: Array, undecided: Array) -> Verdict:
    """Judges masks: they are equal but for undecided pixels; a strict verdict says how many of these differ.

    Args:
        name: What the verdict is called.
        actual: The compiled model's masks, bool [K, h, w].
        reference: Upstream's.
        again: Upstream's of a second run.
        undecided: The pixels whose logit is so near to zero that they may fall on either side, bool [K, h, w].
    """

    def outside(a: Array, r: Array) -> Array:
        different: Array = (a != r) & ~undecided
        return different

    masks = _judge(name, actual, reference, again, outside, "pixels differ, and their logit is not near zero", None)
    if masks.kind is VerdictKind.STRICT and (near := metrics.unequal(actual, reference)):
        return replace(masks, reason=f"{near} pixels differ, all of which have a logit within {UNDECIDED:g} of zero")
    return masks


def _beyond(limit: float) -> Outside:
    # Not "greater": NaN is beyond every limit.
    return lambda a, r: ~(np.abs(a.astype(np.float64) - r) <= limit)


def _judge(name: str, a: Array, r: Array, again: Array, outside: Outside, what: str, exact: Array | None) -> Verdict:
    if a.shape != r.shape:
        return unmeasured(name, a, f"shape {list(a.shape)} instead of {list(r.shape)}")
    if a.dtype != r.dtype:
        return unmeasured(name, a, f"dtype {a.dtype.name} instead of {r.dtype.name}")
    verdict = unmeasured(name, a, "")
    if again.shape != r.shape or metrics.bitwise_different(r, again):
        reason = "the reference differs from its own second run"
        return replace(verdict, kind=VerdictKind.NOT_JUDGEABLE, reason=reason)
    wrong = int(np.count_nonzero(outside(a, r)))
    verdict = replace(verdict, outside=wrong)
    if not metrics.is_exact(r.dtype):
        verdict = _measured(verdict, a, r, exact)
    if wrong:
        return replace(verdict, reason=f"{wrong} of {a.size} {what}")
    return replace(verdict, kind=VerdictKind.STRICT)


def _measured(verdict: Verdict, a: Array, r: Array, exact: Array | None) -> Verdict:
    difference = metrics.difference(a, r)
    nothing = metrics.OracleRatio(math.nan, math.nan)
    ratio = nothing if exact is None else metrics.oracle_ratio(a, r, exact)
    return replace(
        verdict,
        max_abs=difference.max_abs,
        mean_abs=difference.mean_abs,
        max_rel=difference.max_rel,
        required_tolerance=difference.required_tolerance,
        sqnr_db=difference.sqnr_db,
        r_rms=ratio.r_rms,
        r_inf=ratio.r_inf,
    )
