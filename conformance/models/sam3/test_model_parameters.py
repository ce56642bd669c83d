"""Every parameter matters: corrupting any one changes some output by more than the strict gate would forgive.

Each parameter is corrupted by 1 % of its own size, and the part of the model that reads it runs again on what reaches
that part when the model looks at the photograph. The image parts run on a crop of it, because they treat all positions
alike: the trunk on one window, the others on 16x16 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.support.shallow import captured, interactive_model, photograph
from harness.models.sam3.capture import capture, load_inputs
from harness.models.sam3.captures import CLICKS, PROPAGATION
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.components.tracker_modules import (
    MaskDecoder,
    MemoryAttention,
    MemoryEncoder,
    PromptEncoder,
    TrackingFeatures,
    tracker_of,
)
from harness.models.sam3.patches.patch import replaced
from harness.models.sam3.upstream import upstream

UNREAD_PARAMETERS = {
    r"backbone\.language_backbone\.encoder\.text_projection": (
        "projects the pooled text, which VETextEncoder.forward discards"
    ),
    r"segmentation_head\.pixel_decoder\.(conv_layers|norms)\.2\..*": (
        "the third of three upsampling stages; with three feature maps PixelDecoder.forward needs two"
    ),
    r"inst_interactive_predictor\.model\.no_mem_pos_enc": (
        "stands in Sam3TrackerBase._prepare_memory_conditioned_features after the return of its branch"
    ),
}
"""Pattern of the whole name → why upstream never reads the parameter, neither for an image nor for a video."""

INVARIANT_PARAMETERS = {
    r"transformer\.decoder\.boxRPB_embed_[xy]\.layers\.1\.bias": (
        "read, but adds one number per head to all attention logits of a row, and softmax ignores such a shift"
    ),
    r"inst_interactive_predictor\.model\.sam_mask_decoder\.transformer\..*\.k_proj\.bias": (
        "read, but adds one number per head to all attention logits of a row, and softmax ignores such a shift"
    ),
}
"""Pattern of the whole name → why the parameter is read and still has no effect on any output."""

CROP = 16
"""Height and width of a crop of the 72x72 grid of tokens."""
START = (72 - CROP) // 2


def cropped(tokens: Tensor) -> Tensor:
    """[5184, B, C] to the [CROP², B, C] in the middle of the grid."""
    grid = tokens.unflatten(0, (72, 72))[START : START + CROP, START : START + CROP]
    return grid.flatten(0, 1)


@contextmanager
def one_window() -> Iterator[Any]:
    """The trunk for a grid of one 24x24 window: the global block borrows the RoPE table of the windowed one."""
    trunk = interactive_model().backbone.vision_backbone.trunk
    windowed, global_ = (block.attn for block in trunk.blocks)
    with replaced(global_, "_buffers", {**global_._buffers, "freqs_cis": windowed.freqs_cis}):
        yield trunk


def run_trunk(name: str) -> tuple[Tensor, ...]:
    start = 14 * 24
    with one_window() as trunk:
        return tuple(trunk(photograph().image[..., start : 2 * start, start : 2 * start]))


@cache
def trunk_features() -> Tensor:
    """The trunk's feature map of the window in the middle of the photograph: [1, 1024, 24, 24]."""
    return run_trunk("")[-1][..., :CROP, :CROP]


def run_neck(name: str) -> tuple[Tensor, ...]:
    match = re.match(r"backbone\.vision_backbone\.(sam2_convs|convs)\.(\d)\.", name)
    assert match
    return (interactive_model().get_submodule(match[0].rstrip("."))(trunk_features()),)


def run_component(component: str) -> tuple[Tensor, ...]:
    """A component on its main captured sample."""
    definition = COMPONENTS[component]
    sample = next(iter(definition.samples(captured(definition.captured_by)).values()))
    result: tuple[Tensor, ...] = definition.build(interactive_model())(*sample.values())
    return result


