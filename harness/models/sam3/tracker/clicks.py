"""Captures the tensors of prompt encoder and mask decoder when upstream's `predict_inst` answers about a photograph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.models.sam3.capture import Prompts, load_inputs
from harness.models.sam3.captures import Activations, named
from harness.models.sam3.patches.patch import Call, recorded_methods
from harness.runtime.sam3.images import MASK_SIZE, load_image

__all__ = ["capture", "load_inputs"]


@torch.no_grad()
def capture(model: Any, prompts: Prompts) -> Activations:
    """Asks upstream's model about a photograph through `Sam3Processor` and `predict_inst`.

    Args:
        model: Upstream's interactive `Sam3Image`, fp32 on the CPU, inside `upstream()`.
        prompts: The photograph; its first box and its first point lie on one object.

    Returns:
        The image encoded for clicks:

        - trunk: [1, 1024, 72, 72] fp32, the vision transformer's feature map.
        - high_res_0, high_res_1: [1, 32, 288, 288] and [1, 64, 144, 144] fp32.
        - image_embed: [1, 256, 72, 72] fp32, the mask decoder's image.

        And the tensors of `_round` of each question about it:

        - click: One click on the object, answered with three masks.
        - box: One box.
        - refined: Box, click, a click outside the object, and the best mask of `click`.
        - objects: Three objects in one batch, with different numbers of points.
    """
    from sam3.model.box_ops import box_cxcywh_to_xyxy
    from sam3.model.sam3_image_processor import Sam3Processor

    photograph = load_image(prompts.image)
    size = np.array(photograph.size)
    point = np.array(prompts.points[0])
    corners = box_cxcywh_to_xyxy(torch.tensor(prompts.boxes[0], dtype=torch.float64)).view(2, 2).numpy()
    outside = corners[0] / 2
    trunk = model.backbone.vision_backbone.trunk
    with recorded_methods(trunk, "forward") as trunk_calls:
        state = Sam3Processor(model, device="cpu").set_image(photograph)
    predictor = model.inst_interactive_predictor

    def ask(**question: Any) -> tuple[dict[str, Tensor], Any]:
        with (
            recorded_methods(predictor.model.sam_prompt_encoder, "forward") as encoded,
            recorded_methods(predictor.model.sam_mask_decoder, "forward") as decoded,
        ):
            answer = model.predict_inst(state, **question)
        return _round(encoded["forward"][0], decoded["forward"][0]), (answer, decoded["forward"][0].arguments)

    point_prompt = {"point_coords": (point * size)[None], "point_labels": np.array([1])}
    click, ((_, ious, logits), decoder_arguments) = ask(**point_prompt, multimask_output=True)
    box, _ = ask(box=(corners * size).reshape(4), multimask_output=False)
    refined, _ = ask(
        point_coords=np.stack([point, outside]) * size,
        point_labels=np.array([1, 0]),
        box=(corners * size).reshape(4),
        mask_input=logits[np.argmax(ious)][None],
        multimask_output=False,
    )
    # The second object is a box, the third a click with a point of padding.
    batch = np.stack([np.stack([point, outside]), corners, np.stack([corners.mean(0), np.zeros(2)])])
    objects, _ = ask(
        point_coords=batch * size, point_labels=np.array([[1, 0], [2, 3], [1, -1]]), multimask_output=False
    )
    return Activations(
        trunk=trunk_calls["forward"][0].result[-1].clone(),
        high_res_0=decoder_arguments["high_res_features"][0].clone(),
        high_res_1=decoder_arguments["high_res_features"][1].clone(),
        image_embed=decoder_arguments["image_embeddings"].clone(),
        **named(click=click, box=box, refined=refined, objects=objects),
    )


def _round(encoded: Call, decoded: Call) -> dict[str, Tensor]:
    """Returns the tensors of one question, from the calls of upstream's prompt encoder and mask decoder.

    B objects, P points including the corners of boxes, M = 3 masks of one object or 1 of each object:

    - points: [B, P, 2] fp32, in pixels of the model's square input.
    - labels: [B, P] int32: 0 and 1 are clicks, 2 and 3 corners of a box, -1 is padding.
    - masks: [B, 1, 288, 288] fp32, the logits of a mask prompt; zeros if there is none.
    - has_mask: [1] bool, whether there is a mask prompt.
    - sparse, dense: [B, P + 1, 256] and [B, 256, 72, 72] fp32: the encoded prompt.
    - logits: [B, M, 288, 288] fp32, the decoder's masks.
    - ious: [B, M] fp32, predicted IoU.
    - object_logits: [B, 1] fp32, above zero for an object.
    """
    (points, labels), masks = encoded.arguments["points"], encoded.arguments["masks"]
    logits, ious, _, object_logits = decoded.result
    sparse, dense = encoded.result
    tensors = {
        "points": points,
        "labels": labels,
        "masks": torch.zeros(len(points), 1, MASK_SIZE, MASK_SIZE) if masks is None else masks,
        "has_mask": torch.tensor([masks is not None]),
        "sparse": sparse,
        "dense": dense,
        "logits": logits,
        "ious": ious,
        "object_logits": object_logits,
    }
    return {name: tensor.clone() for name, tensor in tensors.items()}
