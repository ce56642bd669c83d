"""Upstream's own video model on the CPU, shallow, and what it answers frame by frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from conformance.support.shallow import interactive_model
from harness.models.sam3.build import build_video_model
from harness.models.sam3.images import preprocess
from harness.models.sam3.upstream import upstream

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Answered:
    """What upstream gives out of a frame; names as in `harness.runtime.sam3.video.session.TrackedFrame`.

    Attributes:
        boxes: fp32 [n, 4], left, top, width and height, as shares of the video's.
        logits: Mask logits fp32 [N, 288, 288] of all objects that were tracked into the frame, after holes were filled.
        object_logits: fp32 [N].
    """

    index: int
    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    boxes: npt.NDArray[np.float32]
    masks: npt.NDArray[np.bool_]
    logits: npt.NDArray[np.float32]
    object_logits: npt.NDArray[np.float32]


def answers(frames: Sequence[Pixels], **prompt: Any) -> tuple[Answered, ...]:
    """The first frame after the prompt, and then every frame that upstream propagates into.

    The frames are prepared as photographs are, since upstream's six ways to read a video differ from each other.

    Args:
        frames: uint8 [h, w, 3] each.
        prompt: What upstream's `add_prompt` takes, of the first frame.
    """
    with upstream(), torch.inference_mode():
        model = build_video_model(interactive_model(), "shallow")
        pictures = [Image.fromarray(frame) for frame in frames]
        state = model.init_state(pictures, offload_video_to_cpu=True)
        state["input_batch"].img_batch = torch.cat([preprocess(picture) for picture in pictures])
        tracked: dict[int, tuple[Any, Any]] = {}
        propagate = model.run_tracker_propagation

        def recorded(frame_idx: int, **kwargs: Any) -> Any:
            logits, scores = propagate(frame_idx=frame_idx, **kwargs)
            tracked[frame_idx] = logits.numpy().copy(), scores.numpy().copy()
            return logits, scores

        model.run_tracker_propagation = recorded
        index, out = model.add_prompt(state, 0, **prompt)
        first = _answered(index, out, tracked)
        return (first, *_propagated(model, state, tracked))


def _propagated(model: Any, state: Any, tracked: dict[int, tuple[Any, Any]]) -> Iterator[Answered]:
    for index, out in model.propagate_in_video(state, start_frame_idx=0, max_frame_num_to_track=None, reverse=False):
        yield _answered(index, out, tracked)


def _answered(index: int, out: dict[str, Any], tracked: dict[int, tuple[Any, Any]]) -> Answered:
    logits, object_logits = tracked[index]
    return Answered(
        index=index,
        ids=out["out_obj_ids"],
        scores=out["out_probs"],
        boxes=out["out_boxes_xywh"],
        masks=out["out_binary_masks"],
        logits=logits,
        object_logits=object_logits,
    )
