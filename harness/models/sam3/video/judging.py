"""Judges videos and sessions: the same objects on every frame, their masks, and each step of the tracker by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from harness.core.expectations import Expectation
from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Array, Arrays
from harness.models.sam3.scripted import judge_numbers
from harness.models.sam3.video import SESSION_FRAMES, STEP
from harness.models.sam3.video.drift import judge_drift
from harness.models.sam3.video.visible_objects import (
    FramePixels,
    answers_in,
    judge_by_frame,
    judge_visible,
    visible_ids,
)
from harness.parity.references import Reference, add_prefix
from harness.parity.verdict import unmeasured_verdict
from harness.runtime.sam3.video.tracker import to_bfloat16

_GATE = 1e-5
"""The strict gate."""


def judge_video(name: str, actual: Arrays, reference: Reference, followed: Arrays | None = None) -> tuple[Verdict, ...]:
    """Judges a whole video or session.

    Args:
        name: Prefix of the names of the verdicts.
        actual: The compiled model's frames, from `answer_question` or `answer_session` of `video.compiled`.
        reference: Upstream's frames, from `answer` of `video.upstream` or `video.upstream_session`.
        followed: Upstream's frames from the compiled model's logits, to which all but the drift is held, if there are
            any.
    """
    verdicts = judge_frames(name, actual, followed or reference.first)
    drifts = judge_drift(name, actual, reference.first, reference.exact) if reference.exact else ()
    return (*(_with_note(verdicts) if followed else verdicts), *drifts)


def judge_frames(name: str, actual: Arrays, reference: Arrays) -> tuple[Verdict, ...]:
    """Judges the objects of a video, or of the frames that a session returned, and what is visible of them."""
    decide = _judge_session if "0/request" in reference else _judge_decisions
    decisions = decide(name, actual, reference)
    if not is_strict(decisions):
        return decisions
    return (*decisions, *judge_visible(name, actual, reference, _pixels(reference)))


def is_strict(verdicts: Iterable[Verdict]) -> bool:
    """Returns whether all verdicts are strict."""
    return all(verdict.kind is VerdictKind.STRICT for verdict in verdicts)


def _with_note(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """Yields verdicts on a comparison with upstream's answer from the compiled model's logits, whose ids say so."""
    for verdict in verdicts:
        if verdict.name.endswith("/ids") and verdict.kind is VerdictKind.STRICT:
            reason = "upstream goes on from the compiled model's logits, where rounding decides"
            verdict = replace(verdict, reason=reason)
        yield verdict


def _judge_session(name: str, actual: Arrays, reference: Arrays) -> tuple[Verdict, ...]:
    """Judges that a session returned the same frames after each request, with the same visible ids."""
    return (
        judge_by_frame(f"{name}/{SESSION_FRAMES}", _frames(actual), _frames(reference)),
        judge_by_frame(f"{name}/ids", *visible_ids(actual, reference)),
    )


def _frames(arrays: Arrays) -> Array:
    """Returns the request and the frame of every answer, int64 [answers, 2]."""
    return np.array([[arrays[f"{n}/{key}"][0] for key in ("request", "index")] for n in answers_in(arrays)])


def _pixels(reference: Arrays) -> dict[int, FramePixels]:
    """Returns upstream's decisions about pixels by frame; logits of a session's objects may differ in size."""
    pixels = {}
    for number in answers_in(reference):
        ids = reference[f"{number}/candidates"].tolist()
        unfilled = reference.get(f"{number}/unfilled")
        logits = [reference[f"{number}/logits/{i}"] for i in ids] if unfilled is None else list(unfilled)
        size = reference[f"{number}/masks"].shape[1:]
        pixels[number] = FramePixels.from_logits(ids, logits, reference[f"{number}/tracker_scores"], size)
    return pixels


def judge_step(
    name: str, actual: Arrays, reference: Reference, expectation: Expectation | None = None
) -> tuple[Verdict, ...]:
    """Judges a step of the compiled model from PyTorch's own state.

    Args:
        name: Prefix of the names of the verdicts.
        actual: The result of `harness.models.sam3.video.compiled.compute_step`.
        reference: Upstream's step, with the names in `harness.models.sam3.video.STEP`.
        expectation: If it allows the oracle verdict, outputs that are not rounded may pass on it.
    """

    def outputs(arrays: Arrays) -> Arrays:
        return add_prefix(name, {part: arrays[part] for part in STEP})

    verdicts = judge_numbers(outputs(actual), reference.map(outputs), expectation)
    return (*verdicts, judge_rounded(f"{name}/rounded", actual["rounded"], reference.first["memory"]))


def _judge_decisions(name: str, actual: Arrays, reference: Arrays) -> tuple[Verdict, ...]:
    """Judges that the same ids are visible on every frame, and that as many objects come and go."""
    frames = answers_in(reference)[1:]
    births = _births([reference[f"{number}/objects"] for number in (0, *frames)])
    tracked = [len(reference[f"{number}/remembered"]) for number in frames]
    final_count = len(reference[f"{frames[-1]}/objects"])
    compiled_births = [int(actual[f"{number}/births"][0]) for number in frames]
    compiled_tracked = [len(actual[f"{number}/memories"]) for number in frames]
    pairs = {
        "ids": visible_ids(actual, reference),
        "births": (np.array(compiled_births), np.array(births)),
        "removals": (
            _removals(compiled_tracked, compiled_births, int(actual["left"][0])),
            _removals(tracked, births, final_count),
        ),
        "remembered": _remembered(actual, reference),
    }
    return tuple(judge_by_frame(f"{name}/{part}", *pair) for part, pair in pairs.items())


def _births(objects: Iterable[Array]) -> list[int]:
    """Returns the number of new ids in each array of ids but the first."""
    known_ids, *later = (set(ids.tolist()) for ids in objects)
    births = []
    for ids in later:
        births.append(len(ids - known_ids))
        known_ids |= ids
    return births


def _remembered(actual: Arrays, reference: Arrays) -> tuple[Array, Array]:
    """Returns the objects in each frame's memory, int64 [frames, objects], of the compiled model and of upstream."""
    names = [f"{number}/remembered" for number in answers_in(reference)[1:]]
    max_objects = max((len(arrays[name]) for arrays in (actual, reference) for name in names), default=0)
    tables = [np.full((len(names), max_objects), -1) for _ in range(2)]
    for rows, arrays in zip(tables, (actual, reference), strict=True):
        for row, name in zip(rows, names, strict=True):
            row[: len(arrays[name])] = arrays[name]
    return tables[0], tables[1]


