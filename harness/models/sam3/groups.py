"""Notes on SAM 3's modules the names of their products, and which products stay float32 in half precision."""

from __future__ import annotations

from typing import Any

from harness.compiler.lowering.groups import keep_float32, note_paths

_SCORING = "dot_prod_scoring"
_PRESENCE = "transformer.decoder.presence_token_head"
_MASK_DECODER = "inst_interactive_predictor.model.sam_mask_decoder"
FLOAT32 = (
    "backbone.language_backbone.resizer",
    f"{_SCORING}.prompt_proj",
    _SCORING,
    "transformer.decoder.bbox_embed.layers.2",
    *(
        f"{head}.layers.{layer}"
        for head in (_PRESENCE, f"{_MASK_DECODER}.iou_prediction_head", f"{_MASK_DECODER}.pred_obj_score_head")
        for layer in range(3)
    ),
)
"""Paths of the modules that project the words and the pooled prompt, and of the heads that predict logits, boxes,
presence, IoU and object scores.

Their results are small tensors on which much depends: all 200 logits are products with one pooled prompt, so that its
error does not average out, and each layer refines the boxes of the layer before. They are less than a ten-thousandth
of the model's operations, and half precision would save nothing. The errors with and without are in
`docs/evidence/log/2026-11-30-precision.md`.
"""


def note_groups(model: Any) -> None:
    """Notes on each module of a model its path, and on the modules of `FLOAT32` that they stay float32."""
    note_paths(model)
    parts = dict(model.named_modules())
    for path in FLOAT32:
        if path in parts:
            keep_float32(parts[path])
