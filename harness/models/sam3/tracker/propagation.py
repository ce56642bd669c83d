"""Captures the tensors that pass between the tracker's modules when upstream propagates objects through a clip.

Upstream's own `Sam3TrackerPredictor` runs, at low cost for two reasons. Every distinct picture of the clip is encoded
once. Memories come from frames with clicks that are cleared afterwards: upstream keeps the memories of such frames as
if it had tracked the object there, without attention to earlier memories. A frame with a full bank thus costs one
memory attention instead of one for each earlier frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.models.sam3.captures import Activations, named
from harness.models.sam3.images import preprocess
from harness.models.sam3.patches.patch import Call, recorded_methods
from harness.models.sam3.tracker.clip import Clip, load_clip

FRAMES = 20
"""Frames of the clip: the last one attends to four conditioning frames, six other frames and fifteen more pointers."""
TOKENS = 72 * 72
"""Tokens of a memory."""

load_inputs = load_clip

Tensors = dict[str, Tensor]


@torch.no_grad()
def capture(model: Any, clip: Clip) -> Activations:
    """Propagates objects through the clip with upstream's tracker.

    Args:
        model: Upstream's interactive `Sam3Image`, fp32 on the CPU, inside `upstream()`.
        clip: The clip.

    Returns:
        Tensors of two propagations: three objects from the first frame into the second, and one object through the
        clip. A mask prompt has features, high_res_0 and high_res_1 of the frame, fp32 [1, 256, 72, 72],
        [1, 32, 288, 288] and [1, 64, 144, 144]; masks, fp32 [1, 1, 1152, 1152], 0 or 1, or between 0 and 1 at the edge;
        and upstream's pointer [1, 256] and object_logits [1, 1].

        - mask_prompt: The exact mask of the moving object.
        - clicked: The first frame, with three objects, as `_encoded_frame` returns it.
        - tracked: The second frame, with the tracked masks.
        - second: The second frame, which attends to one memory and one pointer of each object; see `_record_attention`.
        - full: Frame 16, with seven memories and sixteen pointers of one object.
        - most_memories: Frame 19, with four conditioning frames, so that it has ten memories and nineteen pointers.
    """
    tracker = model.inst_interactive_predictor.model
    features = _encode_frames(model, clip)
    with recorded_methods(tracker, "_use_mask_as_output", "_encode_new_memory") as calls:
        second = _track_three_objects(tracker, clip, features)
    clicked, tracked = map(_encoded_frame, calls["_encode_new_memory"])
    mask_prompt = calls["_use_mask_as_output"][0]
    full, most_memories = _track_one_object(tracker, clip, features)
    high_res_0, high_res_1 = mask_prompt.arguments["high_res_features"]
    prompted = {
        "features": mask_prompt.arguments["backbone_features"].clone(),
        "high_res_0": high_res_0.clone(),
        "high_res_1": high_res_1.clone(),
        "masks": mask_prompt.arguments["mask_inputs"].clone(),
        "pointer": mask_prompt.result[5].clone(),
        "object_logits": mask_prompt.result[6].clone(),
    }
    tracked_frames = named(second=second, full=full, most_memories=most_memories)
    return Activations(named(mask_prompt=prompted, clicked=clicked, tracked=tracked) | tracked_frames)


def _encode_frames(model: Any, clip: Clip) -> dict[int, tuple[Tensor, dict[str, list[Tensor]]]]:
    """Returns every frame's features as the tracker caches them, from its neck alone; equal frames share features."""
    neck, decoder = model.backbone.vision_backbone, model.inst_interactive_predictor.model.sam_mask_decoder
    views: dict[int, tuple[Tensor, dict[str, list[Tensor]]]] = {}
    for frame in range(FRAMES):
        view = clip.view(frame)
        if view not in views:
            image = preprocess(clip.picture(frame))
            views[view] = image, tracker_features(neck, decoder, image)
    return {frame: views[clip.view(frame)] for frame in range(FRAMES)}


def tracker_features(neck: Any, decoder: Any, image: Tensor) -> dict[str, list[Tensor]]:
    """Returns the feature maps that the tracker reads of an image, and their position encodings, as it caches them."""
    trunk = neck.trunk(image)[-1]
    levels = [convolution(trunk) for convolution in neck.sam2_convs[:3]]
    positions = [neck.position_encoding(level).to(level.dtype) for level in levels]
    levels[:2] = decoder.conv_s0(levels[0]), decoder.conv_s1(levels[1])
    return {"backbone_fpn": levels, "vision_pos_enc": positions}


def _session(tracker: Any, clip: Clip, features: Mapping[int, Any]) -> Any:
    """Returns upstream's inference state of the clip, in which every frame is encoded already."""
    height, width = clip.mask(0).shape
    return tracker.init_state(video_height=height, video_width=width, num_frames=FRAMES, cached_features=dict(features))


