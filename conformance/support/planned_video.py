"""Runs a session of one scripted video with this project's planner: the user's requests, and the visible results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from conformance.support.scripted_video import SIZE, Script
from harness.runtime.sam3.video.detector import Detections, select_detections
from harness.runtime.sam3.video.masks import SUPPRESSED_LOGIT, object_logits, suppress_shrunken
from harness.runtime.sam3.video.outputs import (
    FrameOutput,
    VisibleObject,
    frame_output,
    visible_objects,
)
from harness.runtime.sam3.video.planner import FramePlan, plan_frame
from harness.runtime.sam3.video.processor import Action, next_propagation, processing_order
from harness.runtime.sam3.video.rules import (
    Rules,
    VideoState,
    cleared_by_click,
    drop_objects,
    release_outputs,
    state_after_click,
)

_MANY = 1_000_000
"""How many objects may be in a single image: upstream does not limit them there (VB:561)."""
_REMOVED_SCORE = -1e4
"""Upstream's score of an object that hotstart removed (VB:800); it is seen where a removal follows an output."""


class PlannedVideo:
    """A video with the interface of `UpstreamVideo`; this project's repairs of upstream are switched off."""

    def __init__(self, script: Script, rules: Rules) -> None:
        self.script, self.rules = script, rules
        self.recorded: list[dict[str, Any]] = []
        self._reset()

    def _reset(self) -> None:
        self.state = VideoState()
        self.history: list[Action] = []
        self.kept: dict[int, dict[int, VisibleObject]] = {}
        self.processed: set[int] = set()
        self.masked: dict[int, dict[int, None]] = {}
        self.clicked: dict[int, set[int]] = {}

    def prompt(self, frame: int, text: bool) -> list[Any]:
        self._reset()
        self.asked = range(self.script.frames) if text else (frame,)
        objects = self._process(frame, reverse=False)
        return [self._shown(frame, objects, self._scores())]

    def propagate(self, start: int | None, limit: int | None, reverse: bool) -> list[Any]:
        what = next_propagation(self.history, self.script.frames)
        self.history.append(Action(what.kind, what.objects, start))
        first = min(self.processed) if start is None else start
        order = processing_order(first, limit, self.script.frames, reverse)
        if what.kind == "full":
            return self._propagate_everything(order, reverse)
        if what.kind == "fetch":
            return [self._shown(frame, self.kept.get(frame, {}), self._scores()) for frame in order]
        outputs = []
        for frame in order:
            refined = {}
            for each in what.objects & set(self.state.ids):
                mask, logit = self.script.tracked(frame, each)
                refined[each] = VisibleObject(mask > 0, float(logit))
            self.kept[frame] = {**self.kept.get(frame, {}), **refined}
            outputs.append(self._shown(frame, self.kept[frame], self._scores()))
        return outputs

    def _propagate_everything(self, order: range, reverse: bool) -> list[Any]:
        held: tuple[Any, ...] = ()
        outputs = []
        for frame in order:
            objects = self._process(frame, reverse)
            held, out = release_outputs(held, (frame, objects, self._scores()), frame == order[-1], self.rules)
            for held_frame, held_objects, scores in out:
                removed = self.state.removed if self.rules.hotstart_frames else frozenset()  # VI:294
                self.kept[held_frame] = {i: each for i, each in held_objects.items() if i not in removed}
                shown_scores = {i: score for i, score in scores.items() if i not in removed}
                outputs.append(self._shown(held_frame, held_objects, shown_scores))
        return outputs

    def click(self, object_id: int, frame: int) -> list[Any]:
        self.history.append(Action("refine" if object_id in self.state.ids else "add", frozenset({object_id})))
        if object_id not in self.state.ids:
            self.masked[object_id], self.clicked[object_id] = {}, set()
        self.state = state_after_click(self.state, object_id, frame)
        self.masked[object_id].pop(frame, None)
        self.clicked[object_id].add(frame)
        (bucket,) = (ids for ids in members_by_bucket(self.state).values() if object_id in ids)
        cleared = cleared_by_click(list(self.masked[object_id]), self.clicked[object_id], frame)
        for each in bucket:
            for conditioning in cleared:
                self.masked[each].pop(conditioning, None)
                self.clicked[each].discard(conditioning)
        mask, _ = self.script.tracked(frame, object_id)
        self.kept[frame] = {**self.kept.get(frame, {}), object_id: VisibleObject(mask > 0, 1.0)}
        output = self._shown(frame, self.kept[frame], self._scores())
        return [output, sorted((each, conditioning) for each in bucket for conditioning in cleared)]

    def remove(self, object_id: int) -> list[Any]:
        self.state = drop_objects(self.state, frozenset({object_id}))
        self.history.append(Action("remove", frozenset({object_id})))
        for objects in self.kept.values():
            objects.pop(object_id, None)
        return []

    def _process(self, frame: int, reverse: bool) -> dict[int, VisibleObject]:
        before = self.state
        logits, masks = self.script.detections(frame)
        scores = torch.from_numpy(logits)[None, :, None].sigmoid().numpy()[0, :, 0]
        detections = select_detections(scores if frame in self.asked else np.zeros_like(scores), masks, self.rules)
        said = [self.script.tracked(frame, each) for each in before.ids]
        tracked = np.array([mask for mask, _ in said], np.float32).reshape(-1, SIZE, SIZE)
        present = np.array([logit for _, logit in said], np.float32)
        rules = replace(self.rules, max_objects=_MANY) if self.script.frames == 1 else self.rules
        self.state, plan = plan_frame(before, frame, tracked > 0, present, detections, rules=rules, reverse=reverse)

        for each in plan.reconditionings:
            self.masked[each][frame] = None
            self.clicked[each].discard(frame)
        for each in plan.births:
            self.masked[each], self.clicked[each] = {frame: None}, set()
        tracked[plan.suppressed] = SUPPRESSED_LOGIT
        self.recorded.append(facts(frame, plan, before, self.state, detections, tracked))
        found = detections.masks[list(plan.births.values())]
        probabilities = torch.from_numpy(present).sigmoid().numpy()  # two of them may differ by one rounding of PyTorch
        born_scores = [self.state.scores[each] for each in plan.births]
        self.kept[frame] = visible_objects(
            (*before.ids, *plan.births), (*(tracked > 0), *found), (*probabilities, *born_scores)
        )
        self.processed.add(frame)
        return self.kept[frame]

    def _scores(self) -> dict[int, float]:
        return dict.fromkeys(self.state.removed, _REMOVED_SCORE) | self.state.scores

    def _shown(
        self,
        frame: int,
        objects: Mapping[int, VisibleObject],
        scores: Mapping[int, float],
    ) -> tuple[Any, ...]:
        return shown(frame, frame_output(objects, scores, self.script.size))


