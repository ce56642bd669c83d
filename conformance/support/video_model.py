"""Upstream's own video model on the CPU, shallow, and what it answers frame by frame."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn import functional as F

from conformance.support.shallow import interactive_model
from harness.models.sam3.build import build_video_model
from harness.models.sam3.images import preprocess
from harness.models.sam3.patches.patch import replaced
from harness.models.sam3.upstream import upstream
from harness.models.sam3.video.upstream import quick_masks

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Answered:
    """What upstream gives out of a frame; names as in `harness.runtime.sam3.video.session.TrackedFrame`.

    Attributes:
        boxes: fp32 [n, 4], left, top, width and height, as shares of the video's.
        logits: Mask logits fp32 [N, h, w] of all objects that were tracked into the frame or prompted in it, after
            holes were filled; the same object several times, if it was tracked again.
        tracker_scores: fp32 [N], which decide about pixels that several claim.
    """

    index: int
    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    boxes: npt.NDArray[np.float32]
    masks: npt.NDArray[np.bool_]
    logits: npt.NDArray[np.float32]
    tracker_scores: npt.NDArray[np.float32]


@contextmanager
def running() -> Iterator[None]:
    """What upstream's video model runs in on the CPU."""
    with upstream(), quick_masks(), torch.inference_mode():
        yield


def video_model() -> Any:
    """Upstream's video model of the shallow scale; a picture is encoded once, whichever session it is in."""
    model = build_video_model(interactive_model(), "shallow")
    _encodes_once(model.detector.backbone)
    return model


def _encodes_once(backbone: Any) -> None:
    """The features of a picture follow from its pixels alone; whoever asks for them gets copies."""
    encode, known = backbone.forward_image, dict[str, Any]()

    def forward_image(samples: torch.Tensor) -> Any:
        digest = hashlib.sha256(samples.contiguous().numpy()).hexdigest()
        if digest not in known:
            known[digest] = encode(samples)
        return deepcopy(known[digest])

    backbone.forward_image = forward_image


class UpstreamSession:
    """A session of upstream's video model.

    The frames are prepared as photographs are, since upstream's six ways to read a video differ from each other.
    """

    def __init__(self, model: Any, frames: Sequence[Pixels]) -> None:
        """Takes upstream's video model, which one session uses at a time, and frames uint8 [h, w, 3]."""
        self._size = frames[0].shape[:2]
        self._seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.model = model
        with running():
            pictures = [Image.fromarray(frame) for frame in frames]
            self.state = self.model.init_state(pictures, offload_video_to_cpu=True)
            self.state["input_batch"].img_batch = torch.cat([preprocess(picture) for picture in pictures])
        self._record()

    def begin_with_nothing(self) -> None:
        """Keeps empty outputs, without which upstream fails when an object is clicked on first (VI:553)."""
        self.state["cached_frame_outputs"] = {frame: {} for frame in range(self.state["num_frames"])}
        self.state["tracker_inference_states"].clear()
        self.state["tracker_metadata"].clear()
        self.state["action_history"].clear()

    def prompt(self, frame: int, **prompt: Any) -> Answered:
        """Gives a prompt, as upstream's `add_prompt` takes it."""
        with running():
            return self._answered(*self.model.add_prompt(self.state, frame, **prompt))

    def click(self, frame: int, object_id: int, points: Sequence[Sequence[float]], labels: Sequence[int]) -> Answered:
        """Clicks on an object; points are in pixels."""
        height, width = self._size
        given = torch.tensor(points) / torch.tensor([width, height])
        return self.prompt(frame, obj_id=object_id, points=given, point_labels=torch.tensor(labels))

    def box(self, frame: int, object_id: int, box: Sequence[float]) -> Answered:
        """Gives the box of an object in pixels; upstream's session has no way to its tracker's boxes."""
        height, width = self._size
        given = torch.tensor(box) / torch.tensor([width, height, width, height])
        add = self.model.tracker.add_new_points_or_box

        def boxed(**kwargs: Any) -> Any:
            return add(**{**kwargs, "points": None, "labels": None, "box": given})

        with replaced(self, "_add", boxed):
            return self.click(frame, object_id, [(0, 0)], [1])

    def mask(self, frame: int, object_id: int, mask: npt.NDArray[np.bool_]) -> Answered:
        """Gives the mask of an object; upstream's session has no way to its tracker's masks, and would clear it."""
        model = self.model

        def masked(inference_state: Any, frame_idx: int, obj_id: int, **_: Any) -> Any:
            return model.tracker.add_new_mask(inference_state, frame_idx, obj_id, torch.from_numpy(mask))

        def nothing(*_: Any) -> None:
            return None

        with (
            replaced(self, "_add", masked),
            replaced(model, "clear_detector_added_cond_frame_in_tracker", nothing),
        ):
            return self.click(frame, object_id, [(0, 0)], [1])

    def propagate(self, start: int | None = None, limit: int | None = None, reverse: bool = False) -> list[Answered]:
        """Goes through the video."""
        with running():
            return [self._answered(*each) for each in self.model.propagate_in_video(self.state, start, limit, reverse)]

    def remove(self, object_id: int) -> None:
        """Removes an object."""
        self.model.remove_object(self.state, object_id, is_user_action=True)

    def _record(self) -> None:
        model = self.model
        vars(model).pop("run_tracker_propagation", None)
        vars(model).pop("_propogate_tracker_one_frame_local_gpu", None)
        vars(model.tracker).pop("add_new_points", None)
        whole, some = model.run_tracker_propagation, model._propogate_tracker_one_frame_local_gpu
        self._add = model.tracker.add_new_points

        def all_tracked(frame_idx: int, **kwargs: Any) -> Any:
            logits, scores = whole(frame_idx=frame_idx, **kwargs)
            self._seen[frame_idx] = [(logits.clone(), scores.sigmoid())]
            return logits, scores

        def some_tracked(states: Any, frame_idx: int, run_mem_encoder: bool = False, **kwargs: Any) -> Any:
            ids, logits, scores = some(states, frame_idx=frame_idx, run_mem_encoder=run_mem_encoder, **kwargs)
            if run_mem_encoder:
                self._seen.setdefault(frame_idx, []).append((logits.clone(), scores.clone()))
            return ids, logits, scores

        def prompted(frame_idx: int, **kwargs: Any) -> Any:
            found = self._add(frame_idx=frame_idx, **kwargs)
            logits = found[3][:, 0]
            self._seen.setdefault(frame_idx, []).append((logits.clone(), torch.ones(len(logits))))
            return found

        model.run_tracker_propagation = all_tracked
        model._propogate_tracker_one_frame_local_gpu = some_tracked
        model.tracker.add_new_points = prompted

    def _answered(self, index: int, out: dict[str, Any]) -> Answered:
        seen = self._seen.get(index, [])
        at_size = [
            F.interpolate(logits[:, None], self._size, mode="bilinear", align_corners=False)[:, 0] for logits, _ in seen
        ]
        return Answered(
            index=index,
            ids=out["out_obj_ids"],
            scores=out["out_probs"],
            boxes=out["out_boxes_xywh"],
            masks=out["out_binary_masks"],
            logits=torch.cat([torch.zeros(0, *self._size), *at_size]).numpy(),
            tracker_scores=torch.cat([torch.zeros(0), *(scores for _, scores in seen)]).numpy(),
        )
