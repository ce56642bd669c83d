"""The tracker in the layout in which Transformers publishes SAM 3: what `Sam3VideoModel` calls `tracker_model`.

Names as Transformers' own `convert_sam3_video_to_hf.py` makes them. Besides other names, Transformers

- keeps the four embeddings of points in one table, a row each,
- has the random frequencies of positions twice, in the prompt encoder and beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OURS, THEIRS = "inst_interactive_predictor.model.", "tracker_model."
"""Before every name of the tracker, in upstream's image model and in a file of `Sam3VideoModel`."""

_ENCODER, _PROMPTS = "sam_prompt_encoder", "prompt_encoder"
_DECODER, _MASKS = "sam_mask_decoder", "mask_decoder"
_ATTENTION, _MEMORY = "transformer.encoder", "memory_attention"
_BACKBONE, _MEMORIES = "maskmem_backbone", "memory_encoder"
_DOWNSAMPLER = f"{_MEMORIES}.mask_downsampler"

_POINTS = f"{_PROMPTS}.point_embed.weight"
_KINDS_OF_POINTS = 4
_FREQUENCIES = f"{_ENCODER}.pe_layer.positional_encoding_gaussian_matrix"
_THEIR_FREQUENCIES = f"{_PROMPTS}.shared_embedding.positional_embedding"
_AGAIN = "shared_image_embedding.positional_embedding"

_PROJECTIONS = (("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"), ("out_proj", "o_proj"))
_THREE_LAYERS = (("layers.0", "proj_in"), ("layers.1", "layers.0"), ("layers.2", "proj_out"))

# Upstream's module → Transformers'; `#` is the number of a layer. What they hold (weight, bias) has the same name.
_SAME: dict[str, str] = {
    "mask_downsample": "mask_downsample",
    "obj_ptr_tpos_proj": "temporal_positional_encoding_projection_layer",
    f"{_ENCODER}.not_a_point_embed": f"{_PROMPTS}.not_a_point_embed",
    f"{_ENCODER}.no_mask_embed": f"{_PROMPTS}.no_mask_embed",
    **{
        f"{_ENCODER}.mask_downscaling.{layer}": f"{_PROMPTS}.mask_embed.{named}"
        for layer, named in ((0, "conv1"), (1, "layer_norm1"), (3, "conv2"), (4, "layer_norm2"), (6, "conv3"))
    },
    **{
        f"{_DECODER}.{ours}": f"{_MASKS}.{theirs}"
        for ours, theirs in (
            ("iou_token", "iou_token"),
            ("mask_tokens", "mask_tokens"),
            ("obj_score_token", "obj_score_token"),
            ("conv_s0", "conv_s0"),
            ("conv_s1", "conv_s1"),
            ("output_upscaling.0", "upscale_conv1"),
            ("output_upscaling.1", "upscale_layer_norm"),
            ("output_upscaling.3", "upscale_conv2"),
            ("transformer.norm_final_attn", "transformer.layer_norm_final_attn"),
            ("transformer.layers.#.mlp.lin1", "transformer.layers.#.mlp.proj_in"),
            ("transformer.layers.#.mlp.lin2", "transformer.layers.#.mlp.proj_out"),
            *((f"transformer.layers.#.norm{n}", f"transformer.layers.#.layer_norm{n}") for n in range(1, 5)),
        )
    },
    **{
        f"{_DECODER}.transformer.{attention}.{ours}": f"{_MASKS}.transformer.{attention}.{theirs}"
        for attention in (
            "final_attn_token_to_image",
            "layers.#.self_attn",
            "layers.#.cross_attn_token_to_image",
            "layers.#.cross_attn_image_to_token",
        )
        for ours, theirs in _PROJECTIONS
    },
    **{
        f"{module}.{ours}": f"{named}.{theirs}"
        for module, named in (
            ("obj_ptr_proj", "object_pointer_proj"),
            (f"{_DECODER}.iou_prediction_head", f"{_MASKS}.iou_prediction_head"),
            (f"{_DECODER}.pred_obj_score_head", f"{_MASKS}.pred_obj_score_head"),
            (f"{_DECODER}.output_hypernetworks_mlps.#", f"{_MASKS}.output_hypernetworks_mlps.#"),
        )
        for ours, theirs in _THREE_LAYERS
    },
    f"{_ATTENTION}.norm": f"{_MEMORY}.layer_norm",
    **{
        f"{_ATTENTION}.layers.#.{ours}": f"{_MEMORY}.layers.#.{theirs}"
        for ours, theirs in (
            ("linear1", "linear1"),
            ("linear2", "linear2"),
            *((f"norm{n}", f"layer_norm{n}") for n in range(1, 4)),
            *((f"self_attn.{one}", f"self_attn.{other}") for one, other in _PROJECTIONS),
            *((f"cross_attn_image.{one}", f"cross_attn_image.{other}") for one, other in _PROJECTIONS),
        )
    },
    **{
        f"{_BACKBONE}.mask_downsampler.encoder.{3 * layer + place}": f"{_DOWNSAMPLER}.layers.{layer}.{named}"
        for layer in range(4)
        for place, named in enumerate(("conv", "layer_norm"))
    },
    f"{_BACKBONE}.mask_downsampler.encoder.12": f"{_DOWNSAMPLER}.final_conv",
    f"{_BACKBONE}.pix_feat_proj": f"{_MEMORIES}.feature_projection",
    f"{_BACKBONE}.out_proj": f"{_MEMORIES}.projection",
    **{
        f"{_BACKBONE}.fuser.layers.#.{ours}": f"{_MEMORIES}.memory_fuser.layers.#.{theirs}"
        for ours, theirs in (
            ("dwconv", "depthwise_conv"),
            ("norm", "layer_norm"),
            ("pwconv1", "pointwise_conv1"),
            ("pwconv2", "pointwise_conv2"),
        )
    },
}

