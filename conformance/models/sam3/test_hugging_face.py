"""Transformers' layout of SAM 3's weights: its names, there and back, and what loads to the same tensors.

`test_transformers.py` compares with Transformers itself.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conformance.models.sam3.test_checkpoint_layouts import save_parts
from conformance.support.hugging_face import to_hugging_face
from conformance.support.sentences import sentence
from conformance.support.shallow import build_model, interactive_model, shallow_model
from harness.core.errors import HarnessError
from harness.models.sam3.build import build_architecture
from harness.models.sam3.checkpoints.hugging_face import (
    POINTS,
    VIDEO_PREFIX,
    from_hugging_face,
    is_hugging_face,
)
from harness.models.sam3.checkpoints.loading import load_checkpoint
from harness.models.sam3.scales import SCALES

LAYOUT = Path(__file__).parents[3] / "fixtures" / "hugging_face.json"
"""Names and shapes of Transformers 5.23's shallow `Sam3Model`; `test_transformers.py` checks them."""

POSITIONS = "backbone.vision_backbone.trunk.pos_embed"
TRACKER_LAYOUT = LAYOUT.with_name("hugging_face_tracker.json")
"""Names and shapes of the tracker at shallow scale, as Transformers 5.23's `convert_sam3_video_to_hf.py` makes them."""
QUERIES = "vision_encoder.backbone.layers.{}.attention.q_proj.weight"
BLOCKS = SCALES["shallow"]["ViT"]["depth"]


def shapes(state: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in state.items()}


def published(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As in the published file, which is the video model's: a prefix, and a tracker beside the detector."""
    renamed = {
        name if name.startswith(("tracker_neck.", "tracker_model.")) else VIDEO_PREFIX + name: tensor.contiguous()
        for name, tensor in state.items()
    }
    again = "tracker_model.shared_image_embedding.positional_embedding"  # safetensors writes no memory twice
    renamed |= {again: renamed[again].clone()} if again in renamed else {}
    return {"tracker_model.no_memory_embedding": torch.ones(1, 1, 256), **renamed}


@cache
def theirs() -> dict[str, torch.Tensor]:
    return to_hugging_face(shallow_model().state_dict())


def test_names_and_shapes_are_those_of_transformers() -> None:
    assert shapes(theirs()) == json.loads(LAYOUT.read_text(encoding="utf-8"))
    assert is_hugging_face(theirs())
    assert is_hugging_face(published(theirs()))
    assert not is_hugging_face(shallow_model().state_dict())
    assert not is_hugging_face({f"detector.{name}" for name in shallow_model().state_dict()})


def test_the_trackers_names_and_shapes_are_those_of_transformers() -> None:
    state = to_hugging_face(interactive_model().state_dict())
    tracker = {name: tensor for name, tensor in state.items() if name.startswith("tracker_model.")}
    assert shapes(tracker) == json.loads(TRACKER_LAYOUT.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("prompt_encoder.point_embed.weight", "sam_prompt_encoder.point_embeddings.0.weight"),
        ("mask_decoder.iou_prediction_head.layers.0.bias", "sam_mask_decoder.iou_prediction_head.layers.1.bias"),
    ],
)
def test_a_misshapen_tensor_of_the_tracker_is_refused(name: str, ours: str, tmp_path: Path) -> None:
    state = published(to_hugging_face(interactive_model().state_dict())) | {f"tracker_model.{name}": torch.ones(3, 1)}
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(
        HarnessError, match=sentence("does-not-fit", fit=f"1 misshapen (inst_interactive_predictor.model.{ours}")
    ):
        load_checkpoint(interactive_model(), tmp_path / "model.pt")


def test_there_and_back() -> None:
    state = interactive_model().state_dict()
    back = from_hugging_face(published(to_hugging_face(state)))
    kept = {name: tensor for name, tensor in state.items() if not POINTS.fullmatch(name) and "freqs_cis" not in name}
    assert set(back) == set(kept)
    # The class token's position, the first, is not in the layout; upstream never reads it.
    assert not back[POSITIONS][:, 0].any()
    back[POSITIONS][:, 0] = kept[POSITIONS][:, 0]
    for name, tensor in kept.items():
        assert torch.equal(back[name], tensor), name


