"""The judge of what is shown: scores, boxes and masks, where a mask may differ only as rounding can decide a pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Arrays
from harness.models.sam3.video.undecided import leeway
from harness.parity.verdict import judge, judge_by_gate, unmeasured
from harness.runtime.sam3.resizing import resize
from harness.runtime.sam3.video.masks import PRESENT_LOGIT, without_holes_and_sprinkles

Array = npt.NDArray[Any]

MOST_UNDECIDED = 0.05
"""Share of the pixels of a video that may be undecided."""
TIED = 1e-5
"""Difference of two tracker scores that rounding can turn around."""
OF_A_PROMPT = float(1 / (1 + np.exp(-PRESENT_LOGIT)))
"""Tracker score, fp32, of an object on the frame of its prompt."""


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
        scores: By id, the tracker score, by which objects share out the pixels that several claim.
    """

    inside: dict[int, Array]
    undecided: dict[int, Array]
    scores: dict[int, float]

    @classmethod
    def of(cls, ids: Sequence[int], logits: Sequence[Array], scores: Array, size: tuple[int, ...]) -> FramePixels:
        """Computes them of what upstream had.

        Args:
            ids: Of the m objects that may be shown.
            logits: Of each, fp32 [288, 288], or [h, w] where a prompt gave the mask, before holes are filled.
            scores: Tracker scores fp32 [m].
            size: Height and width of the video.
        """
        moved = [_moved(each, size) for each in logits]
        return cls(
            {each: inside for each, (_, inside, _) in zip(ids, moved, strict=True)},
            {each: above != below for each, (above, _, below) in zip(ids, moved, strict=True)},
            dict(zip(ids, scores.tolist(), strict=True)),
        )

    def tied(self) -> list[list[int]]:
        """Returns the ids of objects whose scores rounding can turn around, group by group.

        Scores that are the constant of a prompt are equal on both sides: their order is that of upstream's list.
        """
        groups: list[list[int]] = []
        last = None
        for each in sorted(self.scores, key=lambda each: -self.scores[each]):
            score = self.scores[each]
            if last is not None and last - score <= TIED and not last == score == OF_A_PROMPT:
                groups[-1].append(each)
            else:
                groups.append([each])
            last = score
        return [group for group in groups if len(group) > 1]

    def in_the_order_of(self, shown: Array, ids: Sequence[int], masks: Array) -> Array:
        """Returns masks whose tied objects share out pixels in the one order that other masks show.

        Args:
            shown: The other masks bool [n, h, w].
            ids: Of the n objects of both.
            masks: Upstream's.
        """
        masks = masks.copy()
        for group in self.tied():
            highest = max(self.scores[each] for each in group)
            above = [self.inside[each] for each, score in self.scores.items() if score > highest]
            free = ~np.logical_or.reduce(above, initial=False)
            claims = {each: self.inside[each] & free for each in group}
            owned = {each: claim & shown[ids.index(each)] for each, claim in claims.items() if each in ids}
            # What no shown object has is of one that is not shown.
            nobodys = ~np.logical_or.reduce(list(owned.values()), initial=False)
            owned |= {each: claims[each] & nobodys for each in group if each not in ids}
            left = np.ones(masks.shape[1:], bool)
            for each in _order(group, claims, owned):
                if each in ids:
                    position = ids.index(each)
                    masks[position] = np.where(claims[each], left, masks[position])
                left &= ~claims[each]
        return masks

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
        undecided = np.logical_or.reduce([*frame.undecided.values(), np.zeros(theirs.shape[1:], bool)])
        exchanged = frame.in_the_order_of(ours, reference[f"{number}/ids"].tolist(), theirs)
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
        told.append(f"on {ordered} frames objects of the same score up to rounding are in another order")
    return replace(verdict, kind=VerdictKind.STRICT, reason="; ".join(told))


def _order(group: Sequence[int], claims: Mapping[int, Array], owned: Mapping[int, Array]) -> list[int]:
    """Returns objects in the order in which they own pixels that several claim; as they are given if there is none."""
    above: dict[int, set[int]] = {each: set() for each in group}
    for one, other in permutations(group, 2):
        both = claims[one] & claims[other]
        if np.count_nonzero(both & owned[one]) > np.count_nonzero(both & owned[other]):
            above[other].add(one)
    try:
        return list(TopologicalSorter(above).static_order())
    except CycleError:
        return list(group)


def _moved(logits: Array, size: tuple[int, ...]) -> list[Array]:
    """The mask bool [h, w] of logits that are moved up, left as they are, and moved down."""
    near = leeway(logits)
    shifted = np.stack([logits + near, logits, logits - near]).astype(np.float32)
    return list(resize(without_holes_and_sprinkles(shifted), *size) > 0)
