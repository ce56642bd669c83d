"""Lists the components that SAM 3.1 adds to SAM 3: its necks, clicks, and the tracker of sixteen objects."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from harness.models.sam3.captures import Activations, Capture
from harness.models.sam3.components.component import Arguments, Component, single_sample

BUILDER = "harness.models.sam31.build"
"""The module that builds SAM 3.1, as `harness.models.sam3.build` builds SAM 3."""
MULTIPLEX = Capture("multiplex", "harness.models.sam31.capture", interactive=True, builder=BUILDER)
"""Three objects, clicked and tracked through a clip."""
NECK_OUTPUTS = (
    *(f"detector_{level}" for level in range(3)),
    *("click_high_res_0", "click_high_res_1", "click_image"),
    *("high_res_0", "high_res_1", "features"),
)


def _modules() -> ModuleType:
    """Imports the torch modules at first use, so that the table is read without PyTorch."""
    from harness.models.sam31 import modules

    return modules


def _prompt_encoder(model: Any) -> Any:
    """Builds SAM 3's module around the encoder of clicks."""
    from harness.models.sam3.components.tracker_modules import PromptEncoder

    return PromptEncoder(_modules().tracker_of(model).interactive_sam_prompt_encoder)


def _click_image(activations: Activations) -> dict[str, Any]:
    names = {"image_embed": "click_image", "high_res_0": "click_high_res_0", "high_res_1": "click_high_res_1"}
    return {name: activations[captured] for name, captured in names.items()}


def _both_frames(*inputs: str) -> Callable[[Activations], dict[str, Arguments]]:
    """Returns a function that takes inputs of the third frame, with two memories, and of the second, with one."""
    return lambda activations: {
        "third": activations.third.take(*inputs),
        "second": activations.second.take(*inputs),
    }


COMPONENTS = (
    Component(
        name="tri_neck",
        summary="SAM 3.1: feature maps for the detector, clicks and tracking",
        inputs=("trunk",),
        outputs=NECK_OUTPUTS,
        build=lambda model: _modules().TriNeckFeatures(model),
        samples=single_sample("first", "trunk"),
        captured_by=MULTIPLEX,
    ),
    Component(
        name="click_prompt_encoder",
        summary="SAM 3.1: points, boxes and masks to prompt tokens and a dense prompt",
        inputs=("points", "labels", "masks", "has_mask"),
        outputs=("sparse", "dense"),
        build=_prompt_encoder,
        samples=single_sample("objects", "points", "labels", "masks", "has_mask"),
        captured_by=MULTIPLEX,
    ),
    Component(
        name="click_mask_decoder",
        summary="SAM 3.1: image and prompt to masks, their quality, and object pointers",
        inputs=("image_embed", "high_res_0", "high_res_1", "sparse", "dense"),
        outputs=("masks", "ious", "object_logits", "pointers"),
        build=lambda model: _modules().ClickMaskDecoder(model),
        samples=lambda captured: {"objects": _click_image(captured) | captured.take("sparse", "dense")},
        captured_by=MULTIPLEX,
    ),
    Component(
        name="click_mask_pointer",
        summary="SAM 3.1: a given mask to an object pointer",
        inputs=("image_embed", "high_res_0", "high_res_1", "masks"),
        outputs=("pointers", "object_logits"),
        build=lambda model: _modules().ClickMaskPointer(model),
        samples=lambda captured: {"present_absent": _click_image(captured) | {"masks": captured.given}},
        captured_by=MULTIPLEX,
    ),
    Component(
        name="multiplex_mask_decoder",
        summary="SAM 3.1: a conditioned frame to masks and pointers of sixteen objects",
        inputs=("conditioned", "high_res_0", "high_res_1", "valid"),
        outputs=("masks", "ious", "object_logits", "pointers"),
        build=lambda model: _modules().MultiplexMaskDecoder(model),
        samples=lambda captured: {
            "second": captured.second.take("conditioned", "high_res_0", "high_res_1") | {"valid": captured.valid}
        },
        captured_by=MULTIPLEX,
    ),
    Component(
        name="multiplex_memory_encoder",
        summary="SAM 3.1: a frame and masks of sixteen objects to a memory",
        inputs=("features", "masks", "object_logits", "valid", "conditioning"),
        outputs=("memory",),
        build=lambda model: _modules().MultiplexMemoryEncoder(model),
        samples=lambda captured: {
            "second": captured.encoded.take("features", "masks", "object_logits", "valid", "conditioning")
        },
        captured_by=MULTIPLEX,
    ),
    Component(
        name="multiplex_pointers",
        summary="SAM 3.1: object pointers and their age to keys and positions",
        inputs=("pointers", "times"),
        outputs=("tokens", "positions"),
        build=lambda model: _modules().MultiplexPointers(model),
        samples=_both_frames("pointers", "times"),
        captured_by=MULTIPLEX,
    ),
    Component(
        name="multiplex_memory_attention",
        summary="SAM 3.1: a frame attends to memories and pointers of sixteen objects",
        inputs=("features", "memory_features", "memories", "ranks", "tokens", "positions"),
        outputs=("conditioned",),
        build=lambda model: _modules().MultiplexMemoryAttention(model),
        samples=_both_frames("features", "memory_features", "memories", "ranks", "tokens", "positions"),
        captured_by=MULTIPLEX,
        uses_rope=True,
    ),
)
"""The components; trunk, text encoder and detector are SAM 3's."""
