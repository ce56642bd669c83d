"""Components are cut out of the model where upstream cuts: each gives, bit by bit, what upstream passed on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from conformance.shallow import shallow_model
from harness.components import COMPONENTS
from harness.components.capture import Activations, capture, load_prompts
from harness.errors import HarnessError
from harness.model.upstream import upstream


@pytest.fixture(scope="module")
def activations() -> Iterator[Activations]:
    with upstream():
        yield capture(shallow_model(), load_prompts())


def run_main_sample(name: str, activations: Activations) -> dict[str, torch.Tensor]:
    component = COMPONENTS[name]
    module = component.build(shallow_model()).eval()
    args = next(iter(component.samples(activations).values()))
    with torch.no_grad():
        return dict(zip(component.outputs, module(*args.values()), strict=True))


# What upstream calls the same tensor; `last` takes the last decoder layer, as upstream does.
SAME = {
    "vision_backbone": {"fpn_0": "fpn_0", "fpn_1": "fpn_1"},
    "text_encoder": {"features": "text_features", "mask": "text_mask"},
    "geometry_encoder": {"features": "geometry_features", "mask": "geometry_mask"},
    "transformer_encoder": {"memory": "memory"},
    "transformer_decoder": {"hs": "hs", "reference_boxes": "reference_boxes", "presence_logits": "presence_logits"},
    "scoring_head": {"logits": "last pred_logits"},
    "box_head": {"boxes": "last pred_boxes", "boxes_xyxy": "last pred_boxes_xyxy"},
    "segmentation_head": {"pred_masks": "pred_masks", "semantic_seg": "semantic_seg"},
}


@pytest.mark.parametrize("name", SAME)
def test_component_gives_what_upstream_passed_on(name: str, activations: Activations) -> None:
    outputs = run_main_sample(name, activations)
    for output, where in SAME[name].items():
        expected = getattr(activations, where.removeprefix("last "))
        actual = outputs[output][-1] if where.startswith("last ") else outputs[output]
        assert torch.equal(actual, expected), f"{name}.{output} is not upstream's {where}"


def test_vit_feeds_the_neck(activations: Activations) -> None:
    features = run_main_sample("vit", activations)["features"]
    neck = shallow_model().backbone.vision_backbone
    with torch.no_grad():
        assert torch.equal(neck.convs[0](features), activations.fpn_0)


@pytest.mark.parametrize("name", COMPONENTS)
def test_samples_name_the_inputs(name: str, activations: Activations) -> None:
    for sample, args in COMPONENTS[name].samples(activations).items():
        assert tuple(args) == COMPONENTS[name].inputs, sample


def test_prompt_holds_text_points_boxes_and_cls(activations: Activations) -> None:
    prompts = load_prompts()
    tokens = 32 + len(prompts.points) + len(prompts.boxes) + 1
    assert activations.prompt.shape == (tokens, 1, 256)
    assert activations.prompt_mask.shape == (1, tokens)
    assert int(activations.prompt_mask.sum()) == 32 - 3, "start, one word and end are not padding"


def test_missing_prompts_file_is_one_sentence(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(HarnessError, match="run from a checkout"):
        load_prompts(tmp_path / "prompts.toml")
