"""Converts the tracker between upstream's layout and Transformers', whose `Sam3VideoModel` has it as `tracker_model`.

The names are those of Transformers' own `convert_sam3_video_to_hf.py`. Transformers also

- has the four embeddings of points in one table, a row for each,
- has the random frequencies of positions twice, in the prompt encoder and outside of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

UPSTREAM_PREFIX, HF_PREFIX = "inst_interactive_predictor.model.", "tracker_model."
"""Prefixes of every name of the tracker, in upstream's image model and in a file of `Sam3VideoModel`."""

_ENCODER, _PROMPTS = "sam_prompt_encoder", "prompt_encoder"
_DECODER, _MASKS = "sam_mask_decoder", "mask_decoder"
_ATTENTION, _MEMORY = "transformer.encoder", "memory_attention"
_BACKBONE, _MEMORIES = "maskmem_backbone", "memory_encoder"
_DOWNSAMPLER = f"{_MEMORIES}.mask_downsampler"

_POINTS = f"{_PROMPTS}.point_embed.weight"
_POINT_KINDS = 4
_FREQUENCIES = f"{_ENCODER}.pe_layer.positional_encoding_gaussian_matrix"
_HF_FREQUENCIES = f"{_PROMPTS}.shared_embedding.positional_embedding"
_SHARED_FREQUENCIES = "shared_image_embedding.positional_embedding"

_PROJECTIONS = (("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"), ("out_proj", "o_proj"))
_THREE_LAYERS = (("layers.0", "proj_in"), ("layers.1", "layers.0"), ("layers.2", "proj_out"))

# Upstream's module → Transformers'; `#` is the number of a layer. Their parameters (weight, bias) have the same names.
_MODULES: dict[str, str] = {
    "mask_downsample": "mask_downsample",
    "obj_ptr_tpos_proj": "temporal_positional_encoding_projection_layer",
    f"{_ENCODER}.not_a_point_embed": f"{_PROMPTS}.not_a_point_embed",
    f"{_ENCODER}.no_mask_embed": f"{_PROMPTS}.no_mask_embed",
    **{
        f"{_ENCODER}.mask_downscaling.{layer}": f"{_PROMPTS}.mask_embed.{hf_name}"
        for layer, hf_name in ((0, "conv1"), (1, "layer_norm1"), (3, "conv2"), (4, "layer_norm2"), (6, "conv3"))
    },
    **{
        f"{_DECODER}.{upstream}": f"{_MASKS}.{hf}"
        for upstream, hf in (
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
        f"{_DECODER}.transformer.{attention}.{upstream}": f"{_MASKS}.transformer.{attention}.{hf}"
        for attention in (
            "final_attn_token_to_image",
            "layers.#.self_attn",
            "layers.#.cross_attn_token_to_image",
            "layers.#.cross_attn_image_to_token",
        )
        for upstream, hf in _PROJECTIONS
    },
    **{
        f"{module}.{upstream}": f"{hf_name}.{hf}"
        for module, hf_name in (
            ("obj_ptr_proj", "object_pointer_proj"),
            (f"{_DECODER}.iou_prediction_head", f"{_MASKS}.iou_prediction_head"),
            (f"{_DECODER}.pred_obj_score_head", f"{_MASKS}.pred_obj_score_head"),
            (f"{_DECODER}.output_hypernetworks_mlps.#", f"{_MASKS}.output_hypernetworks_mlps.#"),
        )
        for upstream, hf in _THREE_LAYERS
    },
    f"{_ATTENTION}.norm": f"{_MEMORY}.layer_norm",
    **{
        f"{_ATTENTION}.layers.#.{upstream}": f"{_MEMORY}.layers.#.{hf}"
        for upstream, hf in (
            ("linear1", "linear1"),
            ("linear2", "linear2"),
            *((f"norm{n}", f"layer_norm{n}") for n in range(1, 4)),
            *((f"self_attn.{upstream_name}", f"self_attn.{hf_name}") for upstream_name, hf_name in _PROJECTIONS),
            *(
                (f"cross_attn_image.{upstream_name}", f"cross_attn_image.{hf_name}")
                for upstream_name, hf_name in _PROJECTIONS
            ),
        )
    },
    **{
        f"{_BACKBONE}.mask_downsampler.encoder.{3 * layer + place}": f"{_DOWNSAMPLER}.layers.{layer}.{hf_name}"
        for layer in range(4)
        for place, hf_name in enumerate(("conv", "layer_norm"))
    },
    f"{_BACKBONE}.mask_downsampler.encoder.12": f"{_DOWNSAMPLER}.final_conv",
    f"{_BACKBONE}.pix_feat_proj": f"{_MEMORIES}.feature_projection",
    f"{_BACKBONE}.out_proj": f"{_MEMORIES}.projection",
    **{
        f"{_BACKBONE}.fuser.layers.#.{upstream}": f"{_MEMORIES}.memory_fuser.layers.#.{hf}"
        for upstream, hf in (
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
    _FREQUENCIES: _HF_FREQUENCIES,
}


def hf_names() -> dict[str, str]:
    """Returns upstream's names → Transformers', both with their prefix, without the embeddings of points."""
    names = {f"{upstream}.{leaf}": f"{hf}.{leaf}" for upstream, hf in _MODULES.items() for leaf in ("weight", "bias")}
    return {f"{UPSTREAM_PREFIX}{upstream}": f"{HF_PREFIX}{hf}" for upstream, hf in (names | _PARAMETERS).items()}


_POINT = re.compile(rf"{re.escape(UPSTREAM_PREFIX + _ENCODER)}\.point_embeddings\.(\d)\.weight")


def is_point(name: str) -> bool:
    """Returns whether a name of upstream's is the name of an embedding of points."""
    return _POINT.fullmatch(name) is not None


def to_hugging_face_tables(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns Transformers' tensors that no renaming gives: the table of points and the copy of the frequencies."""
    import torch

    points = {int(match[1]): tensor for name, tensor in state.items() if (match := _POINT.fullmatch(name))}
    tables = {HF_PREFIX + _POINTS: torch.cat([points[kind] for kind in sorted(points)])} if points else {}
    frequencies = state.get(UPSTREAM_PREFIX + _FREQUENCIES)
    return tables if frequencies is None else tables | {HF_PREFIX + _SHARED_FREQUENCIES: frequencies}


def from_hugging_face_table(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Returns upstream's tensors of a tensor of `to_hugging_face_tables`, by name; None for any other tensor.

    A table with a wrong number of rows becomes one embedding, whose shape no model accepts.
    """
    if name == HF_PREFIX + _SHARED_FREQUENCIES:
        return {}
    if name != HF_PREFIX + _POINTS:
        return None
    if len(tensor) != _POINT_KINDS:
        return {f"{UPSTREAM_PREFIX}{_ENCODER}.point_embeddings.0.weight": tensor}
    return {
        f"{UPSTREAM_PREFIX}{_ENCODER}.point_embeddings.{kind}.weight": row for kind, row in enumerate(tensor.split(1))
    }