def run_encoder(name: str) -> tuple[Tensor, ...]:
    seen = photograph()
    memory = interactive_model().transformer.encoder(
        src=[cropped(seen.img_feats)],
        src_pos=[cropped(seen.img_pos)],
        prompt=seen.prompt,
        prompt_key_padding_mask=seen.prompt_mask,
        feat_sizes=[(CROP, CROP)],
    )
    return (memory["memory"],)


def run_decoder(name: str) -> tuple[Tensor, ...]:
    seen, decoder = photograph(), interactive_model().transformer.decoder
    with replaced(decoder, "coord_cache", {}):
        result: tuple[Tensor, ...] = decoder(
            tgt=decoder.query_embed.weight.unsqueeze(1),
            memory=cropped(seen.memory),
            pos=cropped(seen.img_pos),
            spatial_shapes=torch.tensor([[CROP, CROP]]),
            valid_ratios=torch.ones(1, 1, 2),
            memory_text=seen.prompt,
            text_attention_mask=seen.prompt_mask,
            apply_dac=False,
        )
    return result


def run_segmentation_head(name: str) -> tuple[Tensor, ...]:
    seen = photograph()
    memory = cropped(seen.memory)
    features = [
        feature[..., scale * START : scale * (START + CROP), scale * START : scale * (START + CROP)]
        for feature, scale in ((seen.fpn_0, 4), (seen.fpn_1, 2))
    ]
    out = interactive_model().segmentation_head(
        backbone_feats=[*features, memory.permute(1, 2, 0).unflatten(2, (CROP, CROP))],
        obj_queries=seen.hs,
        image_ids=torch.zeros(1, dtype=torch.long),
        encoder_hidden_states=memory,
        prompt=seen.prompt,
        prompt_mask=seen.prompt_mask,
    )
    return out["pred_masks"], out["semantic_seg"]


def cropped_map(features: Tensor, size: int = 72) -> Tensor:
    """[..., C, S, S] to the middle of the grid of tokens, S·CROP/72 rows and columns."""
    first, count = START * features.shape[-1] // size, CROP * features.shape[-1] // size
    return features[..., first : first + count, first : first + count]


@contextmanager
def smaller_grid() -> Iterator[None]:
    """The tracker for a grid of CROP² tokens: other rotary tables, other positions, a smaller mask."""
    model = interactive_model()
    tracker = tracker_of(model)
    memory_encoder = tracker.maskmem_backbone
    with ExitStack() as stack:
        for encoding in (memory_encoder.position_encoding, model.backbone.vision_backbone.position_encoding):
            stack.enter_context(replaced(encoding, "cache", {}))
        stack.enter_context(replaced(memory_encoder.mask_downsampler, "interpol_size", [16 * CROP, 16 * CROP]))
        for layer in tracker.transformer.encoder.layers:
            for attention in (layer.self_attn, layer.cross_attn_image):
                table = attention.compute_cis(end_x=CROP, end_y=CROP)
                stack.enter_context(replaced(attention, "freqs_cis", table))
        yield


def run_prompt_encoder(name: str) -> tuple[Tensor, ...]:
    samples = COMPONENTS["prompt_encoder"].samples(captured(CLICKS))
    module = PromptEncoder(tracker_of(interactive_model()).sam_prompt_encoder)
    return tuple(output for sample in ("refined", "mixed") for output in module(*samples[sample].values()))


def run_mask_decoder(name: str) -> tuple[Tensor, ...]:
    """Twice: single masks of a crop are not stable, and are replaced by other masks; then each counts as stable."""
    seen = captured(CLICKS)
    image = [cropped_map(features) for features in (seen.image_embed, seen.high_res_0, seen.high_res_1)]
    sparse = torch.cat([seen.click.sparse.repeat(1, 2, 1)[:, :3], seen.objects.sparse])
    dense = torch.cat([seen.click.dense, seen.objects.dense])
    module = MaskDecoder(interactive_model())
    outputs: tuple[Tensor, ...] = module(*image, sparse, cropped_map(dense))
    with replaced(module.decoder, "dynamic_multimask_stability_thresh", 0.0):
        stable: tuple[Tensor, ...] = module(*image, sparse, cropped_map(dense))
    return outputs + stable


