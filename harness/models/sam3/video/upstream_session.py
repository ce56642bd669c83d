"""Answers the requests of a session with upstream's own video model, and records the logits that decide pixels.

VB is upstream's model/sam3_video_base.py and VI its model/sam3_video_inference.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from harness.core.program import Arrays
from harness.models.sam3.images import preprocess
from harness.models.sam3.patches.patch import replaced, wrapped
from harness.models.sam3.video.questions import SessionQuestion, frames_of, number_frames
from harness.models.sam3.video.upstream import Original, quick_masks
from harness.parity.references import Reference, add_prefix
from harness.runtime.arrays import Floats, Masks, Pixels

if TYPE_CHECKING:
    from harness.models.sam3.source import UpstreamModel

Points = Sequence[Sequence[float]] | npt.NDArray[np.float64]
_PLACEHOLDER_POINT = ((0.0, 0.0),)
"""A placeholder for a box or a mask, which upstream's tracker gets, because upstream's session takes points alone."""


class UpstreamSession:
    """A session of upstream's video model; to be used inside `harness.models.sam3.upstream.upstream()`.

    Frames are preprocessed as photographs, because upstream's six ways to read a video differ from each other.
    Positions are in pixels.

    The answer for a frame has these arrays: `index` int64 [1], the frame; of the n visible objects `ids` int64 [n],
    `scores` fp32 [n], `boxes` fp32 [n, 4] (left, top, width, height, as shares of the video's) and `masks` bool
    [n, h, w]; of the m candidates for visible objects `candidates` int64 [m], their ids, and `tracker_scores` fp32 [m],
    which decide the owner of overlapping pixels; and `logits/3` of candidate 3 before holes are filled, fp32 [288, 288]
    of a detected or tracked object and [h, w] of a prompted one.
    """

    def __init__(self, model: Any, frames: Sequence[Pixels]) -> None:
        """Takes upstream's video model, which one session uses at a time, and frames uint8 [h, w, 3]."""
        self._model = model
        self._size = frames[0].shape[:2]
        self._computed: dict[int, Tensor] = {}
        """By object, the last computed logits."""
        self._logits: dict[int, dict[int, Tensor]] = {}
        """By frame and object, the logits that decided the mask."""
        self._candidates: tuple[tuple[int, ...], Floats] = ((), np.zeros(0, np.float32))
        with self._running():
            pictures = [Image.fromarray(frame) for frame in frames]
            self.state = model.init_state(pictures, offload_video_to_cpu=True)
            self.state["input_batch"].img_batch = torch.cat([preprocess(picture) for picture in pictures])

    def start_empty(self) -> None:
        """Writes empty cached outputs, without which upstream fails when an object is prompted first (VI:553)."""
        self.state["cached_frame_outputs"] = {frame: {} for frame in range(self.state["num_frames"])}
        self.state["tracker_inference_states"].clear()
        self.state["tracker_metadata"].clear()
        self.state["action_history"].clear()

    def add_prompt(
        self,
        frame: int,
        text: str | None = None,
        *,
        object_id: int | None = None,
        points: Points = _PLACEHOLDER_POINT,
        labels: Sequence[int] | None = None,
        box: Sequence[float] | None = None,
        mask: Masks | None = None,
    ) -> Arrays:
        """Finds the objects of a text, or adds points, the box or the mask of an object, as the runtime's `Session`.

        Upstream's session has no access to its tracker's boxes and masks, and would clear a mask.
        """
        if object_id is None:
            with self._running():
                return self._answer(*self._model.add_prompt(self.state, frame, text_str=text))
        model, tracker, size = self._model, self._model.tracker, torch.tensor(self._size[::-1])
        add_points = tracker.add_new_points

        def add(**arguments: Any) -> Any:
            if mask is not None:
                state, index = arguments["inference_state"], arguments["frame_idx"]
                result = tracker.add_new_mask(state, index, object_id, torch.from_numpy(mask))
            elif box is not None:
                shares = torch.tensor(box) / size.repeat(2)
                result = add_points(**{**arguments, "points": None, "labels": None, "box": shares})
            else:
                result = add_points(**arguments)
            _, ids, _, masks = result
            self._computed[object_id] = masks[ids.index(object_id), 0].clone()
            return result

        prompt = {
            "obj_id": object_id,
            "points": torch.tensor(np.array(points), dtype=torch.float32) / size,
            "point_labels": torch.tensor(labels or [1] * len(points)),
        }
        clearing = "clear_detector_added_cond_frame_in_tracker"
        with (
            self._running(),
            replaced(tracker, "add_new_points", add),
            nullcontext() if mask is None else replaced(model, clearing, lambda *_: None),
        ):
            return self._answer(*model.add_prompt(self.state, frame, **prompt))

    def propagate(self, start: int | None = None, reverse: bool = False) -> list[Arrays]:
        """Propagates through the video."""
        with self._running():
            answers = self._model.propagate_in_video(self.state, start, None, reverse)
            return [self._answer(*answer) for answer in answers]

    def remove_object(self, object_id: int) -> None:
        """Removes an object."""
        self._model.remove_object(self.state, object_id, is_user_action=True)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Enters the contexts that upstream needs on the CPU, and records the logits that decide masks."""
        model = self._model
        with (
            quick_masks(),
            torch.inference_mode(),
            torch.autocast("cpu", enabled=False),
            wrapped(model.tracker, "propagate_in_video", self._record_tracking),
            wrapped(model, "build_outputs", self._record_full_frame),
            wrapped(model, "_build_tracker_output", self._record_partial_frame),
            wrapped(model, "_postprocess_output", self._record_candidates),
        ):
            yield

    def _record_tracking(self, original: Original, *arguments: Any, **keywords: Any) -> Iterator[Any]:
        """Records the logits of a bucket of objects on a frame."""
        for result in original(*arguments, **keywords):
            _, ids, logits, *_ = result
            self._computed |= dict(zip(ids, logits[:, 0].clone(), strict=True))
            yield result

    def _record_full_frame(self, original: Original, **arguments: Any) -> Any:
        """Records a frame on which all objects are tracked (VB:935): known ones, and new with detections' masks."""
        logits = self._logits.setdefault(arguments["frame_idx"], {})
        for object_id in arguments["tracker_metadata_prev"]["obj_ids_all_gpu"]:
            logits[int(object_id)] = self._computed[int(object_id)]
        plan, detected = arguments["tracker_update_plan"], arguments["det_out"]["mask"]
        for object_id, row in zip(plan["new_det_obj_ids"], plan["new_det_fa_inds"], strict=True):
            logits[int(object_id)] = detected[int(row)].clone()
        return original(**arguments)

    def _record_partial_frame(
        self, original: Original, state: Any, frame_idx: int, refined_obj_id_to_mask: Any = None
    ) -> Any:
        """Records a frame on which some objects were prompted or tracked again (VI:550); the others are unchanged."""
        logits = self._logits.setdefault(frame_idx, {})
        logits |= {object_id: self._computed[object_id] for object_id in refined_obj_id_to_mask or ()}
        return original(state, frame_idx, refined_obj_id_to_mask)

    def _record_candidates(self, original: Original, state: Any, out: Any, *arguments: Any, **keywords: Any) -> Any:
        """Records the candidates of the frame that is returned next."""
        ids = tuple(int(object_id) for object_id in out["obj_id_to_mask"])
        scores = [float(out["obj_id_to_tracker_score"].get(object_id, 0)) for object_id in ids]
        self._candidates = ids, np.array(scores, np.float32)
        return original(state, out, *arguments, **keywords)

    def _answer(self, index: int, out: dict[str, Any]) -> Arrays:
        ids, tracker_scores = self._candidates
        return {
            "index": np.array([index]),
            "candidates": np.array(ids, np.int64),
            "ids": out["out_obj_ids"],
            "scores": out["out_probs"],
            "boxes": out["out_boxes_xywh"],
            "masks": out["out_binary_masks"],
            "tracker_scores": tracker_scores,
            **{f"logits/{object_id}": self._logits[index][object_id].float().numpy() for object_id in ids},
        }


def answer(upstream: UpstreamModel, question: SessionQuestion) -> Reference:
    """Returns the numbered frames that upstream's session gives out, `frames/0/…` and so on, in its only run."""
    return Reference.from_run(add_prefix("frames", answer_frames(upstream, question)))


def answer_frames(upstream: UpstreamModel, question: SessionQuestion) -> Arrays:
    """Returns the numbered frames that upstream's session gives out, `0/…` and so on."""
    frames = frames_of(question)
    with upstream.shared_trunk(upstream.video):
        session = UpstreamSession(upstream.video, frames)
        if question.requests[0].object is not None:
            session.start_empty()
        return number_frames(question.send(session, frames[0].shape[:2]))
