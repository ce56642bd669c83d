"""Captures the tensors that pass between SAM 3.1's parts when three objects are tracked through a clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from harness.models.sam3.captures import Activations, named
from harness.models.sam3.components.tracker_modules import ABSENT, PromptEncoder
from harness.models.sam3.images import preprocess
from harness.models.sam3.tracker.clip import Clip, load_clip
from harness.models.sam31 import modules
from harness.models.sam31.components import NECK_OUTPUTS
from harness.runtime.sam3.images import MASK_SIZE, RESOLUTION
from harness.runtime.sam3.video.slots import SLOTS
from harness.runtime.sam3.video.tracker import INPUT_MASK_SIZE

OBJECTS = 3
FRAMES = 3
CONDITIONING_RANK = 6
"""Row of the conditioning frame in the table of temporal positions."""

load_inputs = load_clip

Tensors = dict[str, Tensor]


@torch.no_grad()
def capture(model: Any, clip: Clip) -> Activations:
    """Clicks on three objects of the first frame, and tracks them into the next two in one bucket.

    Args:
        model: `harness.models.sam31.architecture.Sam31`, fp32 on the CPU, inside `upstream()`.
        clip: The clip.

    Returns:
        Tensors of the first frame:

        - trunk: [1, 1024, 72, 72] fp32, and the maps of `NECK_OUTPUTS`.
        - points, labels, masks, has_mask: [3, 2, 2] fp32 in pixels, [3, 2] int32, [3, 1, 288, 288] fp32, [3] bool.
        - sparse, dense: [3, 3, 256] and [3, 256, 72, 72] fp32: these prompts, encoded without masks.
        - given: [2, 1, 1152, 1152] fp32, the mask of the moving object and an empty one.

        `second` and `third` are the next frames as `_attention` returns them, `encoded` is the second frame with its
        tracked masks, the inputs of `modules.MultiplexMemoryEncoder`.
    """
    trunks = [model.detector.backbone.vision_backbone.trunk(preprocess(clip.picture(n)))[-1] for n in range(FRAMES)]
    neck = modules.TriNeckFeatures(model)
    frames = [dict(zip(NECK_OUTPUTS, neck(trunk), strict=True)) for trunk in trunks]
    first, second, third = frames

    prompt_encoder = PromptEncoder(modules.tracker_of(model).interactive_sam_prompt_encoder)
    places = torch.tensor([clip.center(0), *clip.still[: OBJECTS - 1]])
    points = torch.stack((places, places + 0.1), dim=1) * RESOLUTION
    labels = torch.tensor([[1, -1], [1, 0], [2, 3]], dtype=torch.int32)
    no_masks = torch.zeros(OBJECTS, 1, MASK_SIZE, MASK_SIZE)
    sparse, dense = prompt_encoder(points, labels, no_masks, torch.zeros(OBJECTS, dtype=torch.bool))
    image = first["click_image"], first["click_high_res_0"], first["click_high_res_1"]
    masks, _, object_logits, pointers = modules.ClickMaskDecoder(model)(*image, sparse, dense)
    moving = torch.from_numpy(clip.mask(0)).float()[None, None]
    given = interpolate(moving, size=(INPUT_MASK_SIZE, INPUT_MASK_SIZE), mode="bilinear").round()

    valid = (torch.arange(SLOTS) < OBJECTS).float()[None]
    encode = modules.MultiplexMemoryEncoder(model)
    (memory,) = encode(first["features"], _large(_slots(masks[:, 0])), _slots(object_logits), valid, valid)
    memories, frame_maps, frame_pointers = [memory], [first["features"]], [_slots(pointers[:, 0])]
    second_attention = _attention(model, second, memories, frame_maps, frame_pointers, [CONDITIONING_RANK], [1.0])

    decode = modules.MultiplexMaskDecoder(model)
    maps = second["high_res_0"], second["high_res_1"]
    decoded, ious, object_logits, pointers = decode(second_attention["conditioned"], *maps, valid)
    best = ious.argmax(dim=-1)[0]
    object_logits[0, 1] = -1.0
    tracked = torch.where(object_logits[..., None] > 0, decoded[:, torch.arange(SLOTS), best], ABSENT)
    encoded = {
        "features": second["features"],
        "masks": _large(tracked),
        "object_logits": object_logits,
        "valid": valid,
        "conditioning": (torch.arange(SLOTS) == 0).float()[None],  # it was given again
    }
    memories += encode(**encoded)
    frame_maps.append(second["features"])
    frame_pointers.append(pointers[:, torch.arange(SLOTS), best])
    third_attention = _attention(model, third, memories, frame_maps, frame_pointers, [CONDITIONING_RANK, 0], [1.0, 0.5])
    return Activations(
        first
        | {"trunk": trunks[0], "points": points, "labels": labels, "sparse": sparse, "dense": dense}
        | {"masks": masks[:, :1], "has_mask": torch.tensor([True, False, True])}
        | {"given": torch.cat((given, torch.zeros_like(given))), "valid": valid}
        | named(second=second_attention, third=third_attention, encoded=encoded)
    )


def _attention(
    model: Any,
    frame: Tensors,
    memories: list[Tensor],
    frame_maps: list[Tensor],
    frame_pointers: list[Tensor],
    ranks: list[int],
    times: list[float],
) -> Tensors:
    """Returns inputs and output of the memory attention to M memories, and the frame's finer maps.

    - pointers, times: [M, 1, 16, 256] and [M] fp32.
    - The others are those of `modules.MultiplexMemoryAttention`.
    """
    pointers = torch.stack(frame_pointers)
    tokens, positions = modules.MultiplexPointers(model)(pointers, torch.tensor(times))
    arguments = {
        "features": frame["features"],
        "memory_features": torch.cat(frame_maps),
        "memories": torch.stack(memories),
        "ranks": torch.tensor(ranks),
        "tokens": tokens,
        "positions": positions,
    }
    (conditioned,) = modules.MultiplexMemoryAttention(model)(*arguments.values())
    maps = {name: frame[name] for name in ("high_res_0", "high_res_1")}
    return arguments | maps | {"conditioned": conditioned, "pointers": pointers, "times": torch.tensor(times)}


def _slots(values: Tensor) -> Tensor:
    """Returns values of three objects [3, …] in a bucket [1, 16, …] with zeros."""
    return torch.cat((values, values.new_zeros(SLOTS - OBJECTS, *values.shape[1:]))).unsqueeze(0)


def _large(masks: Tensor) -> Tensor:
    return interpolate(masks, size=(RESOLUTION, RESOLUTION), mode="bilinear")