def run_memory_encoder(name: str) -> tuple[Tensor, ...]:
    seen = captured(PROPAGATION).tracked
    masks = seen.masks[..., : 16 * CROP, : 16 * CROP]
    present = torch.tensor([[1.0], [-1.0], [1.0]])
    with smaller_grid():
        outputs: tuple[Tensor, ...] = MemoryEncoder(interactive_model())(
            cropped_map(seen.features), masks, present, seen.from_points
        )
    return outputs


def run_memory_attention(name: str) -> tuple[Tensor, ...]:
    sample = dict(COMPONENTS["memory_attention"].samples(captured(PROPAGATION))["full"])
    sample |= {key: cropped_map(sample[key]) for key in ("features", "memories")}
    with smaller_grid():
        outputs: tuple[Tensor, ...] = MemoryAttention(interactive_model())(*sample.values())
    return outputs


TRACKER = r"inst_interactive_predictor\.model\."

PARTS: dict[str, tuple[str, Callable[[str], tuple[Tensor, ...]]]] = {
    "trunk": (r"backbone\.vision_backbone\.trunk\..*", run_trunk),
    "neck": (r"backbone\.vision_backbone\.(sam2_)?convs\..*", run_neck),
    "text_encoder": (r"backbone\.language_backbone\..*", lambda _: run_component("text_encoder")),
    "geometry_encoder": (r"geometry_encoder\..*", lambda _: run_component("geometry_encoder")),
    "transformer_encoder": (r"transformer\.encoder\..*", run_encoder),
    "transformer_decoder": (r"transformer\.decoder\..*", run_decoder),
    "scoring_head": (r"dot_prod_scoring\..*", lambda _: run_component("scoring_head")),
    "segmentation_head": (r"segmentation_head\..*", run_segmentation_head),
    "tracking_features": (
        TRACKER + r"(sam_mask_decoder\.conv_s[01]\..*|no_mem_embed)",
        lambda _: TrackingFeatures(interactive_model())(trunk_features()),
    ),
    "prompt_encoder": (TRACKER + r"sam_prompt_encoder\..*", run_prompt_encoder),
    "mask_decoder": (TRACKER + r"sam_mask_decoder\.(?!conv_s).*", run_mask_decoder),
    "mask_pointer": (
        TRACKER + r"(mask_downsample\..*|obj_ptr_proj\..*|no_obj_ptr)",
        lambda _: run_component("mask_pointer"),
    ),
    "object_pointers": (TRACKER + r"obj_ptr_tpos_proj\..*", lambda _: run_component("object_pointers")),
    "memory_encoder": (TRACKER + r"(maskmem_backbone\..*|no_obj_embed_spatial)", run_memory_encoder),
    "memory_attention": (TRACKER + r"(transformer\..*|maskmem_tpos_enc)", run_memory_attention),
}
"""Part → pattern of the names of its parameters, and how to run it for one of them."""


DEAR = ("trunk", "mask_decoder")
"""Parts whose parameters are corrupted every night: weights are drawn by name and kind, alike in every part."""


def matching(patterns: Iterable[str]) -> list[str]:
    """Names of the interactive model's parameters that match any of the patterns."""
    together = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return [name for name, _ in interactive_model().named_parameters() if together.fullmatch(name)]


@contextmanager
def replaced_values(name: str, values: Tensor) -> Iterator[None]:
    """The parameter holds other values for the duration of the context."""
    parameter = interactive_model().get_parameter(name)
    before = parameter.clone()
    parameter.copy_(values)
    try:
        yield
    finally:
        parameter.copy_(before)


