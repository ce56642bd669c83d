"""The judge of what is shown: scores, boxes and masks, where a mask may differ only as rounding can decide a pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Arrays
from harness.parity.verdict import judge, judge_by_gate, unmeasured
from harness.runtime.sam3.resizing import resized
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


def answers_in(reference: Arrays) -> list[int]:
    """The numbers of the frames that were given out, in order, of arrays whose names begin with them."""
    return sorted(int(name.partition("/")[0]) for name in reference if name.endswith("/ids"))


def shown_ids(actual: Arrays, reference: Arrays) -> tuple[Array, Array]:
    """Which objects are shown on each frame, bool [frames, ids], the compiled model's and upstream's."""
    answers = answers_in(reference)
    arrays = (actual, reference)
    last = max((int(each[f"{n}/ids"].max(initial=0)) for each in arrays for n in answers_in(each)), default=0)
    ours, theirs = (
        np.array([np.isin(np.arange(last + 1), each.get(f"{number}/ids", ())) for number in answers]) for each in arrays
    )
    return ours, theirs


def judge_by_frame(name: str, actual: Array, reference: Array) -> Verdict:
    """Judges arrays that are equal frame by frame, and names the first frame that differs."""
    (verdict,) = judge({name: actual}, {name: reference}, {name: reference})
    if verdict.kind is VerdictKind.STRICT or actual.shape != reference.shape:
        return verdict
    different = (actual != reference).reshape(len(reference), -1).any(axis=1)
    return replace(verdict, reason=f"differs first on frame {int(different.argmax())} of the answer: {verdict.reason}")


def judge_shown(name: str, actual: Arrays, reference: Arrays, pixels: Mapping[int, FramePixels]) -> tuple[Verdict, ...]:
    """Judges scores, boxes and masks, where both sides show the same objects on every frame.

    Args:
        name: What the names of the verdicts begin with.
        actual: `0/scores`, `0/boxes` (x0, y0, x1, y1) in pixels and `0/masks` of the first frame, and so on.
        reference: `ids`, `scores` and `masks` in the same way.
        pixels: By frame, where upstream decides about a pixel.
    """
    masks = _judge_masks(f"{name}/masks", actual, reference, pixels)
    return (*_judge_scores_and_boxes(name, actual, reference, pixels), masks)


@dataclass(frozen=True, eq=False)
class FramePixels:
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
    def of(cls, ids: Sequence[int], logits: Sequence[Array], scores: Array, size: tuple[int, ...]) -> FramePixels:
        """Computes them of what upstream had.

        Args:
            ids: Of the m objects that may be shown.
            logits: Of each, fp32 [288, 288], or [h, w] where a prompt gave the mask, before holes are filled.
            scores: Tracker scores fp32 [m].
            size: Height and width of the video.
        """
        if not ids:
            return cls({}, {}, np.zeros(size, bool), {})
        moved = [_moved(each, size) for each in logits]
        above, inside, below = (np.array([each[way] for each in moved]) for way in range(3))
        undecided = above != below
        claims = np.where(inside, scores[:, None, None], 0)
        order = np.argsort(-claims, axis=0, kind="stable")
        ranked = np.take_along_axis(claims, order, axis=0)
        tied = np.zeros(size, bool)
        if len(ids) > 1:
            # Equal scores are constants, as of prompts; the order of such objects is that of upstream's list.
            tied = (ranked[1] > 0) & (ranked[0] != ranked[1]) & (ranked[0] - ranked[1] <= TIED)
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


def _judge_scores_and_boxes(
    name: str, actual: Arrays, reference: Arrays, expected: Mapping[int, FramePixels]
) -> tuple[Verdict, ...]:
    """Scores and boxes of the objects that are shown."""
    ours, theirs = (
        np.concatenate([arrays[f"{number}/scores"] for number in answers_in(reference)])
        for arrays in (actual, reference)
    )
    scores = f"{name}/scores"
    verdicts = judge_by_gate({scores: ours}, {scores: theirs}, {scores: theirs})
    outside, count = 0, 0
    for number in answers_in(reference):
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


def _judge_masks(name: str, actual: Arrays, reference: Arrays, expected: Mapping[int, FramePixels]) -> Verdict:
    """Masks are equal but where upstream itself decides by a rounding error.

    Where such an error decides which of two objects is above the other one, all pixels of the frame follow one order.
    """
    different = near = differing = pixels = doubtful = ordered = 0
    for number in answers_in(reference):
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


def _moved(logits: Array, size: tuple[int, ...]) -> list[Array]:
    """The mask bool [h, w] of logits that are moved up, left as they are, and moved down."""
    near = NEAR * np.abs(np.where(np.abs(logits) < ABSENT_LOGIT, logits, 0)).max()
    shifted = np.stack([logits + near, logits, logits - near]).astype(np.float32)
    return list(resized(without_holes_and_sprinkles(shifted), *size) > 0)
