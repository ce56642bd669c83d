"""The registry of components; a new one is a new file and one line here."""

from __future__ import annotations

from harness.models.sam3.components.box_head import BOX_HEAD
from harness.models.sam3.components.component import Component
from harness.models.sam3.components.geometry_encoder import GEOMETRY_ENCODER
from harness.models.sam3.components.image_encoder import IMAGE_ENCODER
from harness.models.sam3.components.mask_decoder import MASK_DECODER
from harness.models.sam3.components.mask_pointer import MASK_POINTER
from harness.models.sam3.components.memory_attention import MEMORY_ATTENTION
from harness.models.sam3.components.memory_encoder import MEMORY_ENCODER
from harness.models.sam3.components.object_pointers import OBJECT_POINTERS
from harness.models.sam3.components.prompt_encoder import PROMPT_ENCODER
from harness.models.sam3.components.scoring_head import SCORING_HEAD
from harness.models.sam3.components.segmentation_head import SEGMENTATION_HEAD
from harness.models.sam3.components.text_encoder import TEXT_ENCODER
from harness.models.sam3.components.tracking_features import TRACKING_FEATURES
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
        TRACKING_FEATURES,
        PROMPT_ENCODER,
        MASK_DECODER,
        MASK_POINTER,
        MEMORY_ENCODER,
        OBJECT_POINTERS,
        MEMORY_ATTENTION,
    )
}
