"""Captures the tensors that reach each component when upstream's model runs on a photograph with prompts.

Upstream's own `forward_grounding` runs once, and calls of its submodules are recorded. Nothing is rebuilt by hand, so
that a component that is cut out wrongly cannot agree with the captured tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from harness.core.settings import FIXTURES
from harness.models.sam3.captures import Activations
from harness.models.sam3.fixtures import Fixture, read_fixture
from harness.models.sam3.images import preprocess
from harness.models.sam3.patches.patch import recorded_methods
from harness.models.sam3.vocabulary import installed_tokenizer
from harness.runtime.sam3.images import load_image


class Prompts(Fixture, frozen=True):
    """A photograph and its prompts; coordinates are normalized to [0, 1].

    Attributes:
        image: Path of the photograph.
        text: The noun phrase.
        boxes: (center x, center y, width, height) each.
        box_labels: 1 for a positive box, 0 for a negative one.
        points: (x, y) each.
        point_labels: 1 for a positive point, 0 for a negative one.
    """

    image: Path
    text: str
    boxes: tuple[tuple[float, float, float, float], ...]
    box_labels: tuple[int, ...]
    points: tuple[tuple[float, float], ...]
    point_labels: tuple[int, ...]


def load_inputs(image: Path | None = None, path: Path = FIXTURES / "prompts.toml") -> Prompts:
    """Reads a photograph's name and its prompts, with another photograph if one is given.

    Errors are those of `harness.models.sam3.fixtures.read_fixture`.
    """
    prompts = read_fixture(path, Prompts, "a prompts file")
    return prompts if image is None else msgspec.structs.replace(prompts, image=image)


def geometric_prompt(prompts: Prompts) -> dict[str, Tensor]:
    """Returns points and boxes as upstream's `Prompt` takes them: sequence first, without padding."""
    points = torch.tensor(prompts.points, dtype=torch.float32).view(-1, 1, 2)
    boxes = torch.tensor(prompts.boxes, dtype=torch.float32).view(-1, 1, 4)
    return {
        "points": points,
        "points_mask": torch.zeros(1, len(points), dtype=torch.bool),
        "point_labels": torch.tensor(prompts.point_labels, dtype=torch.int64).view(-1, 1),
        "boxes": boxes,
        "boxes_mask": torch.zeros(1, len(boxes), dtype=torch.bool),
        "box_labels": torch.tensor(prompts.box_labels, dtype=torch.int64).view(-1, 1),
    }


def upstream_prompt(geometry: Mapping[str, Tensor]) -> Any:
    """Returns upstream's `Prompt` of the points and boxes of `geometric_prompt`."""
    from sam3.model.geometry_encoders import Prompt

    return Prompt(
        box_embeddings=geometry["boxes"],
        box_mask=geometry["boxes_mask"],
        box_labels=geometry["box_labels"],
        point_embeddings=geometry["points"],
        point_mask=geometry["points_mask"],
        point_labels=geometry["point_labels"],
    )


def find_stage(texts: int) -> Any:
    """Returns upstream's `FindStage` of several texts about one image, whose prompts it does not read."""
    from sam3.model.data_misc import FindStage

    unread = ("boxes", "boxes_mask", "boxes_label", "points", "points_mask")
    image, numbers = torch.zeros(texts, dtype=torch.long), torch.arange(texts)
    return FindStage(img_ids=image, text_ids=numbers, **dict.fromkeys(f"input_{name}" for name in unread))


@torch.no_grad()
def capture(model: Any, prompts: Prompts) -> Activations:
    """Runs upstream's image model once and returns the tensors that pass between its parts.

    Args:
        model: Upstream's `Sam3Image`, fp32 on the CPU, inside `harness.models.sam3.upstream.upstream()`.
        prompts: Photograph and prompts.

    Returns:
        B = 1, P = prompt tokens, L = decoder layers:

        - image: [B, 3, 1008, 1008] fp32.
        - tokens: [B, 32] int64.
        - points, points_mask, point_labels: [N, B, 2] fp32, [B, N] bool (True is padding), [N, B] int64.
        - boxes, boxes_mask, box_labels: [M, B, 4] fp32 (cx, cy, w, h), [B, M] bool, [M, B] int64.
        - img_feats, img_pos: [5184, B, 256] fp32, the coarsest feature map that is kept and its position encoding.
        - text_features, text_mask: [32, B, 256] fp32, [B, 32] bool.
        - geometry_features, geometry_mask: [N + M + 1, B, 256] fp32, [B, N + M + 1] bool.
        - prompt, prompt_mask: [P, B, 256] fp32, [B, P] bool: text, then geometry.
        - memory: [5184, B, 256] fp32, output of the fusion encoder.
        - hs: [L, B, 200, 256] fp32, decoder hidden states.
        - reference_boxes: [L, B, 200, 4] fp32.
        - presence_logits: [L, B, 1] fp32.
        - fpn_0, fpn_1: [B, 256, 288, 288] and [B, 256, 144, 144] fp32.
        - pred_logits, pred_boxes, pred_boxes_xyxy, pred_masks, semantic_seg: Upstream's results.
    """
    image = preprocess(load_image(prompts.image))
    geometry = geometric_prompt(prompts)
    backbone_out = model.backbone.forward_image(image)
    backbone_out.update(model.backbone.forward_text([prompts.text], device="cpu"))
    with (
        recorded_methods(model.geometry_encoder, "forward") as geometry_calls,
        recorded_methods(model.transformer.encoder, "forward") as encoder_calls,
        recorded_methods(model.transformer.decoder, "forward") as decoder_calls,
    ):
        out = model.forward_grounding(
            backbone_out=backbone_out,
            find_input=find_stage(1),
            find_target=None,
            geometric_prompt=upstream_prompt(geometry),
        )
    encoded_geometry, encoded = geometry_calls["forward"][-1], encoder_calls["forward"][-1]
    hs, reference_boxes, presence_logits, _ = decoder_calls["forward"][-1].result
    return Activations(
        image=image,
        tokens=torch.from_numpy(installed_tokenizer().tokenize([prompts.text]).ids),
        **geometry,
        img_feats=encoded_geometry.arguments["img_feats"][-1],
        img_pos=encoded_geometry.arguments["img_pos_embeds"][-1],
        text_features=backbone_out["language_features"],
        text_mask=backbone_out["language_mask"],
        geometry_features=encoded_geometry.result[0],
        geometry_mask=encoded_geometry.result[1],
        prompt=encoded.arguments["prompt"],
        prompt_mask=encoded.arguments["prompt_key_padding_mask"],
        memory=encoded.result["memory"],
        hs=hs.transpose(1, 2),
        reference_boxes=reference_boxes.transpose(1, 2),
        presence_logits=presence_logits.transpose(1, 2),
        fpn_0=backbone_out["backbone_fpn"][0],
        fpn_1=backbone_out["backbone_fpn"][1],
        **{name: out[name] for name in ("pred_logits", "pred_boxes", "pred_boxes_xyxy", "pred_masks", "semantic_seg")},
    )
