"""Judges scores, boxes and masks of visible objects, whose masks may differ only where rounding can decide a pixel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import permutations

import numpy as np

from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Array, Arrays
from harness.models.sam3.video.following import leeway
from harness.parity.references import Reference
from harness.parity.verdict import judge, judge_by_gate, unmeasured_verdict
from harness.runtime.sam3.resizing import resize
from harness.runtime.sam3.video.masks import PRESENT_LOGIT, without_holes_and_sprinkles

MOST_UNDECIDED = 0.05
"""Share of the pixels of a video that may be undecided."""
TIED = 1e-5
"""Difference of two tracker scores whose order rounding can reverse."""
PROMPT_SCORE = float(1 / (1 + np.exp(-PRESENT_LOGIT)))
"""Tracker score, fp32, of an object on the frame of its prompt."""


def answers_in(reference: Arrays) -> list[int]:
    """Returns the sorted numbers of the answered frames, with which the names of arrays begin."""
    return sorted(int(name.partition("/")[0]) for name in reference if name.endswith("/ids"))


def visible_ids(actual: Arrays, reference: Arrays) -> tuple[Array, Array]:
    """Returns the visible objects of each frame, bool [frames, ids], of the compiled model and of upstream."""
    answers = answers_in(reference)
    arrays = (actual, reference)
    last = max((int(answer[f"{n}/ids"].max(initial=0)) for answer in arrays for n in answers_in(answer)), default=0)
    compiled, upstream = (
        np.array([np.isin(np.arange(last + 1), answer.get(f"{number}/ids", ())) for number in answers])
        for answer in arrays
    )
    return compiled, upstream


def judge_by_frame(name: str, actual: Array, reference: Array) -> Verdict:
    """Judges arrays that must be equal on every frame, and names the first frame that differs."""
    (verdict,) = judge({name: actual}, Reference.from_run({name: reference}, {name: reference}))
    if verdict.kind is VerdictKind.STRICT or actual.shape != reference.shape:
        return verdict
    different = (actual != reference).reshape(len(reference), -1).any(axis=1)
    return replace(verdict, reason=f"differs first on frame {int(different.argmax())} of the answer: {verdict.reason}")


def judge_visible(
    name: str, actual: Arrays, reference: Arrays, pixels: Mapping[int, FramePixels]
) -> tuple[Verdict, ...]:
    """Judges scores, boxes and masks, where both sides have the same visible objects on every frame.

    Args:
        name: Prefix of the names of the verdicts.
        actual: `0/scores`, `0/boxes` (x0, y0, x1, y1) in pixels and `0/masks` of the first frame, and so on.
        reference: `ids`, `scores` and `masks`, named in the same way.
        pixels: Upstream's decisions about pixels, by frame.
    """
    masks = _judge_masks(f"{name}/masks", actual, reference, pixels)
    return (*_judge_scores_and_boxes(name, actual, reference, pixels), masks)


@dataclass(frozen=True, eq=False)
class FramePixels:
    """Upstream's pixels of an answer, in the size of the video [h, w], before objects share out overlapping pixels.

    Attributes:
        inside: By id, the mask of each candidate object.
        undecided: By id, the pixels that change when all logits are moved slightly up or down.
        scores: By id, the tracker score, which decides the owner of overlapping pixels.
    """

    inside: dict[int, Array]
    undecided: dict[int, Array]
    scores: dict[int, float]

    @classmethod
    def from_logits(
        cls, ids: Sequence[int], logits: Sequence[Array], scores: Array, size: tuple[int, ...]
    ) -> FramePixels:
        """Computes the pixels from upstream's logits.

        Args:
            ids: Ids of the m candidate objects.
            logits: Mask logits of each object before holes are filled, fp32 [288, 288], or [h, w] for the mask of a
                prompt.
            scores: Tracker scores fp32 [m].
            size: Height and width of the video.
        """
        moved = [_moved_masks(object_logits, size) for object_logits in logits]
        return cls(
            {object_id: inside for object_id, (_, inside, _) in zip(ids, moved, strict=True)},
            {object_id: above != below for object_id, (above, _, below) in zip(ids, moved, strict=True)},
            dict(zip(ids, scores.tolist(), strict=True)),
        )

    def tied_groups(self) -> list[list[int]]:
        """Returns groups of ids of objects whose scores rounding can reverse.

        Scores equal to the constant of a prompt are equal on both sides; their order is that of upstream's list.
        """
        groups: list[list[int]] = []
        previous = None
        for object_id in sorted(self.scores, key=lambda object_id: -self.scores[object_id]):
            score = self.scores[object_id]
            if previous is not None and previous - score <= TIED and not previous == score == PROMPT_SCORE:
                groups[-1].append(object_id)
            else:
                groups.append([object_id])
            previous = score
        return [group for group in groups if len(group) > 1]

    def reorder_ties(self, other_masks: Array, ids: Sequence[int], masks: Array) -> Array:
        """Returns masks whose tied objects share out pixels in the order of other masks.

        Args:
            other_masks: The other masks, bool [n, h, w].
            ids: Ids of the n objects of both.
            masks: Upstream's masks.
        """
        masks = masks.copy()
        for group in self.tied_groups():
            highest = max(self.scores[object_id] for object_id in group)
            above = [self.inside[object_id] for object_id, score in self.scores.items() if score > highest]
            free = ~np.logical_or.reduce(above, initial=False)
            claims = {object_id: self.inside[object_id] & free for object_id in group}
            owned = {
                object_id: claim & other_masks[ids.index(object_id)]
                for object_id, claim in claims.items()
                if object_id in ids
            }
            # Pixels that no visible object owns belong to an invisible object.
            unowned = ~np.logical_or.reduce(list(owned.values()), initial=False)
            owned |= {object_id: claims[object_id] & unowned for object_id in group if object_id not in ids}
            unclaimed = np.ones(masks.shape[1:], bool)
            for object_id in _order(group, claims, owned):
                if object_id in ids:
                    position = ids.index(object_id)
                    masks[position] = np.where(claims[object_id], unclaimed, masks[position])
                unclaimed &= ~claims[object_id]
        return masks

    def box_limits(self, ids: Sequence[int]) -> tuple[Array, Array]:
        """Returns lower and upper limits of the boxes [n, 4] of objects, over all masks that undecided pixels allow."""
        smallest = np.array([_box(self.inside[number] & ~self.undecided[number]) for number in ids]).reshape(-1, 4)
        largest = np.array([_box(self.inside[number] | self.undecided[number]) for number in ids]).reshape(-1, 4)
        return np.minimum(smallest, largest), np.maximum(smallest, largest)


def _judge_scores_and_boxes(
    name: str, actual: Arrays, reference: Arrays, expected: Mapping[int, FramePixels]
) -> tuple[Verdict, ...]:
    """Judges scores and boxes of the visible objects."""
    compiled, upstream = (
        np.concatenate([arrays[f"{number}/scores"] for number in answers_in(reference)])
        for arrays in (actual, reference)
    )
    verdicts = judge_by_gate({f"{name}/scores": compiled}, Reference.from_run({f"{name}/scores": upstream}))
    outside, count = 0, 0
    for number in answers_in(reference):
        lower, upper = expected[number].box_limits(reference[f"{number}/ids"].tolist())
        boxes = actual[f"{number}/boxes"]
        outside += int(np.count_nonzero((boxes < lower - 1e-2) | (boxes > upper + 1e-2)))
        count += boxes.size
    verdict = unmeasured_verdict(f"{name}/boxes", np.zeros((count // 4, 4), np.float32), "")
    if outside:
        return (*verdicts, replace(verdict, outside=outside, reason=f"{outside} of {count} coordinates are elsewhere"))
    return (*verdicts, replace(verdict, outside=0, kind=VerdictKind.STRICT))


def _box(mask: Array) -> Array:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return np.array([mask.shape[1], mask.shape[0], 0, 0])
    return np.array([columns[0], rows[0], columns[-1], rows[-1]])


def _judge_masks(name: str, actual: Arrays, reference: Arrays, expected: Mapping[int, FramePixels]) -> Verdict:
    """Judges that masks are equal except where a rounding error decides in upstream itself."""
    counts: Counter[str] = Counter()
    for number in answers_in(reference):
        compiled, upstream = actual[f"{number}/masks"], reference[f"{number}/masks"]
        if compiled.shape != upstream.shape:
            return unmeasured_verdict(name, compiled, f"shape {list(compiled.shape)} instead of {list(upstream.shape)}")
        counts.update(_compare_masks(compiled, upstream, reference[f"{number}/ids"].tolist(), expected[number]))
    wrong, elements, undecided, pixels = (counts[kind] for kind in ("wrong", "elements", "undecided", "pixels"))
    verdict = unmeasured_verdict(name, np.zeros((0,), bool), "")
    verdict = replace(verdict, shape=(elements,), elements=elements, outside=wrong)
    if wrong:
        return replace(verdict, reason=f"{wrong} of {elements} pixels differ, and are not undecided")
    if undecided > MOST_UNDECIDED * pixels:
        reason = f"{undecided} of {pixels} pixels are undecided"
        return replace(verdict, kind=VerdictKind.NOT_JUDGEABLE, reason=reason)
    notes = []
    if near := counts["near"]:
        share = undecided / max(pixels, 1)
        notes.append(f"{near} pixels differ, all of which are undecided, as {share:.2%} of all are")
    if reordered := counts["reordered"]:
        notes.append(f"on {reordered} frames objects of the same score up to rounding are in another order")
    return replace(verdict, kind=VerdictKind.STRICT, reason="; ".join(notes))


def _compare_masks(compiled: Array, upstream: Array, ids: Sequence[int], frame: FramePixels) -> dict[str, int]:
    """Counts the pixels of a frame in which the masks of objects differ.

    Where rounding decides which of two objects owns overlapping pixels, all pixels of the frame follow one order:
    upstream's, or the compiled model's if that explains more of them.

    Returns:
        Of the masks' `elements` those that are `wrong`, and that differ and are undecided (`near`); of the frame's
        `pixels` those that are `undecided`; and 1 if the frame is `reordered`.
    """
    undecided = np.logical_or.reduce([*frame.undecided.values(), np.zeros(upstream.shape[1:], bool)])
    reordered = frame.reorder_ties(compiled, ids, upstream)
    wrong, wrong_reordered = (
        int(np.count_nonzero((compiled != masks) & ~undecided)) for masks in (upstream, reordered)
    )
    is_reordered = wrong_reordered < wrong
    different = compiled != (reordered if is_reordered else upstream)
    return {
        "wrong": min(wrong, wrong_reordered),
        "near": int(np.count_nonzero(different & undecided)),
        "elements": compiled.size,
        "undecided": int(np.count_nonzero(undecided)),
        "pixels": undecided.size,
        "reordered": int(is_reordered),
    }


def _order(group: Sequence[int], claims: Mapping[int, Array], owned: Mapping[int, Array]) -> list[int]:
    """Returns objects in the order in which they own overlapping pixels, or in the given order if that has a cycle."""
    above: dict[int, set[int]] = {object_id: set() for object_id in group}
    for first, second in permutations(group, 2):
        overlap = claims[first] & claims[second]
        if np.count_nonzero(overlap & owned[first]) > np.count_nonzero(overlap & owned[second]):
            above[second].add(first)
    try:
        return list(TopologicalSorter(above).static_order())
    except CycleError:
        return list(group)


def _moved_masks(logits: Array, size: tuple[int, ...]) -> list[Array]:
    """Returns the masks bool [h, w] of logits moved up, unchanged, and moved down."""
    near = leeway(logits)
    shifted = np.stack([logits + near, logits, logits - near]).astype(np.float32)
    return list(resize(without_holes_and_sprinkles(shifted), *size) > 0)