def corrupted(name: str) -> Tensor:
    """The parameter with noise of 1 % of its root mean square."""
    parameter = interactive_model().get_parameter(name)
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return parameter + 0.01 * parameter.square().mean().sqrt() * noise


def outside_gate(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether any output leaves the strict gate anywhere."""
    return any(
        bool(((a - e).abs() > 1e-5 + 1e-5 * e.abs()).any())
        for a, e in zip(actual, expected, strict=True)
        if e.is_floating_point()
    )


def without_effect(part: str, names: Iterable[str]) -> list[str]:
    """The parameters among these whose corruption stays inside the gate."""
    _, run = PARTS[part]
    clean: dict[str, tuple[Tensor, ...]] = {}
    found = []
    with upstream(), torch.no_grad():
        for name in names:
            # The neck is several convolutions that run apart; other parts run whole.
            stage = ".".join(name.split(".")[:4]) if part == "neck" else part
            if stage not in clean:
                clean[stage] = run(name)
            with replaced_values(name, corrupted(name)):
                if not outside_gate(run(name), clean[stage]):
                    found.append(name)
    return found


def test_every_parameter_belongs_to_one_part_or_is_listed() -> None:
    patterns = [pattern for pattern, _ in PARTS.values()]
    listed = set(matching(UNREAD_PARAMETERS))
    for name, _ in interactive_model().named_parameters():
        parts = [pattern for pattern in patterns if re.fullmatch(pattern, name)]
        assert len(parts) == 1 or (name in listed and not parts), name


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.wide] * (part in DEAR)) for part in PARTS])
def test_every_parameter_matters(part: str) -> None:
    exempt = set(matching([*UNREAD_PARAMETERS, *INVARIANT_PARAMETERS]))
    names = [name for name in matching([PARTS[part][0]]) if name not in exempt]
    assert names
    assert without_effect(part, names) == []


# Every night: it runs the whole model, which is upstream's and pinned.
@pytest.mark.wide
def test_unread_parameters_are_not_read() -> None:
    names = matching(UNREAD_PARAMETERS)
    assert "backbone.language_backbone.encoder.text_projection" in names
    assert all(matching([pattern]) for pattern in UNREAD_PARAMETERS)
    with ExitStack() as stack:
        for name in names:
            parameter = interactive_model().get_parameter(name)
            stack.enter_context(replaced_values(name, torch.full_like(parameter, torch.nan)))
        with upstream():
            again = capture(interactive_model(), load_inputs())
    for name, tensor in photograph().items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(("part", "count"), [("transformer_decoder", 2), ("mask_decoder", 7)])
def test_invariant_parameters_are_read_and_have_no_effect(part: str, count: int) -> None:
    pattern, run = PARTS[part]
    names = [name for name in matching(INVARIANT_PARAMETERS) if re.fullmatch(pattern, name)]
    assert len(names) == count
    with torch.no_grad():
        assert without_effect(part, names) == names
        with upstream():
            undisturbed = run(names[0])[0]
            assert torch.equal(run(names[0])[0], undisturbed)
        for name in names:
            parameter = interactive_model().get_parameter(name)
            # PyTorch's attention gives 0, not NaN, for scores that are NaN on CPUs with AVX-512.
            with replaced_values(name, torch.full_like(parameter, torch.nan)), upstream():
                assert not torch.equal(run(name)[0], undisturbed), name


def test_every_invariant_parameter_belongs_to_these_parts() -> None:
    assert len(matching(INVARIANT_PARAMETERS)) == 9


def test_a_parameter_that_does_not_matter_is_noticed() -> None:
    # The test of the test: with the last box layer at zero, as upstream leaves it, the layers before it are invisible.
    last, before = (f"transformer.decoder.bbox_embed.layers.{layer}.weight" for layer in (2, 1))
    with torch.no_grad(), replaced_values(last, torch.zeros_like(interactive_model().get_parameter(last))):
        assert without_effect("transformer_decoder", [before, "transformer.decoder.norm.weight"]) == [before]
