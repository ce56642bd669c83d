"""Upstream's side of a session: its own video model, asked as a user asks it, and where it decides about a pixel.

VB is upstream's model/sam3_video_base.py and VI its model/sam3_video_inference.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from harness.core.program import Arrays
from harness.models.sam3.images import preprocess
from harness.models.sam3.patches.patch import replaced
from harness.models.sam3.video.sessions.answers import numbered
from harness.models.sam3.video.sessions.scripts import Request, Script, mask_of, pixels_of
from harness.models.sam3.video.upstream import quick_masks

Pixels = npt.NDArray[np.uint8]
Points = Sequence[Sequence[float]] | npt.NDArray[np.float64]
_A_POINT = ((0.0, 0.0),)
"""Upstream's session takes points alone; its tracker gets a box or a mask in their place."""


@dataclass(frozen=True, eq=False)
class Answered:
    """What upstream gives out of a frame; the first five as in `harness.runtime.sam3.video.session.TrackedFrame`.

    Attributes:
        index: The frame.
        ids: int64 [n], the objects that are shown.
        scores: fp32 [n].
        boxes: fp32 [n, 4], left, top, width and height, as shares of the video's.
        masks: bool [n, h, w].
        candidates: The ids of the m objects that may be shown.
        tracker_scores: Of these, fp32 [m], which decide about pixels that several claim.
        logits: Of these, the fp32 mask logits before holes are filled: [288, 288] of an object that was found or
            tracked, [h, w] of one that was prompted.
    """

    index: int
    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    boxes: npt.NDArray[np.float32]
    masks: npt.NDArray[np.bool_]
    candidates: tuple[int, ...]
    tracker_scores: npt.NDArray[np.float32]
    logits: tuple[npt.NDArray[np.float32], ...]


