"""Components are cut out of the model where upstream cuts: each gives, bit by bit, what upstream passed on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conformance.support.shallow import interactive_model, photograph, shallow_model
from harness.core.errors import HarnessError
from harness.lowering.frontends.torch_export import export_program
from harness.lowering.frontends.torch_export.operators import load_calls, operators_of
from harness.lowering.rope import STRATEGIES
from harness.models.sam3.build import build_architecture, give_weights
from harness.models.sam3.capture import load_prompts
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.upstream import upstream


def run_main_sample(name: str) -> dict[str, torch.Tensor]:
    component = COMPONENTS[name]
    module = component.build(shallow_model()).eval()
    args = next(iter(component.samples(photograph()).values()))
    with upstream(), torch.no_grad():
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
def test_component_gives_what_upstream_passed_on(name: str) -> None:
    outputs = run_main_sample(name)
    for output, where in SAME[name].items():
        expected = getattr(photograph(), where.removeprefix("last "))
        actual = outputs[output][-1] if where.startswith("last ") else outputs[output]
        assert torch.equal(actual, expected), f"{name}.{output} is not upstream's {where}"


def test_vit_feeds_the_neck() -> None:
    features = run_main_sample("vit")["features"]
    neck = shallow_model().backbone.vision_backbone
    with torch.no_grad():
        assert torch.equal(neck.convs[0](features), photograph().fpn_0)


@pytest.mark.parametrize("name", COMPONENTS)
def test_samples_name_the_inputs(name: str) -> None:
    for sample, args in COMPONENTS[name].samples(photograph()).items():
        assert tuple(args) == COMPONENTS[name].inputs, sample


def test_prompt_holds_text_points_boxes_and_cls() -> None:
    prompts = load_prompts()
    tokens = 32 + len(prompts.points) + len(prompts.boxes) + 1
    assert photograph().prompt.shape == (tokens, 1, 256)
    assert photograph().prompt_mask.shape == (1, tokens)
    assert int(photograph().prompt_mask.sum()) == 32 - 3, "start, one word and end are not padding"


@pytest.mark.parametrize("name", COMPONENTS)
def test_operators_are_among_those_held_to_pytorch(name: str) -> None:
    component = COMPONENTS[name]
    module = component.build(interactive_model() if component.interactive else shallow_model()).eval()
    known = set(load_calls())
    with upstream(), STRATEGIES["real"].apply(module):
        for sample, args in component.samples(photograph()).items():
            unknown = operators_of(export_program(module, tuple(args.values()))) - known
            assert not unknown, f"{sample}: add {unknown} by running the module collect of the frontend"


def test_missing_prompts_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="run from a checkout"):
        load_prompts(tmp_path / "prompts.toml")


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_alone_gets_the_weights_it_has_in_the_whole_model(name: str) -> None:
    component = COMPONENTS[name]
    model = build_architecture("shallow", interactive=component.interactive)
    part = component.build(model)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    give_weights(model, part=part)
    expected = component.build(interactive_model() if component.interactive else shallow_model()).state_dict()
    assert part.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[tensor_name]) for tensor_name, tensor in part.state_dict().items())
    with upstream(), torch.no_grad():
        args = next(iter(component.samples(photograph()).values()))
        assert all(output.isfinite().all() for output in part.eval()(*args.values()))
