"""Runs the SAM 3.1 of mlx-vlm, which nobody here wrote, on given weights and inputs; it needs no PyTorch.

    python -m conformance.support.mlx_sam31 WEIGHTS INPUTS OUTPUTS

WEIGHTS (safetensors) have the names of the published checkpoint, INPUTS and OUTPUTS (npz) are described by
`conformance.support.sam31_truth`. The dense positions of the mask decoders are an input: mlx-vlm's differ from Meta's
by half a cell of the grid.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from types import ModuleType

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.sam3_1.config import TrackerConfig, VisionEncoderConfig
from mlx_vlm.models.sam3_1.multiplex import MultiplexController, MultiplexTrackerState
from mlx_vlm.models.sam3_1.tracker import MultiplexTrackerModel
from mlx_vlm.models.sam3_1.vision import TriViTDetNeck
from safetensors.numpy import load_file

HEADS = (
    (r"(.*sam_mask_decoder\.transformer\..*)\.norm(\d)\.", r"\1.layer_norm\2."),
    (r"(.*sam_mask_decoder\.transformer)\.norm_final_attn\.", r"\1.layer_norm_final_attn."),
    (r"(.*sam_mask_decoder\.transformer\..*)\.out_proj\.", r"\1.o_proj."),
    (r"(.*sam_mask_decoder\.transformer\..*)\.mlp\.lin1\.", r"\1.mlp.proj_in."),
    (r"(.*sam_mask_decoder\.transformer\..*)\.mlp\.lin2\.", r"\1.mlp.proj_out."),
    (r"(.*sam_mask_decoder)\.output_upscaling\.0\.", r"\1.upscale_conv1."),
    (r"(.*sam_mask_decoder)\.output_upscaling\.1\.", r"\1.upscale_layer_norm."),
    (r"(.*sam_mask_decoder)\.output_upscaling\.3\.", r"\1.upscale_conv2."),
    (r"(.*sam_mask_decoder\.(output_hypernetworks_mlps\.\d|\w+_head))\.layers\.0\.", r"\1.proj_in."),
    (r"(.*sam_mask_decoder\.(output_hypernetworks_mlps\.\d|\w+_head))\.layers\.1\.", r"\1.layers.0."),
    (r"(.*sam_mask_decoder\.(output_hypernetworks_mlps\.\d|\w+_head))\.layers\.2\.", r"\1.proj_out."),
    (r"(.*prompt_encoder)\.mask_downscaling\.0\.", r"\1.mask_embed.conv1."),
    (r"(.*prompt_encoder)\.mask_downscaling\.1\.", r"\1.mask_embed.layer_norm1."),
    (r"(.*prompt_encoder)\.mask_downscaling\.3\.", r"\1.mask_embed.conv2."),
    (r"(.*prompt_encoder)\.mask_downscaling\.4\.", r"\1.mask_embed.layer_norm2."),
    (r"(.*prompt_encoder)\.mask_downscaling\.6\.", r"\1.mask_embed.conv3."),
    (r"(.*prompt_encoder)\.pe_layer\.positional_encoding_gaussian_matrix", r"\1.shared_embedding.positional_embedding"),
    (r"(.*image_pe_layer)\.positional_encoding_gaussian_matrix", r"\1.positional_embedding"),
)
"""Names that mlx-vlm's converter leaves as they are, and its modules do not have → the modules' names."""

TRANSPOSED = re.compile(r".*\.(dconv_2x2\w*|output_upscaling\.\d)\.weight")
"""Transposed convolutions, by their published names."""


def converted(weights: dict[str, np.ndarray]) -> dict[str, dict[str, mx.array]]:
    """Returns the parameters of mlx-vlm's tracker and neck."""
    if find_spec("torch") is None:
        sys.modules["torch"] = ModuleType("torch")  # the converter imports it, and calls nothing of it here
    from mlx_vlm.models.sam3_1.convert_weights import convert_key

    parts: dict[str, dict[str, mx.array]] = {"tracker_model": {}, "detector_model.vision_encoder.neck": {}}
    points = {}
    for published, value in weights.items():
        name, _ = convert_key(published)
        assert name is not None, published
        for pattern, replacement in HEADS:
            name = re.sub(f"^{pattern}", replacement, name)
        if value.ndim == 4 and "tpos_enc" not in published:
            value = value.transpose((1, 2, 3, 0) if TRANSPOSED.fullmatch(published) else (0, 2, 3, 1))
        if "point_embeddings." in name:
            points[name] = value
            continue
        part = next(part for part in parts if name.startswith(f"{part}."))
        parts[part][name.removeprefix(f"{part}.")] = mx.array(value)
    tracker = parts["tracker_model"]
    embedding = "interactive_sam_prompt_encoder.point_embed.weight"
    tracker[embedding] = mx.array(np.concatenate([points[name] for name in sorted(points)]))
    # It is not read.
    tracker["shared_image_embedding.positional_embedding"] = tracker["image_pe_layer.positional_embedding"]
    return parts


