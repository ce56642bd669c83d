"""Converts tensors between upstream's layout and Transformers' (`Sam3Model`, and `Sam3VideoModel` around it).

Both layouts have the same numbers under different names. Transformers

- splits every fused projection (`qkv`, `in_proj`) into `q_proj`, `k_proj`, `v_proj`, rows in upstream's order,
- drops the class token's row of the trunk's position embedding, and stores `text_projection` transposed,
- has no point prompts in its detector, hence no weights for them,
- has the SAM 2 neck (`tracker_neck`) and the tracker (`tracker_model`) next to the detector in the video model alone;
  `harness.models.sam3.hugging_face_tracker` has the tracker's names.

The rows of queries and keys are **not** permuted: Transformers (5.0, its first with SAM 3, to 5.23) rotates neighbours,
(0, 1), (2, 3), …, as upstream does, and not halves as its language models do; `test_transformers.py` shows it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from harness.models.sam3 import hugging_face_tracker

if TYPE_CHECKING:
    import torch

VIDEO_PREFIX = "detector_model."
"""Prefix of every name of the detector in a file of `Sam3VideoModel`, which is the published model."""

_COMPUTED = re.compile(r".*\.(position_ids|inv_freq|rope_embeddings(_cos|_sin)?)")
"""Tables that are formulas, which some versions save."""

POINTS = re.compile(r"geometry_encoder\.points_(direct|pool|pos_enc)_project\.(weight|bias)")
"""Parameters that the layout lacks, because its model takes no points (SAM 3.1's has them)."""

_TRUNK, _VIT = "backbone.vision_backbone.trunk", "vision_encoder.backbone"
_TEXT, _CLIP = "backbone.language_backbone.encoder", "text_encoder.text_model"
_DECODER, _DETR_DECODER = "transformer.decoder", "detr_decoder"
_HEAD, _MASKS = "segmentation_head", "mask_decoder"

# Upstream's module → Transformers'; `#` is the number of a layer. Their parameters (weight, bias) have the same names.
_MODULES: dict[str, str] = {
    f"{_TRUNK}.patch_embed.proj": f"{_VIT}.embeddings.patch_embeddings.projection",
    f"{_TRUNK}.ln_pre": f"{_VIT}.layer_norm",
    f"{_TRUNK}.blocks.#.norm1": f"{_VIT}.layers.#.layer_norm1",
    f"{_TRUNK}.blocks.#.norm2": f"{_VIT}.layers.#.layer_norm2",
    f"{_TRUNK}.blocks.#.mlp.fc1": f"{_VIT}.layers.#.mlp.fc1",
    f"{_TRUNK}.blocks.#.mlp.fc2": f"{_VIT}.layers.#.mlp.fc2",
    **{
        f"backbone.vision_backbone.{upstream}.{module}": f"{hf}.fpn_layers.{hf_part}"
        for upstream, hf in (("convs", "vision_encoder.neck"), ("sam2_convs", "tracker_neck"))
        for module, hf_part in (
            ("0.dconv_2x2_0", "0.scale_layers.0"),
            ("0.dconv_2x2_1", "0.scale_layers.2"),
            ("1.dconv_2x2", "1.scale_layers.0"),
            ("#.conv_1x1", "#.proj1"),
            ("#.conv_3x3", "#.proj2"),
        )
    },
    f"{_TEXT}.token_embedding": f"{_CLIP}.embeddings.token_embedding",
    f"{_TEXT}.transformer.resblocks.#.ln_1": f"{_CLIP}.encoder.layers.#.layer_norm1",
    f"{_TEXT}.transformer.resblocks.#.ln_2": f"{_CLIP}.encoder.layers.#.layer_norm2",
    f"{_TEXT}.transformer.resblocks.#.mlp.c_fc": f"{_CLIP}.encoder.layers.#.mlp.fc1",
    f"{_TEXT}.transformer.resblocks.#.mlp.c_proj": f"{_CLIP}.encoder.layers.#.mlp.fc2",
    f"{_TEXT}.ln_final": f"{_CLIP}.final_layer_norm",
    "backbone.language_backbone.resizer": "text_projection",
    "geometry_encoder.label_embed": "geometry_encoder.label_embed",
    "geometry_encoder.cls_embed": "geometry_encoder.cls_embed",
    "geometry_encoder.points_direct_project": "geometry_encoder.points_direct_project",
    "geometry_encoder.points_pool_project": "geometry_encoder.points_pool_project",
    "geometry_encoder.points_pos_enc_project": "geometry_encoder.points_pos_enc_project",
    "geometry_encoder.boxes_direct_project": "geometry_encoder.boxes_direct_project",
    "geometry_encoder.boxes_pool_project": "geometry_encoder.boxes_pool_project",
    "geometry_encoder.boxes_pos_enc_project": "geometry_encoder.boxes_pos_enc_project",
    "geometry_encoder.final_proj": "geometry_encoder.final_proj",
    "geometry_encoder.img_pre_norm": "geometry_encoder.vision_layer_norm",
    "geometry_encoder.norm": "geometry_encoder.prompt_layer_norm",
    "geometry_encoder.encode_norm": "geometry_encoder.output_layer_norm",
    **{
        f"{upstream}.#.{module}": f"{hf}.#.{hf_part}"
        for upstream, hf in (
            ("geometry_encoder.encode", "geometry_encoder.layers"),
            ("transformer.encoder.layers", "detr_encoder.layers"),
        )
        for module, hf_part in (
            ("linear1", "mlp.fc1"),
            ("linear2", "mlp.fc2"),
            ("norm1", "layer_norm1"),
            ("norm2", "layer_norm2"),
            ("norm3", "layer_norm3"),
        )
    },
    f"{_DECODER}.query_embed": f"{_DETR_DECODER}.query_embed",
    f"{_DECODER}.reference_points": f"{_DETR_DECODER}.reference_points",
    f"{_DECODER}.presence_token": f"{_DETR_DECODER}.presence_token",
    f"{_DECODER}.presence_token_out_norm": f"{_DETR_DECODER}.presence_layer_norm",
    f"{_DECODER}.norm": f"{_DETR_DECODER}.output_layer_norm",
    **{
        f"{_DECODER}.{module}.layers.{layer}": f"{_DETR_DECODER}.{hf_part}.layer{layer + 1}"
        for module, hf_part, layers in (
            ("bbox_embed", "box_head", 3),
            ("presence_token_head", "presence_head", 3),
            ("ref_point_head", "ref_point_head", 2),
            ("boxRPB_embed_x", "box_rpb_embed_x", 2),
            ("boxRPB_embed_y", "box_rpb_embed_y", 2),
        )
        for layer in range(layers)
    },
    f"{_DECODER}.layers.#.linear1": f"{_DETR_DECODER}.layers.#.mlp.fc1",
    f"{_DECODER}.layers.#.linear2": f"{_DETR_DECODER}.layers.#.mlp.fc2",
    f"{_DECODER}.layers.#.norm1": f"{_DETR_DECODER}.layers.#.vision_cross_attn_layer_norm",
    f"{_DECODER}.layers.#.norm2": f"{_DETR_DECODER}.layers.#.self_attn_layer_norm",
    f"{_DECODER}.layers.#.norm3": f"{_DETR_DECODER}.layers.#.mlp_layer_norm",
    f"{_DECODER}.layers.#.catext_norm": f"{_DETR_DECODER}.layers.#.text_cross_attn_layer_norm",
    "dot_prod_scoring.prompt_mlp.layers.0": "dot_product_scoring.text_mlp.layer1",
    "dot_prod_scoring.prompt_mlp.layers.1": "dot_product_scoring.text_mlp.layer2",
    "dot_prod_scoring.prompt_mlp.out_norm": "dot_product_scoring.text_mlp_out_norm",
    "dot_prod_scoring.prompt_proj": "dot_product_scoring.text_proj",
    "dot_prod_scoring.hs_proj": "dot_product_scoring.query_proj",
    f"{_HEAD}.pixel_decoder.conv_layers.#": f"{_MASKS}.pixel_decoder.conv_layers.#",
    f"{_HEAD}.pixel_decoder.norms.#": f"{_MASKS}.pixel_decoder.norms.#",
    f"{_HEAD}.mask_predictor.mask_embed.layers.#": f"{_MASKS}.mask_embedder.layers.#",
    f"{_HEAD}.instance_seg_head": f"{_MASKS}.instance_projection",
    f"{_HEAD}.semantic_seg_head": f"{_MASKS}.semantic_projection",
    f"{_HEAD}.cross_attn_norm": f"{_MASKS}.prompt_cross_attn_norm",
}

# Upstream's attention → Transformers', each with the name of its output projection.
_ATTENTION: tuple[tuple[str, str, str, str], ...] = (
    (f"{_TRUNK}.blocks.#.attn", "proj", f"{_VIT}.layers.#.attention", "o_proj"),
    (f"{_TEXT}.transformer.resblocks.#.attn", "out_proj", f"{_CLIP}.encoder.layers.#.self_attn", "out_proj"),
    ("geometry_encoder.encode.#.self_attn", "out_proj", "geometry_encoder.layers.#.self_attn", "o_proj"),
    ("geometry_encoder.encode.#.cross_attn_image", "out_proj", "geometry_encoder.layers.#.cross_attn", "o_proj"),
    ("transformer.encoder.layers.#.self_attn", "out_proj", "detr_encoder.layers.#.self_attn", "o_proj"),
    ("transformer.encoder.layers.#.cross_attn_image", "out_proj", "detr_encoder.layers.#.cross_attn", "o_proj"),
    (f"{_DECODER}.layers.#.self_attn", "out_proj", f"{_DETR_DECODER}.layers.#.self_attn", "o_proj"),
    (f"{_DECODER}.layers.#.ca_text", "out_proj", f"{_DETR_DECODER}.layers.#.text_cross_attn", "o_proj"),
    (f"{_DECODER}.layers.#.cross_attn", "out_proj", f"{_DETR_DECODER}.layers.#.vision_cross_attn", "o_proj"),
    (f"{_HEAD}.cross_attend_prompt", "out_proj", f"{_MASKS}.prompt_cross_attn", "o_proj"),
)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

_POSITIONS = (f"{_TRUNK}.pos_embed", f"{_VIT}.embeddings.position_embeddings")
_TEXT_PROJECTION = (f"{_TEXT}.text_projection", "text_encoder.text_projection.weight")


def _hf_names() -> dict[str, str]:
    names = {f"{o}.{leaf}": f"{t}.{leaf}" for o, t in _MODULES.items() for leaf in ("weight", "bias")}
    for module, projection, transformers_module, hf_projection in _ATTENTION:
        names |= {
            f"{module}.{projection}.{leaf}": f"{transformers_module}.{hf_projection}.{leaf}"
            for leaf in ("weight", "bias")
        }
    positional = {f"{_TEXT}.positional_embedding": f"{_CLIP}.embeddings.position_embedding.weight"}
    return names | positional | dict((_POSITIONS, _TEXT_PROJECTION)) | hugging_face_tracker.hf_names()


def _hf_parts() -> dict[str, tuple[str, str, str]]:
    names: dict[str, tuple[str, str, str]] = {}
    for upstream, _, hf, _ in _ATTENTION:
        for leaf in ("weight", "bias"):
            fused = f"{upstream}.qkv.{leaf}" if upstream.startswith(_TRUNK) else f"{upstream}.in_proj_{leaf}"
            names[fused] = (f"{hf}.q_proj.{leaf}", f"{hf}.k_proj.{leaf}", f"{hf}.v_proj.{leaf}")
    return names


_HF_NAMES: Mapping[str, str] = MappingProxyType(_hf_names())
_UPSTREAM_NAMES: Mapping[str, str] = MappingProxyType({hf: upstream for upstream, hf in _HF_NAMES.items()})
_HF_PARTS: Mapping[str, tuple[str, str, str]] = MappingProxyType(_hf_parts())
_UPSTREAM_FUSED: Mapping[str, str] = MappingProxyType(
    {part: upstream for upstream, parts in _HF_PARTS.items() for part in parts}
)


def is_hugging_face(names: Collection[str]) -> bool:
    """Returns whether names belong to Transformers' layout, by the first modules below its two encoders."""
    return any(
        name.removeprefix(VIDEO_PREFIX).startswith((f"{_VIT}.", "text_encoder.", "detr_encoder.")) for name in names
    )


def from_hugging_face(content: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts the tensors of a file in Transformers' layout to upstream's names and shapes.

    Formulas are left out. A tensor that the layout lacks keeps its name, and so does a part of an incomplete projection
    (queries without keys). Three parts of different shapes give the first part, whose shape no model accepts.
    """
    converted: dict[str, torch.Tensor] = {}
    fused: dict[str, dict[str, str]] = {}
    for key, tensor in content.items():
        name = key.removeprefix(VIDEO_PREFIX)
        if _COMPUTED.fullmatch(name):
            continue
        parts = hugging_face_tracker.from_hugging_face_table(name, tensor)
        if parts is not None:
            converted |= parts
            continue
        template, number = _with_placeholder(name, _UPSTREAM_NAMES, _UPSTREAM_FUSED)
        if template in _UPSTREAM_FUSED:
            fused.setdefault(_UPSTREAM_FUSED[template].replace("#", number), {})[name] = key
        elif template in _UPSTREAM_NAMES:
            upstream = _UPSTREAM_NAMES[template].replace("#", number)
            converted[upstream] = _to_upstream_shape(upstream, tensor)
        else:
            converted[key] = tensor
    for upstream, keys in fused.items():
        template, number = _with_placeholder(upstream, _HF_PARTS)
        names = [part.replace("#", number) for part in _HF_PARTS[template]]
        if len(keys) == len(names):
            converted[upstream] = _concatenate([content[keys[name]] for name in names])
        else:
            converted |= {key: content[key] for key in keys.values()}
    return converted


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(parts) if len({part.shape for part in parts}) == 1 else parts[0]


def _with_placeholder(name: str, *tables: Collection[str]) -> tuple[str, str]:
    """Returns the name as the tables have it, with `#` in place of the layer's number, and the number."""
    if any(name in table for table in tables):
        return name, ""
    number = _NUMBER.search(name)
    return (_NUMBER.sub("#", name, count=1), number.group()) if number else (name, "")


def _to_hf_shape(upstream: str, tensor: torch.Tensor) -> torch.Tensor:
    if upstream == _POSITIONS[0]:
        return tensor[:, 1:]
    return tensor.T if upstream == _TEXT_PROJECTION[0] else tensor


def _to_upstream_shape(upstream: str, tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if upstream == _POSITIONS[0] and tensor.ndim == 3:
        # Upstream cuts the class token's row off before it reads the others.
        return torch.cat([tensor.new_zeros(tensor.shape[0], 1, tensor.shape[2]), tensor], dim=1)
    return tensor.T if upstream == _TEXT_PROJECTION[0] and tensor.ndim == 2 else tensor


def to_hugging_face(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts the tensors of upstream's image model and tracker to Transformers' names and shapes.

    Tensors that the layout lacks are left out: formulas, `POINTS`, the class token's position.

    Raises:
        KeyError: A name is not a name of SAM 3's image model.
    """
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        template, number = _with_placeholder(name, _HF_NAMES, _HF_PARTS)
        if template in _HF_PARTS:
            parts = (part.replace("#", number) for part in _HF_PARTS[template])
            converted |= zip(parts, tensor.chunk(3), strict=True)
        elif template in _HF_NAMES:
            if not POINTS.fullmatch(name):
                converted[_HF_NAMES[template].replace("#", number)] = _to_hf_shape(name, tensor)
        elif not hugging_face_tracker.is_point(name) and not name.endswith(("freqs_cis", "attn_mask")):
            raise KeyError(name)
    return converted | hugging_face_tracker.to_hugging_face_tables(state)