def _removals(tracked: list[int], births: list[int], final_count: int) -> Array:
    """Returns the number of objects removed on each frame, among the objects tracked into it and born on it."""
    removed: Array = np.array(tracked) + np.array(births) - np.array([*tracked[1:], final_count])
    return removed


def judge_rounded(name: str, bits: Array, exact: Array) -> Verdict:
    """Judges that rounded memories are rounded from values within the strict gate of PyTorch's values.

    An element is thus equal to PyTorch's, or one step of bfloat16 away where PyTorch's value lies at a boundary. Near
    zero, where a step is smaller than the gate, it may be several steps away.
    """
    values = exact.astype(np.float64)
    gate = _GATE + _GATE * np.abs(values)
    lower, upper = (_ordered(to_bfloat16((values + sign * gate).astype(np.float32))) for sign in (-1, 1))
    compiled, reference = _ordered(bits), _ordered(to_bfloat16(exact))
    wrong = int(np.count_nonzero((compiled < lower) | (compiled > upper)))
    verdict = replace(unmeasured_verdict(name, bits, ""), outside=wrong)
    if wrong:
        return replace(verdict, reason=f"{wrong} of {bits.size} elements are not rounded from a value in the gate")
    steps = np.abs(compiled - reference)
    one_step, more_steps = int(np.count_nonzero(steps == 1)), int(np.count_nonzero(steps > 1))
    farther = f", {more_steps} farther where a step is smaller than the gate" if more_steps else ""
    reason = f"{bits.size - one_step - more_steps} elements are equal, {one_step} one step of bfloat16 apart{farther}"
    return replace(verdict, kind=VerdictKind.STRICT, reason=reason if one_step or more_steps else "")


def _ordered(bits: Array) -> Array:
    """Returns integers in the order of the values of bfloat16 bits; adjacent values have adjacent integers."""
    magnitude = (bits & 0x7FFF).astype(np.int32)
    ordered: Array = np.where(bits & 0x8000, -magnitude, magnitude)
    return ordered
