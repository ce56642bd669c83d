"""The judge of videos: the same objects on every frame, their masks, and each step of the tracker by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.expectations import Expectation
from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Arrays
from harness.models.sam3.video import STEP
from harness.models.sam3.video.drift import judge_drift
from harness.models.sam3.video.source import Answer, AskedStep
from harness.parity.verdict import judge, judge_by_gate, unmeasured
from harness.runtime.sam3.resizing import resized
from harness.runtime.sam3.video.bfloat16 import to_bfloat16
from harness.runtime.sam3.video.masks import without_holes_and_sprinkles

Array = npt.NDArray[Any]

NEAR = 1e-3
"""Share of the largest logit of a frame by which logits are moved up and down: rounding of memories moved one a fifth
of that in 36 frames."""
MOST_UNDECIDED = 0.05
"""Share of the pixels of a video that may be undecided."""
TIED = 1e-5
"""Difference of two tracker scores that rounding can turn around."""
ABSENT_LOGIT = 1024
"""Magnitude of the logits of an object that is not there."""
_GATE = 1e-5
"""The strict gate."""


@dataclass(frozen=True, eq=False)
class _Pixels:
    """The pixels of an answer as upstream has them, in the size of the video [h, w], before objects share them out.

    Attributes:
        inside: By id, the mask of each object that may be shown.
        undecided: By id, the pixels that are inside or not when all logits are moved a little, up or down.
        tied: The pixels that two objects claim whose tracker scores differ by a rounding error.
        other: By id, the tied pixels that the object gets if the order of such scores is the other one.
    """

    inside: dict[int, Array]
    undecided: dict[int, Array]
    tied: Array
    other: dict[int, Array]

    @classmethod
    def of(cls, number: int, reference: Arrays) -> _Pixels:
        """Computes them of the logits that upstream had, before holes are filled."""
        height, width = reference[f"{number}/masks"].shape[1:]
        logits, scores = reference[f"{number}/unfilled"], reference[f"{number}/tracker_scores"]
        ids = reference[f"{number}/candidates"].tolist()
        if not ids:
            return cls({}, {}, np.zeros((height, width), bool), {})
        near = NEAR * np.abs(np.where(np.abs(logits) < ABSENT_LOGIT, logits, 0)).max(axis=(1, 2), keepdims=True)
        above, inside, below = (
            resized(without_holes_and_sprinkles(logits + shift), height, width) > 0 for shift in (near, 0, -near)
        )
        undecided = above != below
        claims = np.where(inside, scores[:, None, None], 0)
        order = np.argsort(-claims, axis=0, kind="stable")
        ranked = np.take_along_axis(claims, order, axis=0)
        tied = np.zeros((height, width), bool)
        if len(ids) > 1:
            tied = (ranked[1] > 0) & (ranked[0] - ranked[1] <= TIED)
        other = [tied & (order[min(1, len(ids) - 1)] == position) for position in range(len(ids))]
        inside_of, undecided_of, other_of = (dict(zip(ids, each, strict=True)) for each in (inside, undecided, other))
        return cls(inside_of, undecided_of, tied, other_of)

    def in_the_other_order(self, ids: Sequence[int], masks: Array) -> Array:
        """Masks [n, h, w] of objects that share pixels out by their scores, with the tied ones exchanged."""
        other = np.array([self.other[each] for each in ids], bool).reshape(masks.shape)
        return np.where(self.tied, other, masks)

    def box_limits(self, ids: Sequence[int]) -> tuple[Array, Array]:
        """Between which limits the boxes [n, 4] of objects lie: those of all masks that undecided pixels allow."""
        least = np.array([_box(self.inside[each] & ~self.undecided[each]) for each in ids]).reshape(-1, 4)
        most = np.array([_box(self.inside[each] | self.undecided[each]) for each in ids]).reshape(-1, 4)
        return np.minimum(least, most), np.maximum(least, most)


def judged(actual: Arrays, answer: Answer) -> tuple[Verdict, ...]:
    """Judges a whole video.

    Args:
        actual: What `harness.models.sam3.video.tracked.answered` returns.
        answer: What upstream answers.
    """
    name, reference = answer.question.name, answer.reference
    decided = _judge_decided(name, actual, reference)
    verdicts = [*decided]
    if all(verdict.kind is VerdictKind.STRICT for verdict in decided):
        expected = {number: _Pixels.of(number, reference) for number in _answers(reference)}
        verdicts += _judge_shown(name, actual, reference, expected)
        verdicts += [_judge_masks(f"{name}/masks", actual, reference, expected)]
    if answer.exact is not None:
        verdicts += judge_drift(name, actual, reference, answer.exact)
    return tuple(verdicts)


def judged_step(
    name: str, actual: Arrays, step: AskedStep, expectation: Expectation | None = None
) -> tuple[Verdict, ...]:
    """Judges a step of the compiled model that got PyTorch's own state.

    Args:
        name: What the names of the verdicts begin with.
        actual: What `harness.models.sam3.video.tracked.stepped` returns.
        step: What upstream computes.
        expectation: If it allows the oracle verdict, what is not rounded may pass on it.
    """
    names = {part: f"{name}/{part}" for part in STEP}
    ours, reference, oracle = (
        {names[part]: arrays[part] for part in STEP} for arrays in (actual, step.reference, step.oracle)
    )
    verdicts = judge(ours, reference, oracle, expectation=expectation)
    return (*verdicts, _judge_rounded(f"{name}/rounded", actual["rounded"], step.reference["memory"]))


def _judge_decided(name: str, actual: Arrays, reference: Arrays) -> tuple[Verdict, ...]:
    """The same ids are shown on every frame, and as many objects come and go."""
    answers = _answers(reference)
    last = max((int(arrays[f"{n}/ids"].max(initial=0)) for arrays in (actual, reference) for n in answers), default=0)
    ours, theirs = (
        np.array([np.isin(np.arange(last + 1), arrays.get(f"{number}/ids", ())) for number in answers])
        for arrays in (actual, reference)
    )
    counts = {"ids": (ours, theirs)}
    frames = answers[1:]
    objects = [set(reference[f"{number}/objects"].tolist()) for number in frames]
    seen = set(reference["0/objects"].tolist())  # those that the prompt found
    births = []
    for each in objects:
        births.append(len(each - seen))
        seen |= each
    tracked = [len(reference[f"{number}/memories"]) for number in frames]
    our_births = [int(actual[f"{number}/births"][0]) for number in frames]
    our_tracked = [len(actual[f"{number}/memories"]) for number in frames]
    counts["births"] = np.array(our_births), np.array(births)
    counts["removals"] = (
        _removals(our_tracked, our_births, int(actual["left"][0])),
        _removals(tracked, births, len(objects[-1])),
    )
    return tuple(_judge_by_frame(f"{name}/{part}", *both) for part, both in counts.items())


def _removals(tracked: list[int], births: list[int], left: int) -> Array:
    """How many objects are removed on each frame, of those that are tracked into it and those that are born on it."""
    removed: Array = np.array(tracked) + np.array(births) - np.array([*tracked[1:], left])
    return removed


def _judge_by_frame(name: str, actual: Array, reference: Array) -> Verdict:
    (verdict,) = judge({name: actual}, {name: reference}, {name: reference})
    if verdict.kind is VerdictKind.STRICT:
        return verdict
    different = (actual != reference).reshape(len(reference), -1).any(axis=1)
    return replace(verdict, reason=f"differs first on frame {int(different.argmax())} of the answer: {verdict.reason}")


def _judge_shown(name: str, actual: Arrays, reference: Arrays, expected: dict[int, _Pixels]) -> tuple[Verdict, ...]:
    """Scores and boxes of the objects that are shown."""
    ours, theirs = (
        np.concatenate([arrays[f"{number}/scores"] for number in _answers(reference)]) for arrays in (actual, reference)
    )
    scores = f"{name}/scores"
    verdicts = judge_by_gate({scores: ours}, {scores: theirs}, {scores: theirs})
    outside, count = 0, 0
    for number in _answers(reference):
        lower, upper = expected[number].box_limits(reference[f"{number}/ids"].tolist())
        boxes = actual[f"{number}/boxes"]
        outside += int(np.count_nonzero((boxes < lower - 1e-2) | (boxes > upper + 1e-2)))
        count += boxes.size
    verdict = unmeasured(f"{name}/boxes", np.zeros((count // 4, 4), np.float32), "")
    if outside:
        return (*verdicts, replace(verdict, outside=outside, reason=f"{outside} of {count} coordinates are elsewhere"))
    return (*verdicts, replace(verdict, outside=0, kind=VerdictKind.STRICT))


def _box(mask: Array) -> Array:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return np.array([mask.shape[1], mask.shape[0], 0, 0])
    return np.array([columns[0], rows[0], columns[-1], rows[-1]])


def _judge_masks(name: str, actual: Arrays, reference: Arrays, expected: dict[int, _Pixels]) -> Verdict:
    """Masks are equal but where upstream itself decides by a rounding error.

    Where such an error decides which of two objects is above the other one, all pixels of the frame follow one order.
    """
    different = near = differing = pixels = doubtful = ordered = 0
    for number in _answers(reference):
        ours, theirs = actual[f"{number}/masks"], reference[f"{number}/masks"]
        if ours.shape != theirs.shape:
            return unmeasured(name, ours, f"shape {list(ours.shape)} instead of {list(theirs.shape)}")
        frame = expected[number]
        undecided = np.logical_or.reduce([*frame.undecided.values(), np.zeros_like(frame.tied)])
        exchanged = frame.in_the_other_order(reference[f"{number}/ids"].tolist(), theirs)
        decided, other = (int(np.count_nonzero((ours != each) & ~undecided)) for each in (theirs, exchanged))
        different += min(decided, other)
        ordered += other < decided
        near += int(np.count_nonzero((ours != (exchanged if other < decided else theirs)) & undecided))
        differing += ours.size
        pixels += undecided.size
        doubtful += int(np.count_nonzero(undecided))
    verdict = unmeasured(name, np.zeros((0,), bool), "")
    verdict = replace(verdict, shape=(differing,), elements=differing, outside=different)
    if different:
        return replace(verdict, reason=f"{different} of {differing} pixels differ, and are not undecided")
    if doubtful > MOST_UNDECIDED * pixels:
        return replace(verdict, kind=VerdictKind.NOT_JUDGEABLE, reason=f"{doubtful} of {pixels} pixels are undecided")
    told = []
    if near:
        told.append(f"{near} pixels differ, all of which are undecided, as {doubtful / max(pixels, 1):.2%} of all are")
    if ordered:
        told.append(f"on {ordered} frames two objects of the same score up to rounding are in the other order")
    return replace(verdict, kind=VerdictKind.STRICT, reason="; ".join(told))


def _judge_rounded(name: str, bits: Array, exact: Array) -> Verdict:
    """Rounded memories are what values within the strict gate of PyTorch's are rounded to.

    An element is thus PyTorch's, or one step of bfloat16 from it where PyTorch's value lies at a boundary. Near zero,
    where a step is smaller than the gate, it may be several steps away.
    """
    values = exact.astype(np.float64)
    gate = _GATE + _GATE * np.abs(values)
    least, most = (_ordered(to_bfloat16((values + sign * gate).astype(np.float32))) for sign in (-1, 1))
    ours, theirs = _ordered(bits), _ordered(to_bfloat16(exact))
    wrong = int(np.count_nonzero((ours < least) | (ours > most)))
    verdict = replace(unmeasured(name, bits, ""), outside=wrong)
    if wrong:
        return replace(verdict, reason=f"{wrong} of {bits.size} elements are not rounded from a value in the gate")
    apart = np.abs(ours - theirs)
    one, more = int(np.count_nonzero(apart == 1)), int(np.count_nonzero(apart > 1))
    farther = f", {more} farther where a step is smaller than the gate" if more else ""
    reason = f"{bits.size - one - more} elements are equal, {one} one step of bfloat16 apart{farther}"
    return replace(verdict, kind=VerdictKind.STRICT, reason=reason if one or more else "")


def _ordered(bits: Array) -> Array:
    """Whole numbers in the order of the values of bfloat16 bits, one apart for values that are next to each other."""
    magnitude = (bits & 0x7FFF).astype(np.int32)
    ordered: Array = np.where(bits & 0x8000, -magnitude, magnitude)
    return ordered


def _answers(reference: Arrays) -> list[int]:
    return sorted(int(name.partition("/")[0]) for name in reference if name.endswith("/ids"))