class Truth:
    """mlx-vlm's modules, with each of the questions that `conformance.support.sam31_truth` asks ours."""

    def __init__(self, weights: dict[str, np.ndarray], grid: int) -> None:
        parts = converted(weights)
        self.tracker = MultiplexTrackerModel(TrackerConfig(memory_attention_rope_feat_sizes=[grid, grid]))
        self.neck = TriViTDetNeck(VisionEncoderConfig())
        self.tracker.load_weights(list(parts["tracker_model"].items()), strict=True)
        self.neck.load_weights(list(parts["detector_model.vision_encoder.neck"].items()), strict=True)
        assert len(tree_flatten(self.tracker.parameters())) == len(parts["tracker_model"])

    def tri_neck(self, trunk: mx.array) -> dict[str, mx.array]:
        detector, interactive, propagation = self.neck(last(trunk))
        prepared = self.tracker.prepare_frame_features(interactive, propagation)
        side = prepared["interactive"]["vision_feat"].shape[1]
        image = self.tracker._get_interactive_pix_mem(prepared["interactive"]["vision_feat"])
        clicks = [*prepared["interactive"]["high_res"], image.reshape(1, side, side, -1)]
        tracked = [*prepared["propagation"]["high_res"], prepared["propagation"]["vision_feat"]]
        maps = [*detector, *clicks, *tracked]
        return {str(number): first(level) for number, level in enumerate(maps)}

    def click_prompt_encoder(self, points: mx.array, labels: mx.array, masks: mx.array) -> dict[str, mx.array]:
        """Points are in pixels, and arrive as Meta's encoder takes them, with a last one of padding.

        mlx-vlm adds half a cell of the grid where Meta's code adds half a pixel.
        """
        points = mx.concatenate([points, mx.zeros_like(points[:, :1])], axis=1)
        labels = mx.concatenate([labels, -mx.ones_like(labels[:, :1])], axis=1)
        side = self.tracker.interactive_sam_prompt_encoder.image_embedding_size[0]
        cells = (points + 0.5) * side / self.tracker.config.image_size - 0.5
        sparse, dense = self.tracker.interactive_sam_prompt_encoder(points=(cells, labels), masks=last(masks))
        return {"sparse": sparse, "dense": grid_of(dense)}

    def click_mask_decoder(
        self,
        image_embed: mx.array,
        high_res_0: mx.array,
        high_res_1: mx.array,
        sparse: mx.array,
        dense: mx.array,
        positions: mx.array,
    ) -> dict[str, mx.array]:
        decoded = self.tracker.interactive_sam_mask_decoder.predict_masks(
            image_embeddings=tokens_of(image_embed),
            image_pe=tokens_of(positions),
            high_res_features=[last(high_res_0), last(high_res_1)],
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=tokens_of(dense),
        )
        pointers = self.tracker.interactive_obj_ptr_proj(decoded["mask_tokens_out"][:, 0])
        object_logits = decoded["object_score_logits"][:, 0]
        return {
            "masks": decoded["masks"][:, 0],
            "ious": decoded["iou_pred"][:, 0],
            "object_logits": object_logits,
            "pointers": self.tracker._apply_no_obj_ptr(pointers, (object_logits > 0)[:, None]),
        }

    def click_mask_pointer(
        self,
        image_embed: mx.array,
        high_res_0: mx.array,
        high_res_1: mx.array,
        masks: mx.array,
        positions: mx.array,
    ) -> dict[str, mx.array]:
        self.tracker.interactive_sam_prompt_encoder.get_dense_pe = lambda: tokens_of(positions)
        out = self.tracker._use_mask_as_output(
            tokens_of(image_embed), [last(high_res_0), last(high_res_1)], masks, buckets_of(len(masks))
        )
        return {"pointers": out["obj_ptr"], "object_logits": out["object_score_logits"]}

    def multiplex_mask_decoder(
        self, conditioned: mx.array, high_res_0: mx.array, high_res_1: mx.array, objects: mx.array, positions: mx.array
    ) -> dict[str, mx.array]:
        self.tracker.get_propagation_dense_pe = lambda: tokens_of(positions)
        out = self.tracker._forward_sam_heads(
            tokens_of(conditioned),
            propagation_high_res_features=[last(high_res_0), last(high_res_1)],
            multimask_output=True,
            multiplex_state=buckets_of(objects.item()),
        )
        names = {"masks": "low_res_multimasks", "ious": "ious", "object_logits": "object_score_logits"}
        return {name: out[key] for name, key in names.items()} | {"pointers": out["obj_ptr"]}

    def multiplex_memory_encoder(
        self, features: mx.array, masks: mx.array, object_logits: mx.array, conditioning: mx.array
    ) -> dict[str, mx.array]:
        memory, _ = self.tracker._encode_new_memory(
            current_vision_feat=last(features),
            pred_masks_high_res=masks,
            object_score_logits=object_logits,
            conditioning_objects=set(conditioning.tolist()),
            multiplex_state=buckets_of(len(masks)),
        )
        return {"memory": first(memory)}

    def multiplex_memory_attention(
        self,
        features: mx.array,
        memory_features: mx.array,
        memories: mx.array,
        pointers: mx.array,
        objects: mx.array,
        frames: mx.array,
    ) -> dict[str, mx.array]:
        """Takes the frame's number and those of the memories; the first memory has a conditioning frame."""
        position = self.tracker._pos_enc(last(features))
        outputs = [
            {
                "maskmem_features": last(memory),
                "maskmem_pos_enc": mx.broadcast_to(position, last(memory).shape),
                "image_features": last(frame[None]),
                "image_pos_enc": position,
                "obj_ptr": pointer,
            }
            for frame, memory, pointer in zip(memory_features, memories, pointers, strict=True)
        ]
        now, conditioning, *tracked = frames.tolist()
        conditioned = self.tracker._prepare_memory_conditioned_features(
            frame_idx=now,
            current_vision_feat=last(features),
            current_vision_pos=position,
            output_dict={
                "cond_frame_outputs": {conditioning: outputs[0]},
                "non_cond_frame_outputs": dict(zip(tracked, outputs[1:], strict=True)),
            },
            num_frames=now + 1,
            multiplex_state=buckets_of(objects.item()),
        )
        return {"conditioned": first(conditioned)}


