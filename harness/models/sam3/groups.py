"""Notes on SAM 3's modules the names of their products, and which products stay float32 in half precision."""

from __future__ import annotations

from typing import Any

from harness.compiler.lowering.groups import keep_float32, note_paths


def float32_paths(image_model: str, *mask_decoders: str) -> tuple[str, ...]:
    """Returns the paths of the modules that stay float32.

    Args:
        image_model: Beginning of the paths in the image model, which is empty or ends in a dot.
        mask_decoders: Paths of the mask decoders that answer clicks or track.
    """
    scoring = f"{image_model}dot_prod_scoring"
    presence = f"{image_model}transformer.decoder.presence_token_head"
    scores = [
        f"{decoder}.{head}" for decoder in mask_decoders for head in ("iou_prediction_head", "pred_obj_score_head")
    ]
    return (
        f"{image_model}backbone.language_backbone.resizer",
        f"{scoring}.prompt_proj",
        scoring,
        f"{image_model}transformer.decoder.bbox_embed.layers.2",
        *(f"{head}.layers.{layer}" for head in (presence, *scores) for layer in range(3)),
    )


FLOAT32 = float32_paths("", "inst_interactive_predictor.model.sam_mask_decoder")
"""Paths of the modules that project the words and the pooled prompt, and of the heads that predict logits, boxes,
presence, IoU and object scores.

Their results are small tensors on which much depends: all 200 logits are products with one pooled prompt, so that its
error does not average out, and each layer refines the boxes of the layer before. They are less than a ten-thousandth
of the model's operations, and half precision would save nothing. The errors with and without are in
`docs/evidence/log/2026-11-30-precision.md`.
"""


def note_groups(model: Any) -> None:
    """Notes on each module of a model its path, and on some that they stay float32.

    These are the modules of the model's `float32_paths`, or of `FLOAT32` if it has none.
    """
    note_paths(model)
    parts = dict(model.named_modules())
    for path in getattr(model, "float32_paths", FLOAT32):
        if path in parts:
            keep_float32(parts[path])
