"""The judge of videos: the same objects on every frame, their masks, and each step of the tracker by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.expectations import Expectation
from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Arrays
from harness.models.sam3.video import STEP
from harness.models.sam3.video.drift import judge_drift
from harness.models.sam3.video.shown import FramePixels, answers_in, judge_by_frame, judge_shown, shown_ids
from harness.models.sam3.video.source import Answer, AskedStep
from harness.parity.verdict import judge, unmeasured_verdict
from harness.runtime.sam3.video.bfloat16 import to_bfloat16

Array = npt.NDArray[Any]

_GATE = 1e-5
"""The strict gate."""


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
        verdicts += judge_shown(name, actual, reference, _pixels(reference))
    if answer.exact is not None:
        verdicts += judge_drift(name, actual, reference, answer.exact)
    return tuple(verdicts)


def _pixels(reference: Arrays) -> dict[int, FramePixels]:
    return {
        number: FramePixels.of(
            reference[f"{number}/candidates"].tolist(),
            list(reference[f"{number}/unfilled"]),
            reference[f"{number}/tracker_scores"],
            reference[f"{number}/masks"].shape[1:],
        )
        for number in answers_in(reference)
    }


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
    answers = answers_in(reference)
    counts = {"ids": shown_ids(actual, reference)}
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
    counts["remembered"] = _remembered(actual, reference)
    verdicts = [judge_by_frame(f"{name}/{part}", *both) for part, both in counts.items()]
    undecided = sum(int(reference[f"{number}/undecided"].sum()) for number in frames)
    if undecided and verdicts[-1].kind is VerdictKind.STRICT:
        verdicts[-1] = replace(verdicts[-1], reason=f"rounding decides {undecided} of these, for both sides alike")
    return tuple(verdicts)


def _remembered(actual: Arrays, reference: Arrays) -> tuple[Array, Array]:
    """Which objects the memory of each frame has, int64 [frames, objects], the compiled model's and upstream's."""
    names = [f"{number}/remembered" for number in answers_in(reference)[1:]]
    most = max((len(arrays[name]) for arrays in (actual, reference) for name in names), default=0)
    both = [np.full((len(names), most), -1) for _ in range(2)]
    for rows, arrays in zip(both, (actual, reference), strict=True):
        for row, name in zip(rows, names, strict=True):
            row[: len(arrays[name])] = arrays[name]
    return both[0], both[1]


def _removals(tracked: list[int], births: list[int], left: int) -> Array:
    """How many objects are removed on each frame, of those that are tracked into it and those that are born on it."""
    removed: Array = np.array(tracked) + np.array(births) - np.array([*tracked[1:], left])
    return removed


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
    verdict = replace(unmeasured_verdict(name, bits, ""), outside=wrong)
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