def last(tensor: mx.array) -> mx.array:
    """Returns maps [B, C, H, W] with channels last, which is MLX's layout."""
    return tensor.transpose(0, 2, 3, 1)


def first(tensor: mx.array) -> mx.array:
    return tensor.transpose(0, 3, 1, 2)


def tokens_of(tensor: mx.array) -> mx.array:
    """Returns maps [B, C, H, W] as tokens [B, H·W, C]."""
    return last(tensor).reshape(len(tensor), -1, tensor.shape[1])


def grid_of(tokens: mx.array) -> mx.array:
    side = round(tokens.shape[1] ** 0.5)
    return first(tokens.reshape(len(tokens), side, side, -1))


def buckets_of(objects: int) -> MultiplexTrackerState:
    return MultiplexController(16).get_state(objects)


def main(weights: str, inputs: str, outputs: str) -> None:
    arrays = np.load(inputs)
    truth = Truth(load_file(weights), int(arrays["grid"]))
    asked: dict[str, dict[str, mx.array]] = {}
    for path in arrays.files:
        module, _, name = path.partition("/")
        if name:
            asked.setdefault(module, {})[name] = mx.array(arrays[path])
    answers: dict[str, np.ndarray] = {}
    for module, arguments in asked.items():
        for name, value in getattr(truth, module)(**arguments).items():
            answers[f"{module}/{name}"] = np.array(value)
    np.savez(outputs, **answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