class UpstreamSession:
    """A session of upstream's video model; to be used inside `harness.models.sam3.upstream.upstream()`.

    Frames are prepared as photographs are, since upstream's six ways to read a video differ from each other. Places
    are in pixels.
    """

    def __init__(self, model: Any, frames: Sequence[Pixels]) -> None:
        """Takes upstream's video model, which one session uses at a time, and frames uint8 [h, w, 3]."""
        self._model = model
        self._size = frames[0].shape[:2]
        self._computed: dict[int, Tensor] = {}
        """By object: the logits that were computed last."""
        self._logits: dict[int, dict[int, Tensor]] = {}
        """By frame and object: those that its mask there was decided by."""
        self._candidates: tuple[tuple[int, ...], npt.NDArray[np.float32]] = ((), np.zeros(0, np.float32))
        with self._running():
            pictures = [Image.fromarray(frame) for frame in frames]
            self.state = model.init_state(pictures, offload_video_to_cpu=True)
            self.state["input_batch"].img_batch = torch.cat([preprocess(picture) for picture in pictures])

    def begin_with_nothing(self) -> None:
        """Keeps empty outputs, without which upstream fails when an object is prompted first (VI:553)."""
        self.state["cached_frame_outputs"] = {frame: {} for frame in range(self.state["num_frames"])}
        self.state["tracker_inference_states"].clear()
        self.state["tracker_metadata"].clear()
        self.state["action_history"].clear()

    def text(self, frame: int, text: str) -> Answered:
        """Finds the objects that a text means."""
        with self._running():
            return self._answered(*self._model.add_prompt(self.state, frame, text_str=text))

    def points(self, frame: int, object_id: int, points: Points, labels: Sequence[int]) -> Answered:
        """Clicks on an object: 1 on it, 0 beside it."""
        return self._prompted(frame, object_id, points, labels, self._model.tracker.add_new_points)

    def box(self, frame: int, object_id: int, box: Sequence[float]) -> Answered:
        """Gives the box (x0, y0, x1, y1) of an object; upstream's session has no way to its tracker's boxes."""
        height, width = self._size
        given = torch.tensor(box) / torch.tensor([width, height, width, height])
        add = self._model.tracker.add_new_points

        def boxed(**arguments: Any) -> Any:
            return add(**{**arguments, "points": None, "labels": None, "box": given})

        return self._prompted(frame, object_id, _A_POINT, [1], boxed)

    def mask(self, frame: int, object_id: int, mask: npt.NDArray[np.bool_]) -> Answered:
        """Gives the mask of an object; upstream's session has no way to its tracker's masks, and would clear it."""
        tracker = self._model.tracker

        def masked(inference_state: Any, frame_idx: int, obj_id: int, **_: Any) -> Any:
            return tracker.add_new_mask(inference_state, frame_idx, obj_id, torch.from_numpy(mask))

        with replaced(self._model, "clear_detector_added_cond_frame_in_tracker", lambda *_: None):
            return self._prompted(frame, object_id, _A_POINT, [1], masked)

    def propagate(self, start: int | None = None, reverse: bool = False) -> list[Answered]:
        """Goes through the video."""
        with self._running():
            answers = self._model.propagate_in_video(self.state, start, None, reverse)
            return [self._answered(*each) for each in answers]

    def remove(self, object_id: int) -> None:
        """Removes an object."""
        self._model.remove_object(self.state, object_id, is_user_action=True)

    def _prompted(
        self, frame: int, object_id: int, points: Points, labels: Sequence[int], add: Callable[..., Any]
    ) -> Answered:
        def added(**arguments: Any) -> Any:
            found = add(**arguments)
            _, ids, _, masks = found
            self._computed[object_id] = masks[ids.index(object_id), 0].clone()
            return found

        height, width = self._size
        prompt = {
            "obj_id": object_id,
            "points": torch.tensor(np.array(points), dtype=torch.float32) / torch.tensor([width, height]),
            "point_labels": torch.tensor(labels),
        }
        with self._running(), replaced(self._model.tracker, "add_new_points", added):
            return self._answered(*self._model.add_prompt(self.state, frame, **prompt))

    @contextmanager
    def _running(self) -> Iterator[None]:
        """What upstream runs in on the CPU, while it is seen what masks are decided by."""
        model = self._model
        with ExitStack() as stack:
            for context in (
                quick_masks(),
                torch.inference_mode(),
                torch.autocast("cpu", enabled=False),
                replaced(model.tracker, "propagate_in_video", self._tracking(model.tracker.propagate_in_video)),
                replaced(model, "build_outputs", self._found(model.build_outputs)),
                replaced(model, "_build_tracker_output", self._refined(model._build_tracker_output)),
                replaced(model, "_postprocess_output", self._shown(model._postprocess_output)),
            ):
                stack.enter_context(context)
            yield

    def _tracking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A bucket of objects on a frame."""

        def run(*arguments: Any, **named: Any) -> Iterator[Any]:
            for found in original(*arguments, **named):
                _, ids, logits, *_ = found
                self._computed |= dict(zip(ids, logits[:, 0].clone(), strict=True))
                yield found

        return run

    def _found(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A frame on which everything is tracked (VB:935): objects of before, and new ones with detections' masks."""

        def run(**arguments: Any) -> Any:
            logits = self._logits.setdefault(arguments["frame_idx"], {})
            for each in arguments["tracker_metadata_prev"]["obj_ids_all_gpu"]:
                logits[int(each)] = self._computed[int(each)]
            plan, detected = arguments["tracker_update_plan"], arguments["det_out"]["mask"]
            for each, row in zip(plan["new_det_obj_ids"], plan["new_det_fa_inds"], strict=True):
                logits[int(each)] = detected[int(row)].clone()
            return original(**arguments)

        return run

    def _refined(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A frame on which some objects were prompted or tracked again (VI:550); the others are as they were."""

        def run(state: Any, frame_idx: int, refined_obj_id_to_mask: Any = None) -> Any:
            logits = self._logits.setdefault(frame_idx, {})
            logits |= {each: self._computed[each] for each in refined_obj_id_to_mask or ()}
            return original(state, frame_idx, refined_obj_id_to_mask)

        return run

    def _shown(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A frame that is given out next."""

        def run(state: Any, out: Any, *arguments: Any, **named: Any) -> Any:
            ids = tuple(int(each) for each in out["obj_id_to_mask"])
            scores = [float(out["obj_id_to_tracker_score"].get(each, 0)) for each in ids]
            self._candidates = ids, np.array(scores, np.float32)
            return original(state, out, *arguments, **named)

        return run

    def _answered(self, index: int, out: dict[str, Any]) -> Answered:
        candidates, tracker_scores = self._candidates
        return Answered(
            index=index,
            ids=out["out_obj_ids"],
            scores=out["out_probs"],
            boxes=out["out_boxes_xywh"],
            masks=out["out_binary_masks"],
            candidates=candidates,
            tracker_scores=tracker_scores,
            logits=tuple(self._logits[index][each].float().numpy() for each in candidates),
        )


def answers(model: Any, script: Script, frames: Sequence[Pixels]) -> Arrays:
    """What upstream answers to the requests of a script.

    Args:
        model: Upstream's video model.
        script: The requests.
        frames: uint8 [h, w, 3] each.

    Returns:
        What `arrays_of` returns of each frame that is given out, numbered.
    """
    session = UpstreamSession(model, frames)
    if script.requests[0].object is not None:
        session.begin_with_nothing()
    size = frames[0].shape[:2]
    return numbered(
        (position, arrays_of(answered))
        for position, request in enumerate(script.requests)
        for answered in _asked(session, request, size)
    )


def _asked(session: UpstreamSession, request: Request, size: tuple[int, int]) -> list[Answered]:
    if request.type == "propagate_in_video":
        return session.propagate(request.frame, reverse=request.reverse)
    if request.text is not None:
        return [session.text(request.frame, request.text)]
    assert request.object is not None
    if request.type == "remove_object":
        session.remove(request.object)
        return []
    if request.mask is not None:
        return [session.mask(request.frame, request.object, mask_of(request.mask, size))]
    if request.box is not None:
        return [session.box(request.frame, request.object, pixels_of(request.box, size).ravel().tolist())]
    labels = request.labels or (1,) * len(request.points)
    return [session.points(request.frame, request.object, pixels_of(request.points, size), labels)]


def arrays_of(answered: Answered) -> Arrays:
    """An answer as arrays by name, `logits/3` for those of object 3."""
    names = ("ids", "scores", "boxes", "masks", "tracker_scores")
    return {
        "index": np.array([answered.index]),
        "candidates": np.array(answered.candidates, np.int64),
        **{name: getattr(answered, name) for name in names},
        **{f"logits/{each}": array for each, array in zip(answered.candidates, answered.logits, strict=True)},
    }
