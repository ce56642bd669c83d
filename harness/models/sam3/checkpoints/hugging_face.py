"""Converts tensors in Transformers' layout (`Sam3Model`, and `Sam3VideoModel` around it) to upstream's.

Both layouts have the same numbers under different names; the tracker's are those of Transformers' own
`convert_sam3_video_to_hf.py`. Transformers

- splits every fused projection (`qkv`, `in_proj`) into `q_proj`, `k_proj`, `v_proj`, rows in upstream's order,
- drops the class token's row of the trunk's position embedding, and stores `text_projection` transposed,
- has no point prompts in its detector, hence no weights for them,
- has the SAM 2 neck (`tracker_neck`) and the tracker (`tracker_model`) next to the detector in the video model alone,
- has the tracker's four embeddings of points in one table, a row for each, and the random frequencies of positions
  twice, in the prompt encoder and outside of it.

The rows of queries and keys are **not** permuted: Transformers (5.0, its first with SAM 3, to 5.23) rotates neighbours,
(0, 1), (2, 3), …, as upstream does, and not halves as its language models do; `test_transformers.py` shows it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VIDEO_PREFIX = "detector_model."
"""Prefix of every name of the detector in a file of `Sam3VideoModel`, which is the published model."""

_FORMULAS = re.compile(r".*\.(position_ids|inv_freq|rope_embeddings(_cos|_sin)?)")
"""Tables that are formulas, which some versions save."""

POINTS = re.compile(r"geometry_encoder\.points_(direct|pool|pos_enc)_project\.(weight|bias)")
"""Parameters that the layout lacks, because its model takes no points (SAM 3.1's has them)."""

_TRUNK, _VIT = "backbone.vision_backbone.trunk", "vision_encoder.backbone"
_TEXT, _CLIP = "backbone.language_backbone.encoder", "text_encoder.text_model"
_DECODER, _DETR_DECODER = "transformer.decoder", "detr_decoder"
_HEAD, _MASKS = "segmentation_head", "mask_decoder"
_TRACKER, _HF_TRACKER = "inst_interactive_predictor.model", "tracker_model"
_PROMPTS, _HF_PROMPTS = f"{_TRACKER}.sam_prompt_encoder", f"{_HF_TRACKER}.prompt_encoder"
_CLICKS, _HF_CLICKS = f"{_TRACKER}.sam_mask_decoder", f"{_HF_TRACKER}.mask_decoder"
_BACKBONE, _MEMORIES = f"{_TRACKER}.maskmem_backbone", f"{_HF_TRACKER}.memory_encoder"
_DOWNSAMPLER, _HF_DOWNSAMPLER = f"{_BACKBONE}.mask_downsampler.encoder", f"{_MEMORIES}.mask_downsampler"


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _norms(count: int) -> dict[str, str]:
    return {f"norm{number}": f"layer_norm{number}" for number in range(1, count + 1)}


def _layers(upstream: str, hf: str, count: int) -> dict[str, str]:
    return {f"{upstream}.layers.{number}": f"{hf}.layer{number + 1}" for number in range(count)}


_NECK = {
    "0.dconv_2x2_0": "0.scale_layers.0",
    "0.dconv_2x2_1": "0.scale_layers.2",
    "1.dconv_2x2": "1.scale_layers.0",
    "#.conv_1x1": "#.proj1",
    "#.conv_3x3": "#.proj2",
}
_FEED_FORWARD = {"linear1": "mlp.fc1", "linear2": "mlp.fc2"}
_PROJECTIONS = _same("q_proj", "k_proj", "v_proj") | {"out_proj": "o_proj"}
_THREE_LAYERS = {"layers.0": "proj_in", "layers.1": "layers.0", "layers.2": "proj_out"}

_MODULES: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (_TRUNK, _VIT, {"patch_embed.proj": "embeddings.patch_embeddings.projection", "ln_pre": "layer_norm"}),
    (f"{_TRUNK}.blocks.#", f"{_VIT}.layers.#", _norms(2) | _same("mlp.fc1", "mlp.fc2")),
    ("backbone.vision_backbone.convs", "vision_encoder.neck.fpn_layers", _NECK),
    ("backbone.vision_backbone.sam2_convs", "tracker_neck.fpn_layers", _NECK),
    (_TEXT, _CLIP, {"token_embedding": "embeddings.token_embedding", "ln_final": "final_layer_norm"}),
    (
        f"{_TEXT}.transformer.resblocks.#",
        f"{_CLIP}.encoder.layers.#",
        {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"},
    ),
    ("backbone.language_backbone", "", {"resizer": "text_projection"}),
    (
        "geometry_encoder",
        "geometry_encoder",
        _same("label_embed", "cls_embed", "final_proj")
        | _same(*(f"{kind}_{name}_project" for kind in ("points", "boxes") for name in ("direct", "pool", "pos_enc")))
        | {"img_pre_norm": "vision_layer_norm", "norm": "prompt_layer_norm", "encode_norm": "output_layer_norm"},
    ),
    ("geometry_encoder.encode.#", "geometry_encoder.layers.#", _FEED_FORWARD | _norms(3)),
    ("transformer.encoder.layers.#", "detr_encoder.layers.#", _FEED_FORWARD | _norms(3)),
    (
        _DECODER,
        _DETR_DECODER,
        _same("query_embed", "reference_points", "presence_token")
        | {"presence_token_out_norm": "presence_layer_norm", "norm": "output_layer_norm"}
        | _layers("bbox_embed", "box_head", 3)
        | _layers("presence_token_head", "presence_head", 3)
        | _layers("ref_point_head", "ref_point_head", 2)
        | _layers("boxRPB_embed_x", "box_rpb_embed_x", 2)
        | _layers("boxRPB_embed_y", "box_rpb_embed_y", 2),
    ),
    (
        f"{_DECODER}.layers.#",
        f"{_DETR_DECODER}.layers.#",
        _FEED_FORWARD
        | {"norm1": "vision_cross_attn_layer_norm", "norm2": "self_attn_layer_norm", "norm3": "mlp_layer_norm"}
        | {"catext_norm": "text_cross_attn_layer_norm"},
    ),
    (
        "dot_prod_scoring",
        "dot_product_scoring",
        _layers("prompt_mlp", "text_mlp", 2)
        | {"prompt_mlp.out_norm": "text_mlp_out_norm", "prompt_proj": "text_proj", "hs_proj": "query_proj"},
    ),
    (
        _HEAD,
        _MASKS,
        _same("pixel_decoder.conv_layers.#", "pixel_decoder.norms.#")
        | {"mask_predictor.mask_embed.layers.#": "mask_embedder.layers.#", "cross_attn_norm": "prompt_cross_attn_norm"}
        | {"instance_seg_head": "instance_projection", "semantic_seg_head": "semantic_projection"},
    ),
    (
        _TRACKER,
        _HF_TRACKER,
        {"mask_downsample": "mask_downsample", "obj_ptr_tpos_proj": "temporal_positional_encoding_projection_layer"},
    ),
    (_PROMPTS, _HF_PROMPTS, _same("not_a_point_embed", "no_mask_embed")),
    (
        f"{_PROMPTS}.mask_downscaling",
        f"{_HF_PROMPTS}.mask_embed",
        {"0": "conv1", "1": "layer_norm1", "3": "conv2", "4": "layer_norm2", "6": "conv3"},
    ),
    (
        _CLICKS,
        _HF_CLICKS,
        _same("iou_token", "mask_tokens", "obj_score_token", "conv_s0", "conv_s1")
        | {"output_upscaling.0": "upscale_conv1", "output_upscaling.1": "upscale_layer_norm"}
        | {"output_upscaling.3": "upscale_conv2", "transformer.norm_final_attn": "transformer.layer_norm_final_attn"},
    ),
    (
        f"{_CLICKS}.transformer.layers.#",
        f"{_HF_CLICKS}.transformer.layers.#",
        _norms(4) | {"mlp.lin1": "mlp.proj_in", "mlp.lin2": "mlp.proj_out"},
    ),
    *(
        (f"{_CLICKS}.transformer.{attention}", f"{_HF_CLICKS}.transformer.{attention}", _PROJECTIONS)
        for attention in (
            "final_attn_token_to_image",
            "layers.#.self_attn",
            "layers.#.cross_attn_token_to_image",
            "layers.#.cross_attn_image_to_token",
        )
    ),
    (f"{_TRACKER}.obj_ptr_proj", f"{_HF_TRACKER}.object_pointer_proj", _THREE_LAYERS),
    *(
        (f"{_CLICKS}.{head}", f"{_HF_CLICKS}.{head}", _THREE_LAYERS)
        for head in ("iou_prediction_head", "pred_obj_score_head", "output_hypernetworks_mlps.#")
    ),
    (f"{_TRACKER}.transformer.encoder", f"{_HF_TRACKER}.memory_attention", {"norm": "layer_norm"}),
    *(
        (f"{_TRACKER}.transformer.encoder.layers.#{part}", f"{_HF_TRACKER}.memory_attention.layers.#{part}", names)
        for part, names in (
            ("", _same("linear1", "linear2") | _norms(3)),
            (".self_attn", _PROJECTIONS),
            (".cross_attn_image", _PROJECTIONS),
        )
    ),
    *(
        (_DOWNSAMPLER, _HF_DOWNSAMPLER, {f"{3 * n}": f"layers.{n}.conv", f"{3 * n + 1}": f"layers.{n}.layer_norm"})
        for n in range(4)
    ),
    (_DOWNSAMPLER, _HF_DOWNSAMPLER, {"12": "final_conv"}),
    (_BACKBONE, _MEMORIES, {"pix_feat_proj": "feature_projection", "out_proj": "projection"}),
    (
        f"{_BACKBONE}.fuser.layers.#",
        f"{_MEMORIES}.memory_fuser.layers.#",
        {"dwconv": "depthwise_conv", "norm": "layer_norm", "pwconv1": "pointwise_conv1", "pwconv2": "pointwise_conv2"},
    ),
)
"""Prefixes of upstream's and Transformers' modules, and names after them; `#` is the number of a layer.

Their parameters (weight, bias) have the same names.
"""

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
"""Upstream's fused attention and Transformers', each with the name of its output projection."""

_POSITIONS, _TEXT_PROJECTION = f"{_TRUNK}.pos_embed", f"{_TEXT}.text_projection"
_FREQUENCIES = f"{_PROMPTS}.pe_layer.positional_encoding_gaussian_matrix"
_PARAMETERS = {
    _POSITIONS: f"{_VIT}.embeddings.position_embeddings",
    _TEXT_PROJECTION: "text_encoder.text_projection.weight",
    f"{_TEXT}.positional_embedding": f"{_CLIP}.embeddings.position_embedding.weight",
    f"{_TRACKER}.maskmem_tpos_enc": f"{_HF_TRACKER}.memory_temporal_positional_encoding",
    f"{_TRACKER}.no_mem_embed": f"{_HF_TRACKER}.no_memory_embedding",
    f"{_TRACKER}.no_mem_pos_enc": f"{_HF_TRACKER}.no_memory_positional_encoding",
    f"{_TRACKER}.no_obj_ptr": f"{_HF_TRACKER}.no_object_pointer",
    f"{_TRACKER}.no_obj_embed_spatial": f"{_HF_TRACKER}.occlusion_spatial_embedding_parameter",
    f"{_BACKBONE}.fuser.layers.#.gamma": f"{_MEMORIES}.memory_fuser.layers.#.scale",
    _FREQUENCIES: f"{_HF_PROMPTS}.shared_embedding.positional_embedding",
}

_SHARED_FREQUENCIES = f"{_HF_TRACKER}.shared_image_embedding.positional_embedding"
"""The copy of the frequencies outside of the prompt encoder."""
_POINT_TABLE = f"{_HF_PROMPTS}.point_embed.weight"
_POINT_KINDS = 4
_POINT = re.compile(rf"{re.escape(_PROMPTS)}\.point_embeddings\.(\d)\.weight")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _hf_names() -> dict[str, str]:
    pairs = {f"{module}.{name}": f"{hf}.{names[name]}" for module, hf, names in _MODULES for name in names}
    pairs |= {f"{module}.{name}": f"{hf}.{hf_name}" for module, name, hf, hf_name in _ATTENTION}
    leaves = {f"{name}.{leaf}": f"{hf}.{leaf}".lstrip(".") for name, hf in pairs.items() for leaf in ("weight", "bias")}
    return leaves | _PARAMETERS


def _hf_parts() -> dict[str, tuple[str, ...]]:
    fused = ((f"{name}.qkv." if name.startswith(_TRUNK) else f"{name}.in_proj_", hf) for name, _, hf, _ in _ATTENTION)
    return {
        f"{name}{leaf}": tuple(f"{hf}.{part}_proj.{leaf}" for part in "qkv")
        for name, hf in fused
        for leaf in ("weight", "bias")
    }


_HF_NAMES = _hf_names()
_UPSTREAM_NAMES = {hf: upstream for upstream, hf in _HF_NAMES.items()}
_HF_PARTS = _hf_parts()
_UPSTREAM_FUSED = {part: upstream for upstream, parts in _HF_PARTS.items() for part in parts}


def is_hugging_face(names: Collection[str]) -> bool:
    """Returns whether names belong to Transformers' layout, by the first modules below its two encoders."""
    return any(
        name.removeprefix(VIDEO_PREFIX).startswith((f"{_VIT}.", "text_encoder.", "detr_encoder.")) for name in names
    )


def is_upstream(name: str) -> bool:
    """Returns whether upstream's image model or tracker, of any number of layers, has a tensor of this name."""
    template, _ = _with_placeholder(name, _HF_NAMES, _HF_PARTS)
    return template in _HF_NAMES or template in _HF_PARTS or _POINT.fullmatch(name) is not None


def has_hugging_face_name(key: str) -> bool:
    """Returns whether Transformers' image or video model, of any number of layers, has a tensor of this name."""
    name = key.removeprefix(VIDEO_PREFIX)
    template, _ = _with_placeholder(name, _UPSTREAM_NAMES, _UPSTREAM_FUSED)
    return template in _UPSTREAM_NAMES or template in _UPSTREAM_FUSED or name == _POINT_TABLE


def is_repeated(key: str, content: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether a tensor of Transformers' layout says nothing new: a formula, or the copy of the frequencies."""
    import torch

    if key == _SHARED_FREQUENCIES:
        frequencies = content.get(_PARAMETERS[_FREQUENCIES])
        return frequencies is not None and torch.equal(frequencies, content[key])
    return _FORMULAS.fullmatch(key.removeprefix(VIDEO_PREFIX)) is not None


def from_hugging_face(content: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts the tensors of a file in Transformers' layout to upstream's names and shapes.

    Formulas and copies are left out. A tensor that the layout lacks keeps its name, and so does a part of an incomplete
    projection (queries without keys). Three parts of different shapes give an empty tensor, and a table of
    points with a wrong number of rows gives one embedding, whose shapes no model accepts.
    """
    converted: dict[str, torch.Tensor] = {}
    fused: dict[str, dict[str, str]] = {}
    for key, tensor in content.items():
        name = key.removeprefix(VIDEO_PREFIX)
        if is_repeated(key, content):
            continue
        template, number = _with_placeholder(name, _UPSTREAM_NAMES, _UPSTREAM_FUSED)
        if name == _POINT_TABLE:
            rows = tensor.split(1) if tensor.shape[:1] == (_POINT_KINDS,) else (tensor,)
            converted |= {f"{_PROMPTS}.point_embeddings.{kind}.weight": row for kind, row in enumerate(rows)}
        elif template in _UPSTREAM_FUSED:
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

    if len({(part.shape, part.is_floating_point()) for part in parts}) > 1 or not parts[0].ndim:
        return parts[0].new_empty(0)
    is_mixed = parts[0].is_floating_point() and len({part.dtype for part in parts}) > 1
    return torch.cat([part.float() for part in parts] if is_mixed else parts)


def _with_placeholder(name: str, *tables: Collection[str]) -> tuple[str, str]:
    """Returns the name as the tables have it, with `#` in place of the layer's number, and the number."""
    if any(name in table for table in tables):
        return name, ""
    number = _NUMBER.search(name)
    return (_NUMBER.sub("#", name, count=1), number.group()) if number else (name, "")


def _to_upstream_shape(upstream: str, tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if upstream == _POSITIONS and tensor.ndim == 3:
        # Upstream cuts the class token's row off before it reads the others.
        return torch.cat([tensor.new_zeros(tensor.shape[0], 1, tensor.shape[2]), tensor], dim=1)
    return tensor.T if upstream == _TEXT_PROJECTION and tensor.ndim == 2 else tensor