_PARAMETERS: dict[str, str] = {
    "maskmem_tpos_enc": "memory_temporal_positional_encoding",
    "no_mem_embed": "no_memory_embedding",
    "no_mem_pos_enc": "no_memory_positional_encoding",
    "no_obj_ptr": "no_object_pointer",
    "no_obj_embed_spatial": "occlusion_spatial_embedding_parameter",
    f"{_BACKBONE}.fuser.layers.#.gamma": f"{_MEMORIES}.memory_fuser.layers.#.scale",
    _FREQUENCIES: _THEIR_FREQUENCIES,
}


def renamed() -> dict[str, str]:
    """Upstream's names → Transformers', both with their prefix; all but the embeddings of points."""
    names = {f"{ours}.{leaf}": f"{theirs}.{leaf}" for ours, theirs in _SAME.items() for leaf in ("weight", "bias")}
    return {f"{OURS}{ours}": f"{THEIRS}{theirs}" for ours, theirs in (names | _PARAMETERS).items()}


_POINT = re.compile(rf"{re.escape(OURS + _ENCODER)}\.point_embeddings\.(\d)\.weight")


def is_point(name: str) -> bool:
    """Whether a name of upstream's is that of an embedding of points."""
    return _POINT.fullmatch(name) is not None


def together(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What Transformers has once and upstream not, or the other way round: points in one table, frequencies twice."""
    import torch

    points = {int(found[1]): tensor for name, tensor in state.items() if (found := _POINT.fullmatch(name))}
    joined = {THEIRS + _POINTS: torch.cat([points[kind] for kind in sorted(points)])} if points else {}
    frequencies = state.get(OURS + _FREQUENCIES)
    return joined if frequencies is None else joined | {THEIRS + _AGAIN: frequencies}


def apart(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Upstream's tensors of one of `together`, by name; None if the tensor is none of them.

    A table of another number of rows gives its first row as the whole table, whose shape nothing accepts.
    """
    if name == THEIRS + _AGAIN:
        return {}
    if name != THEIRS + _POINTS:
        return None
    if len(tensor) != _KINDS_OF_POINTS:
        return {f"{OURS}{_ENCODER}.point_embeddings.0.weight": tensor}
    return {f"{OURS}{_ENCODER}.point_embeddings.{kind}.weight": row for kind, row in enumerate(tensor.split(1))}
