"""The registry of components; a new one is a new file and one line here."""

from __future__ import annotations

from harness.models.sam3.components.box_head import BOX_HEAD
from harness.models.sam3.components.component import Component
from harness.models.sam3.components.geometry_encoder import GEOMETRY_ENCODER
from harness.models.sam3.components.image_encoder import IMAGE_ENCODER
from harness.models.sam3.components.scoring_head import SCORING_HEAD
from harness.models.sam3.components.segmentation_head import SEGMENTATION_HEAD
from harness.models.sam3.components.text_encoder import TEXT_ENCODER
from harness.models.sam3.components.transformer_decoder import TRANSFORMER_DECODER
from harness.models.sam3.components.transformer_encoder import TRANSFORMER_ENCODER
from harness.models.sam3.components.vision_backbone import VISION_BACKBONE
from harness.models.sam3.components.vit import VIT

COMPONENTS: dict[str, Component] = {
    component.name: component
    for component in (
        VIT,
        VISION_BACKBONE,
        IMAGE_ENCODER,
        TEXT_ENCODER,
        GEOMETRY_ENCODER,
        TRANSFORMER_ENCODER,
        TRANSFORMER_DECODER,
        SCORING_HEAD,
        BOX_HEAD,
        SEGMENTATION_HEAD,
    )
}
