"""Lists the components that clicks and tracking add: the SAM 2 neck, prompts, masks and memories."""

from __future__ import annotations

from types import ModuleType

from harness.core.program import Axis
from harness.models.sam3.captures import CLICKS, PROPAGATION, Activations
from harness.models.sam3.components.component import EVERY_PRECISION, Arguments, Component, single_sample

OBJECTS = Axis("objects", 1, 1024)
"""Objects of one frame, which upstream does not limit."""
MEMORIES = Axis("memories", 1, 16)
"""Memories of one frame; upstream keeps up to ten."""
POINTER_TOKENS = Axis("pointer_tokens", 4, 4 * 32)
"""Four tokens of each pointer; upstream keeps up to nineteen pointers."""


def _modules() -> ModuleType:
    """Imports the torch modules at first use, so that the table is read without PyTorch."""
    from harness.models.sam3.components import tracker_modules

    return tracker_modules


def _prompts(clicks: Activations) -> dict[str, Arguments]:
    """Returns a box with clicks and a mask, a click, a box, three padded objects, and four objects, two with a mask."""
    import torch

    rounds = {"refined": clicks.refined, "click": clicks.click, "box": clicks.box, "objects": clicks.objects}
    samples = {name: prompt.take("points", "labels", "masks", "has_mask") for name, prompt in rounds.items()}
    # Two of four objects have a mask; the last object has only padding, as upstream gives it when it tracks.
    mixed = {
        "points": torch.cat([clicks.objects.points, torch.zeros(1, 2, 2)]),
        "labels": torch.cat([clicks.objects.labels, -torch.ones(1, 2, dtype=torch.int32)]),
        "masks": clicks.refined.masks * torch.tensor([1.0, -1.0, 0.5, 2.0]).view(-1, 1, 1, 1),
        "has_mask": torch.tensor([False, True, True, False]),
    }
    return samples | {"mixed": mixed}


def _rounds(clicks: Activations) -> dict[str, Arguments]:
    """Returns one click, a box with two clicks and a mask, and three objects on one image."""
    image = clicks.take("image_embed", "high_res_0", "high_res_1")
    rounds = {"click": clicks.click, "refined": clicks.refined, "objects": clicks.objects}
    return {name: image | prompt.take("sparse", "dense") for name, prompt in rounds.items()}


def _mask_prompts(propagation: Activations) -> dict[str, Arguments]:
    """Returns the moving object of the clip and an absent object."""
    import torch

    prompt = propagation.mask_prompt
    masks = torch.cat([prompt.masks, torch.zeros_like(prompt.masks)])
    return {"present_absent": prompt.take("features", "high_res_0", "high_res_1") | {"masks": masks}}


def _frame_masks(propagation: Activations) -> dict[str, Arguments]:
    """Returns three tracked objects, the second absent; the objects after clicks; and masks of 1152x1152."""
    import torch

    tracked, clicked = propagation.tracked, propagation.clicked
    presence = torch.tensor([1.0, -1.0, 1.0]).view(-1, 1)
    # The detector's masks already have the encoder's size, with an object logit of 10 or -10.
    large = torch.nn.functional.interpolate(tracked.masks[:2], size=(1152, 1152), mode="bilinear")
    names = ("features", "masks", "object_logits", "from_points")
    return {
        "tracked": {
            **tracked.take(*names),
            "masks": torch.where(presence[:, :, None, None] > 0, tracked.masks, -1024.0),
            "object_logits": tracked.object_logits.abs() * presence,
        },
        "clicked": clicked.take(*names),
        "large": {
            "features": tracked.features,
            "masks": large,
            "object_logits": torch.tensor([[10.0], [-10.0]]),
            "from_points": torch.tensor([True]),
        },
    }


def _pointers(propagation: Activations) -> dict[str, Arguments]:
    """Returns sixteen pointers, nineteen pointers, and one pointer of each of three objects."""
    frames = {"full": propagation.full, "most": propagation.most_memories, "second": propagation.second}
    return {name: frame.take("pointers", "times") for name, frame in frames.items()}


def _memories(propagation: Activations) -> dict[str, Arguments]:
    """Returns seven memories with sixteen pointers, ten with nineteen, one of each of three objects, and one alone."""
    frames = {"full": propagation.full, "most": propagation.most_memories, "second": propagation.second}
    samples = {
        name: {
            **frame.take("features", "memories", "ranks"),
            "pointers": frame.prompt[-4 * len(frame.pointers) :],
            "pointer_pos": frame.prompt_pos[-4 * len(frame.pointers) :],
        }
        for name, frame in frames.items()
    }
    batched = samples["second"]
    first_object = {name: batched[name][:, :1] for name in ("memories", "pointers", "pointer_pos")}
    return {**samples, "first": {**batched, **first_object}}


COMPONENTS = (
    Component(
        name="tracking_features",
        summary="SAM 2 neck: feature maps for clicks and tracking",
        inputs=("trunk",),
        outputs=("high_res_0", "high_res_1", "features", "image_embed"),
        build=lambda model: _modules().TrackingFeatures(model),
        samples=single_sample("photograph", "trunk"),
        captured_by=CLICKS,
    ),
    Component(
        name="prompt_encoder",
        summary="points, boxes and masks to prompt tokens and a dense prompt",
        inputs=("points", "labels", "masks", "has_mask"),
        outputs=("sparse", "dense"),
        build=lambda model: _modules().PromptEncoder(_modules().tracker_of(model).sam_prompt_encoder),
        samples=_prompts,
        captured_by=CLICKS,
    ),
    Component(
        name="mask_decoder",
        summary="image and prompt to masks, their quality, and object pointers",
        inputs=("image_embed", "high_res_0", "high_res_1", "sparse", "dense"),
        outputs=("masks", "ious", "single_mask", "single_iou", "object_logits", "pointers"),
        build=lambda model: _modules().MaskDecoder(model),
        samples=_rounds,
        captured_by=CLICKS,
    ),
    Component(
        name="mask_pointer",
        summary="a given mask to an object pointer",
        inputs=("features", "high_res_0", "high_res_1", "masks"),
        outputs=("pointers", "object_logits"),
        build=lambda model: _modules().MaskPointer(model),
        samples=_mask_prompts,
        captured_by=PROPAGATION,
    ),
    Component(
        name="memory_encoder",
        summary="a frame and masks in it to memories",
        inputs=("features", "masks", "object_logits", "from_points"),
        outputs=("memory",),
        build=lambda model: _modules().MemoryEncoder(model),
        samples=_frame_masks,
        captured_by=PROPAGATION,
    ),
    Component(
        name="object_pointers",
        summary="object pointers and their age to keys and positions",
        inputs=("pointers", "times"),
        outputs=("tokens", "positions"),
        build=lambda model: _modules().ObjectPointers(model),
        samples=_pointers,
        captured_by=PROPAGATION,
        emulated=EVERY_PRECISION,
        symbolic={"pointers": {1: OBJECTS}},
    ),
    Component(
        name="memory_attention",
        summary="a frame attends to memories and pointers",
        inputs=("features", "memories", "ranks", "pointers", "pointer_pos"),
        outputs=("conditioned",),
        build=lambda model: _modules().MemoryAttention(model),
        samples=_memories,
        captured_by=PROPAGATION,
        uses_rope=True,
        symbolic={
            "memories": {0: MEMORIES},
            "ranks": {0: MEMORIES},
            "pointers": {0: POINTER_TOKENS},
            "pointer_pos": {0: POINTER_TOKENS},
        },
    ),
)
"""The components of clicks and tracking."""
