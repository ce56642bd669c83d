"""Defines SAM 3.1's modules, whose tensors have the names of the published checkpoint."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar

import torch
from sam3.model.model_misc import TransformerWrapper
from sam3.sam.mask_decoder import MLP, MaskDecoder
from sam3.sam.prompt_encoder import PositionEmbeddingRandom, PromptEncoder
from torch import Tensor, nn

from harness.models.sam3.components.modules import GRID
from harness.models.sam3.groups import float32_paths
from harness.models.sam31.memory_attention import DecoupledMemoryAttention
from harness.models.sam31.multiplex import (
    CHANNELS,
    MASKS,
    MultiplexMaskDecoder,
    memory_encoder,
    two_way_transformer,
)
from harness.runtime.sam3.images import RESOLUTION
from harness.runtime.sam3.video.slots import SLOTS

LEVELS = 3
"""Feature maps of a neck: SAM 3's but the coarsest."""
MEMORY_RANKS = 7
"""Rows of the table of temporal positions: six ages, and one of every other frame."""


class TriNeck(nn.Module):
    """The trunk with three necks of three levels: for the detector, for clicks, and for propagation."""

    def __init__(self, neck: Any) -> None:
        """Takes the trunk and the first levels of SAM 3's neck."""
        super().__init__()
        self.trunk = neck.trunk
        self.position_encoding = neck.position_encoding
        self.convs = neck.convs[:LEVELS]
        self.interactive_convs = deepcopy(self.convs)
        self.propagation_convs = deepcopy(self.convs)

    def forward(self, images: Tensor) -> tuple[list[Tensor], ...]:
        """Returns the detector's feature maps and positions and those for clicks, as SAM 3's neck with the tracker's.

        Upstream's `SAM3VLBackboneTri` returns those for clicks under another name.
        """
        trunk = self.trunk(images)[-1]
        detector, clicks = ([level(trunk) for level in levels] for levels in (self.convs, self.interactive_convs))
        positions = [self.position_encoding(level) for level in detector]
        return detector, positions, clicks, positions


class MultiplexTracker(nn.Module):
    """The modules and parameters of clicks and tracking."""

    def __init__(self, attention_layers: int) -> None:
        super().__init__()
        self.transformer = TransformerWrapper(DecoupledMemoryAttention(attention_layers, GRID), None, d_model=CHANNELS)
        self.maskmem_backbone = memory_encoder()
        self.sam_mask_decoder = MultiplexMaskDecoder()
        self.image_pe_layer = PositionEmbeddingRandom(CHANNELS // 2)
        self.interactive_sam_prompt_encoder = PromptEncoder(
            embed_dim=CHANNELS,
            image_embedding_size=GRID,
            input_image_size=(RESOLUTION, RESOLUTION),
            mask_in_chans=16,
        )
        self.interactive_sam_mask_decoder = MaskDecoder(
            num_multimask_outputs=MASKS,
            transformer=two_way_transformer(),
            transformer_dim=CHANNELS,
            use_high_res_features=True,
            dynamic_multimask_via_stability=True,
            pred_obj_scores=True,
            pred_obj_scores_mlp=True,
            use_multimask_token_for_obj_ptr=True,
        )
        self.interactive_mask_downsample = nn.Conv2d(1, 1, kernel_size=4, stride=4)
        self.obj_ptr_proj = MLP(CHANNELS, CHANNELS, CHANNELS, 3)
        self.interactive_obj_ptr_proj = MLP(CHANNELS, CHANNELS, CHANNELS, 3)
        self.no_obj_ptr_linear = nn.Linear(CHANNELS, CHANNELS)
        self.obj_ptr_tpos_proj = nn.Linear(CHANNELS, CHANNELS)
        self.maskmem_tpos_enc = nn.Parameter(torch.zeros(MEMORY_RANKS, 1, 1, CHANNELS))
        self.interactivity_no_mem_embed = nn.Parameter(torch.zeros(1, 1, CHANNELS))
        for name in ("no_obj_embed_spatial", "output_valid_embed", "output_invalid_embed"):
            self.register_parameter(name, nn.Parameter(torch.zeros(SLOTS, CHANNELS)))


class Sam31(nn.Module):
    """The detector, which is SAM 3's behind another neck, and the tracker.

    Attributes:
        float32_paths: Paths of the modules that stay float32 in half precision: SAM 3's, in both mask decoders.
    """

    float32_paths: ClassVar[tuple[str, ...]] = float32_paths(
        "detector.", "tracker.model.interactive_sam_mask_decoder", "tracker.model.sam_mask_decoder"
    )

    def __init__(self, detector: Any, attention_layers: int) -> None:
        """Takes SAM 3's image model, whose neck it replaces."""
        super().__init__()
        detector.backbone.vision_backbone = TriNeck(detector.backbone.vision_backbone)
        detector.backbone.scalp = 0  # every level is read
        self.detector = detector
        self.tracker = nn.ModuleDict({"model": MultiplexTracker(attention_layers)})

    @property
    def memory_encoder(self) -> Any:
        """Returns the encoder of memories."""
        return self.tracker["model"].maskmem_backbone
