"""Lists the components of the image model: its encoders, its transformer and its heads."""

from __future__ import annotations

from types import ModuleType

from harness.core.precision import DEFAULT_PRECISION
from harness.models.sam3.captures import Activations
from harness.models.sam3.components.component import EVERY_PRECISION, Arguments, Component, single_sample


def _modules() -> ModuleType:
    """Imports the torch modules at first use, so that the table is read without PyTorch."""
    from harness.models.sam3.components import modules

    return modules


def _texts(activations: Activations) -> dict[str, Arguments]:
    """Returns the photograph's noun phrase, and a batch from the empty text to a text of many tokens."""
    import torch

    from harness.models.sam3.vocabulary import installed_tokenizer

    texts = ["", "a striped cat", "the ears, eyes & whiskers of every tabby kitten in this picture"]
    batch = torch.from_numpy(installed_tokenizer().tokenize(texts).ids)
    return {"text": {"tokens": activations.tokens}, "batch": {"tokens": batch}}


def _geometry(activations: Activations) -> dict[str, Arguments]:
    """Returns a point with a box, the CLS token alone, one box, and a padded batch of two prompts."""
    import torch

    geometry = activations.take("points", "points_mask", "point_labels", "boxes", "boxes_mask", "box_labels")
    image = activations.take("img_feats", "img_pos")
    empty = {
        "points": torch.zeros(0, 1, 2),
        "points_mask": torch.zeros(1, 0, dtype=torch.bool),
        "point_labels": torch.zeros(0, 1, dtype=torch.int64),
        "boxes": torch.zeros(0, 1, 4),
        "boxes_mask": torch.zeros(1, 0, dtype=torch.bool),
        "box_labels": torch.zeros(0, 1, dtype=torch.int64),
    }
    box = {key: (geometry if key.startswith("box") else empty)[key] for key in geometry}
    # Two prompts on two images: the second has fewer points and boxes, so its sequences are padded on the right.
    batch = {
        "points": torch.tensor([[[0.1, 0.2], [0.9, 0.7]], [[0.5, 0.5], [0.3, 0.4]], [[0.98, 0.01], [0.0, 0.0]]]),
        "points_mask": torch.tensor([[False, False, False], [False, False, True]]),
        "point_labels": torch.tensor([[1, 1], [0, 0], [1, 0]]),
        "boxes": torch.tensor(
            [[[0.3, 0.4, 0.2, 0.3], [0.5, 0.5, 1.0, 1.0]], [[0.8, 0.2, 0.3, 0.1], [0.0, 0.0, 0.0, 0.0]]]
        ),
        "boxes_mask": torch.tensor([[False, False], [False, True]]),
        "box_labels": torch.tensor([[1, 0], [0, 0]]),
        "img_feats": torch.cat([activations.img_feats, activations.img_feats.flip(0)], dim=1),
        "img_pos": activations.img_pos.repeat(1, 2, 1),
    }
    return {"point_box": geometry | image, "empty": empty | image, "box": box | image, "many": batch}


_LEVELS = ("fpn_0", "fpn_1", "fpn_2", "fpn_3", "pos_0", "pos_1", "pos_2", "pos_3")
"""Feature maps [B, 256, S, S] and position encodings of the same shapes, S = 288, 144, 72, 36."""

COMPONENTS = (
    Component(
        name="vit",
        summary="vision transformer trunk: image to features",
        inputs=("image",),
        outputs=("features",),
        build=lambda model: _modules().Trunk(trunk=model.backbone.vision_backbone.trunk),
        samples=single_sample("photograph", "image"),
        uses_rope=True,
    ),
    Component(
        name="vision_backbone",
        summary="trunk and neck: four feature maps, four position encodings",
        inputs=("image",),
        outputs=_LEVELS,
        build=lambda model: _modules().Neck(neck=model.backbone.vision_backbone),
        samples=single_sample("photograph", "image"),
        uses_rope=True,
    ),
    Component(
        name="image_encoder",
        summary="trunk and dual neck: SAM 3 and SAM 2 features, for interactive use",
        inputs=("image",),
        outputs=(*_LEVELS, *(f"sam2_{level}" for level in _LEVELS)),
        build=lambda model: _modules().Neck(neck=model.backbone.vision_backbone),
        samples=single_sample("photograph", "image"),
        uses_rope=True,
        with_sam2_neck=True,
    ),
    Component(
        name="text_encoder",
        summary="token ids to prompt features and mask",
        inputs=("tokens",),
        outputs=("features", "mask"),
        build=lambda model: _modules().TextEncoder(encoder=model.backbone.language_backbone),
        samples=_texts,
        emulated=EVERY_PRECISION,
    ),
    Component(
        name="geometry_encoder",
        summary="points, boxes and labels to prompt tokens, CLS included",
        inputs=("points", "points_mask", "point_labels", "boxes", "boxes_mask", "box_labels", "img_feats", "img_pos"),
        outputs=("features", "mask"),
        build=lambda model: _modules().GeometryEncoder(encoder=model.geometry_encoder),
        samples=_geometry,
        emulated=EVERY_PRECISION,
    ),
    Component(
        name="transformer_encoder",
        summary="fusion encoder: image features attend to the prompt",
        inputs=("img_feats", "img_pos", "prompt", "prompt_mask"),
        outputs=("memory",),
        build=lambda model: _modules().TransformerEncoder(encoder=model.transformer.encoder),
        samples=single_sample("text_point_box", "img_feats", "img_pos", "prompt", "prompt_mask"),
        emulated=(DEFAULT_PRECISION,),  # in half precision, tensor cores emulated, 215 s were measured
    ),
    Component(
        name="transformer_decoder",
        summary="hidden states, refined boxes, presence logits",
        inputs=("memory", "img_pos", "prompt", "prompt_mask"),
        outputs=("hs", "reference_boxes", "presence_logits", "presence_feats"),
        build=lambda model: _modules().TransformerDecoder(decoder=model.transformer.decoder),
        samples=single_sample("text_point_box", "memory", "img_pos", "prompt", "prompt_mask"),
        emulated=EVERY_PRECISION,
    ),
    Component(
        name="scoring_head",
        summary="dot product of each query with the pooled prompt",
        inputs=("hs", "prompt", "prompt_mask"),
        outputs=("logits",),
        build=lambda model: _modules().ScoringHead(scoring=model.dot_prod_scoring),
        samples=single_sample("text_point_box", "hs", "prompt", "prompt_mask"),
        emulated=EVERY_PRECISION,
    ),
    Component(
        name="box_head",
        summary="hidden states and reference boxes to boxes",
        inputs=("hs", "reference_boxes"),
        outputs=("boxes", "boxes_xyxy"),
        build=lambda model: _modules().BoxHead(bbox_embed=model.transformer.decoder.bbox_embed),
        samples=single_sample("text_point_box", "hs", "reference_boxes"),
        emulated=EVERY_PRECISION,
    ),
    Component(
        name="segmentation_head",
        summary="instance masks and semantic map",
        inputs=("fpn_0", "fpn_1", "memory", "hs", "prompt", "prompt_mask"),
        outputs=("pred_masks", "semantic_seg"),
        build=lambda model: _modules().SegmentationHead(head=model.segmentation_head),
        samples=single_sample("text_point_box", "fpn_0", "fpn_1", "memory", "hs", "prompt", "prompt_mask"),
        emulated=EVERY_PRECISION,
    ),
)
"""The components of the image model."""