def _track_three_objects(tracker: Any, clip: Clip, features: Mapping[int, Any]) -> Tensors:
    """Propagates a mask and clicks from the first frame into the second."""
    state = _session(tracker, clip, features)
    tracker.add_new_mask(state, 0, 0, torch.from_numpy(clip.mask(0)))
    for number, point in enumerate(clip.still, start=1):
        tracker.add_new_points_or_box(state, 0, number, points=[point], labels=[1])
    tracker.propagate_in_video_preflight(state)
    return _record_attention(tracker, state, 1)


def _track_one_object(tracker: Any, clip: Clip, features: Mapping[int, Any]) -> tuple[Tensors, Tensors]:
    """Tracks one object, clicked in every frame, until the memory bank is full."""
    state = _session(tracker, clip, features)

    def click(*frames: int) -> None:
        for frame in frames:
            tracker.add_new_points_or_box(state, frame, 0, points=[clip.center(frame)], labels=[1])
        tracker.propagate_in_video_preflight(state)

    def take_back(*frames: int) -> None:
        for frame in frames:
            tracker.clear_all_points_in_frame(state, frame, 0, need_output=False)

    click(*range(16))
    take_back(*range(1, 16))
    full = _record_attention(tracker, state, 16)
    click(1, 2, 3, 17, 18)
    take_back(17, 18)
    return full, _record_attention(tracker, state, 19)


def _record_attention(tracker: Any, state: Any, frame: int) -> Tensors:
    """Returns inputs and output of the memory attention while one frame is tracked.

    The frame attends to M memories of B objects, and to P object pointers:

    - features: [1, 256, 72, 72] fp32, the frame.
    - memories: [M, B, 64, 72, 72] fp32, rounded to bfloat16 as upstream stores them.
    - ranks: [M] int64, the row of each memory in the table of temporal positions.
    - pointers: [P, B, 256] fp32.
    - times: [P] fp32, distance of each pointer's frame from this frame, as a share of the largest distance.
    - prompt, prompt_pos: [5184·M + 4·P, B, 64] fp32, keys and their positions as upstream concatenates them.
    - conditioned: [B, 256, 72, 72] fp32, the memory-conditioned features of the frame.
    """
    with (
        recorded_methods(tracker.transformer.encoder, "forward") as attention_calls,
        recorded_methods(tracker, "_get_tpos_enc") as time_calls,
    ):
        list(tracker.propagate_in_video(state, frame, 0, reverse=False, tqdm_disable=True))
    (attention,), (times,) = attention_calls["forward"], time_calls["_get_tpos_enc"]
    prompt, source = attention.arguments["prompt"], attention.arguments["src"][0]
    pointer_tokens = attention.arguments["num_obj_ptr_tokens"]
    count, objects = (len(prompt) - pointer_tokens) // TOKENS, prompt.shape[1]
    spatial, pointers = prompt[: count * TOKENS], prompt[count * TOKENS :]
    parts = tracker.hidden_dim // tracker.mem_dim
    conditioning = count - min(count - 1, tracker.num_maskmem - 1)
    # Conditioning frames share one rank; the other frames begin with the earliest.
    ranks = [tracker.num_maskmem - 1] * conditioning + list(range(count - conditioning - 1, -1, -1))
    positions = torch.tensor(times.arguments["rel_pos_list"]) / (times.arguments["max_abs_pos"] - 1)
    memories = _feature_map(spatial.unflatten(0, (count, TOKENS)).transpose(0, 1).flatten(1, 2))
    return {
        "features": _feature_map(source[:, :1]),
        "memories": memories.unflatten(0, (count, objects)).clone(),
        "ranks": torch.tensor(ranks),
        "pointers": pointers.unflatten(0, (-1, parts)).transpose(1, 2).flatten(2).clone(),
        "times": positions.clone(),
        "prompt": prompt.clone(),
        "prompt_pos": attention.arguments["prompt_pos"].clone(),
        "conditioned": _feature_map(attention.result["memory"]),
    }


def _encoded_frame(call: Call) -> Tensors:
    """Returns the tensors of a call of `_encode_new_memory` for a frame and the masks of its B objects.

    - features: [1, 256, 72, 72] fp32.
    - masks: [B, 1, 1008, 1008] fp32 logits.
    - object_logits: [B, 1] fp32, above zero where the object is present.
    - from_points: [1] bool, whether the masks answer clicks and are binarized before they are encoded.
    - memory: [B, 64, 72, 72] fp32.
    """
    return {
        "features": _feature_map(call.arguments["current_vision_feats"][-1][:, :1]),
        "masks": call.arguments["pred_masks_high_res"].clone(),
        "object_logits": call.arguments["object_score_logits"].clone(),
        "from_points": torch.tensor([call.arguments["is_mask_from_pts"]]),
        "memory": call.result[0].clone(),
    }


def _feature_map(tokens: Tensor) -> Tensor:
    """Returns tokens [5184, B, C] as a copied feature map [B, C, 72, 72]."""
    side = math.isqrt(len(tokens))
    feature_map: Tensor = tokens.permute(1, 2, 0).unflatten(2, (side, side))
    return feature_map.clone()