def test_loads_to_the_same_tensors(tmp_path: Path) -> None:
    save_file(published(theirs()), tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="no weights for point prompts"):
        loaded = build_model("shallow", 1, tmp_path / "model.safetensors")
    for name, parameter in loaded.named_parameters():
        if POINTS.fullmatch(name):
            assert not torch.equal(parameter, shallow_model().get_parameter(name))
            parameter.copy_(shallow_model().get_parameter(name))
    tensors, expected = loaded.state_dict(), shallow_model().state_dict()
    # The class token's position, the first, is not in the layout; upstream never reads it.
    tensors[POSITIONS][:, 0] = expected[POSITIONS][:, 0]
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_the_sam_2_neck_and_the_tracker_are_in_the_video_model_alone(tmp_path: Path) -> None:
    neck = "backbone.vision_backbone.sam2_convs.0.dconv_2x2_1.weight"
    model = build_architecture("shallow", interactive=True)
    save_file(published(to_hugging_face(interactive_model().state_dict())), tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="no weights for point prompts"):
        left_out = load_checkpoint(model, tmp_path / "model.safetensors")
    assert all(POINTS.fullmatch(name) for name in left_out)
    for name, tensor in model.state_dict().items():
        if name == neck or name.startswith("inst_interactive_predictor."):
            assert torch.equal(tensor, interactive_model().state_dict()[name]), name
    save_file({name: tensor.contiguous() for name, tensor in theirs().items()}, tmp_path / "image.safetensors")
    with pytest.raises(HarnessError, match=sentence("does-not-fit", fit="backbone.vision_backbone.sam2_convs: 22")):
        load_checkpoint(model, tmp_path / "image.safetensors")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({QUERIES.format(0): None}, sentence("does-not-fit", fit="blocks.0.attn.qkv.weight); 2 unexpected")),
        (
            {QUERIES.format(0): torch.ones(3, 1024)},
            sentence("does-not-fit", fit="blocks.0.attn.qkv.weight: 0 instead of 3072×1024)"),
        ),
        ({QUERIES.format(BLOCKS): torch.ones(1)}, sentence("does-not-fit", fit=f"layers.{BLOCKS}")),
        (
            {"vision_encoder.surplus": torch.ones(1)},
            sentence("does-not-fit", fit="1 unexpected (detector_model.vision_encoder.surplus)"),
        ),
        (
            {"vision_encoder.backbone.embeddings.position_embeddings": torch.ones(2)},
            sentence("does-not-fit", fit="pos_embed: 2"),
        ),
        ({"text_encoder.text_projection.weight": torch.ones(2)}, sentence("does-not-fit", fit="text_projection: 2")),
    ],
    ids=["missing", "misshapen", "deeper", "unexpected", "positions", "projection"],
)
def test_what_does_not_fit_is_listed_and_refused(
    changes: dict[str, torch.Tensor | None], expected: str, tmp_path: Path
) -> None:
    state = {name: tensor for name, tensor in {**theirs(), **changes}.items() if tensor is not None}
    shapes_alone = {name: torch.zeros(1).expand(tensor.shape) for name, tensor in published(state).items()}
    torch.save(shapes_alone, tmp_path / "model.pt")
    with pytest.raises(HarnessError, match=expected) as raised:
        load_checkpoint(shallow_model(), tmp_path / "model.pt")
    assert "\n" not in str(raised.value)


def test_parts(tmp_path: Path) -> None:
    model = build_architecture("shallow", interactive=True)
    path = save_parts(published(to_hugging_face(interactive_model().state_dict())), tmp_path)
    with pytest.warns(UserWarning, match="no weights for point prompts"):
        load_checkpoint(model, path)
    name = "backbone.vision_backbone.trunk.blocks.1.attn.qkv.weight"
    assert torch.equal(model.get_parameter(name), interactive_model().get_parameter(name))


@pytest.mark.parametrize("name", ["backbone.language_backbone.resizer.weight", POSITIONS])
def test_names_of_both_layouts_are_refused(name: str, tmp_path: Path) -> None:
    torch.save(published(theirs()) | {f"detector.{name}": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(HarnessError, match=sentence("doubled-tensors", doubled2=f"detector.{name}")):
        load_checkpoint(shallow_model(), tmp_path / "model.pt")


def test_a_copy_of_the_frequencies_that_differs_is_refused(tmp_path: Path) -> None:
    copy = "tracker_model.shared_image_embedding.positional_embedding"
    state = published(to_hugging_face(interactive_model().state_dict()))
    torch.save(state | {copy: state[copy] + 1}, tmp_path / "model.pt")
    with pytest.raises(HarnessError, match=sentence("does-not-fit", fit=f"1 unexpected ({copy})")):
        load_checkpoint(interactive_model(), tmp_path / "model.pt")