def members_by_bucket(state: VideoState) -> dict[int, list[int]]:
    """The ids of the objects of each bucket."""
    members: dict[int, list[int]] = {}
    for each in state.objects:
        members.setdefault(each.bucket, []).append(each.id)
    return members


def facts(
    frame: int, plan: FramePlan, before: VideoState, after: VideoState, detections: Detections, tracked: np.ndarray
) -> dict[str, Any]:
    """As upstream's: what was decided on a frame and is remembered after it."""
    masks = suppress_shrunken(tracked)
    logits = object_logits(masks)
    order = {each: index for index, each in enumerate(before.ids)}
    members = [[order[each] for each in bucket] for bucket in members_by_bucket(before).values()]
    return {
        "frame": frame,
        "births": list(plan.births.items()),
        "unmatched": list(plan.association.unmatched),
        "matches": {d: list(ids) for d, ids in enumerate(plan.association.matches) if ids},
        "confident": list(plan.association.confident.items()),
        "removed": sorted(plan.removed),
        "dropped": plan.dropped,
        "reconditioned": [
            (each, detections.masks[detection].flatten().tolist()) for each, detection in plan.reconditionings.items()
        ],
        "encoded": [(masks[rows].flatten().tolist(), logits[rows].tolist()) for rows in members],
        "ids": list(after.ids),
        "buckets": list(members_by_bucket(after).values()),
        "next_id": after.next_id,
        "all_removed": sorted(after.removed),
        "first_frames": {each.id: each.first_frame for each in after.objects},
        "times_unmatched": {each.id: each.unmatched for each in after.objects},
        "duplicates": dict(after.duplicates),
        "last_occluded": {each.id: each.last_occluded for each in after.objects if each.last_occluded is not None},
        "scores": after.scores,
    }


def shown(frame: int, output: FrameOutput) -> tuple[Any, ...]:
    """An output as plain data."""
    arrays = (output.ids, output.scores, output.boxes, output.masks)
    assert [array.dtype.name for array in arrays] == ["int64", "float32", "float32", "bool"]
    return (frame, *(array.tolist() for array in arrays))
