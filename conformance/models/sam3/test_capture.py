"""Components are cut out of the model where upstream cuts: each gives, bit by bit, what upstream passed on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.support.operator_calls import calls_of, load_calls
from conformance.support.sentences import sentence
from conformance.support.shallow import captured, interactive_model, photograph, shallow_model
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.settings import SEEDED
from harness.models.sam3.build import build_architecture, give_weights
from harness.models.sam3.capture import load_inputs
from harness.models.sam3.captures import GROUNDING, Activations
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.components.component import Arguments, Component
from harness.models.sam3.upstream import upstream


def model_of(component: Component) -> Any:
    return interactive_model() if component.interactive else shallow_model()


def passed_on(component: Component) -> Activations:
    """What upstream passed on when the component's inputs were captured."""
    capture = component.captured_by
    return photograph(as_in_memory=True) if capture is GROUNDING else captured(capture)


def samples_of(component: Component) -> dict[str, Arguments]:
    return component.samples(passed_on(component))


def run_main_sample(name: str) -> dict[str, torch.Tensor]:
    component = COMPONENTS[name]
    module = component.build(model_of(component)).eval()
    args = next(iter(samples_of(component).values()))
    with upstream(), torch.no_grad():
        return dict(zip(component.outputs, module(*args.values()), strict=True))


# What upstream calls the same tensor. `last` takes the last decoder layer, as upstream does, and `end` as many of
# upstream's last tokens as the component has. `first`, the first object of a batch, and `near` may be rounded in
# another order: PyTorch chooses it by the batch, and by how a tensor lies in memory, which the cache does not keep.
SAME = {
    "vision_backbone": {"fpn_0": "fpn_0", "fpn_1": "fpn_1"},
    "text_encoder": {"features": "text_features", "mask": "text_mask"},
    "geometry_encoder": {"features": "geometry_features", "mask": "geometry_mask"},
    "transformer_encoder": {"memory": "memory"},
    "transformer_decoder": {"hs": "hs", "reference_boxes": "reference_boxes", "presence_logits": "presence_logits"},
    "scoring_head": {"logits": "last pred_logits"},
    "box_head": {"boxes": "last pred_boxes", "boxes_xyxy": "last pred_boxes_xyxy"},
    "segmentation_head": {"pred_masks": "pred_masks", "semantic_seg": "semantic_seg"},
    "tracking_features": {name: f"near {name}" for name in ("high_res_0", "high_res_1", "image_embed")},
    "prompt_encoder": {"sparse": "refined/sparse", "dense": "refined/dense"},
    "mask_decoder": {
        "masks": "near click/logits",
        "ious": "near click/ious",
        "object_logits": "near click/object_logits",
    },
    "mask_pointer": {"pointers": "first mask_prompt/pointer", "object_logits": "first mask_prompt/object_logits"},
    "object_pointers": {"tokens": "end full/prompt", "positions": "end full/prompt_pos"},
    "memory_attention": {"conditioned": "near full/conditioned"},
}


# `vision_backbone` every night: `test_vit_feeds_the_neck` has the trunk and the neck's first level.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] if name == "vision_backbone" else []) for name in SAME]
)
def test_component_gives_what_upstream_passed_on(name: str) -> None:
    outputs, seen = run_main_sample(name), passed_on(COMPONENTS[name])
    for output, where in SAME[name].items():
        which, _, tensor = where.rpartition(" ")
        actual, expected = outputs[output], seen[tensor]
        actual = {"last": actual[-1], "first": actual[:1]}.get(which, actual)
        expected = expected[-len(actual) :] if which == "end" else expected
        if which in ("first", "near"):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(actual, expected), f"{name}.{output} is not upstream's {where}"


def test_vit_feeds_the_neck() -> None:
    features = run_main_sample("vit")["features"]
    neck = shallow_model().backbone.vision_backbone
    with torch.no_grad():
        assert torch.equal(neck.convs[0](features), photograph(as_in_memory=True).fpn_0)


@pytest.mark.parametrize("name", COMPONENTS)
def test_samples_name_the_inputs(name: str) -> None:
    for sample, args in samples_of(COMPONENTS[name]).items():
        assert tuple(args) == COMPONENTS[name].inputs, sample


def test_prompt_holds_text_points_boxes_and_cls() -> None:
    prompts = load_inputs()
    tokens = 32 + len(prompts.points) + len(prompts.boxes) + 1
    assert photograph().prompt.shape == (tokens, 1, 256)
    assert photograph().prompt_mask.shape == (1, tokens)
    assert int(photograph().prompt_mask.sum()) == 32 - 3, "start, one word and end are not padding"


@pytest.mark.wide
@pytest.mark.parametrize("name", COMPONENTS)
def test_operators_are_among_those_held_to_pytorch(name: str) -> None:
    component = COMPONENTS[name]
    module = component.build(model_of(component)).eval()
    known = set(load_calls())
    with upstream():
        for sample, args in samples_of(component).items():
            unknown = {call.operator for call in calls_of(module, tuple(args.values()))} - known
            assert not unknown, f"{sample}: add {unknown} by running conformance.support.operator_calls"


def test_missing_prompts_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=sentence("no-checkout")):
        load_inputs(path=tmp_path / "prompts.toml")


@cache
def architecture(interactive: bool) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A model without weights, and what its buffers held when it was built."""
    model = build_architecture("shallow", interactive=interactive)
    return model, tuple(buffer.clone() for buffer in model.buffers())


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's parameters and buffers; its state leaves out the buffers that are not stored."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_alone_gets_the_weights_it_has_in_the_whole_model(name: str) -> None:
    component = COMPONENTS[name]
    model, buffers = architecture(component.interactive)
    part = component.build(model)
    for parameter in part.parameters():
        parameter.fill_(float("nan"))
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)  # another component may have got it
    give_weights(model, Case("", "real", "llvm"), SEEDED, part)
    tensors, expected = (tensors_of(module) for module in (part, component.build(model_of(component))))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[tensor_name]) for tensor_name, tensor in tensors.items())
