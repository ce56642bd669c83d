"""Clicks and tracking: what is captured, which kinds of input the components see, and what upstream's code promises."""

from __future__ import annotations

import re
import warnings
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conformance.models.sam3.test_model_parameters import UNREAD_PARAMETERS
from conformance.support.examples import examples
from conformance.support.sentences import sentence
from conformance.support.shallow import captured, interactive_model
from harness.core.errors import HarnessError
from harness.models.sam3.captures import CLICKS, PROPAGATION
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.components.tracker_modules import (
    MaskDecoder,
    MemoryAttention,
    MemoryEncoder,
    PromptEncoder,
    tracker_of,
)
from harness.models.sam3.patches.patch import recorded_methods
from harness.models.sam3.source import same_shape_samples
from harness.models.sam3.tracker import propagation
from harness.models.sam3.tracker.clip import load_clip
from harness.models.sam3.upstream import upstream
from harness.runtime.sam3.video.memory_bank import MemoryRules, plan_attention

NEAR = {"rtol": 1e-5, "atol": 1e-5}
"""The strict gate: rounding in another order."""


def samples(component: str) -> dict[str, dict[str, Tensor]]:
    definition = COMPONENTS[component]
    return {name: dict(args) for name, args in definition.samples(captured(definition.captured_by)).items()}


@torch.no_grad()
def run(module: torch.nn.Module, *args: Tensor) -> tuple[Tensor, ...]:
    with upstream():
        result: tuple[Tensor, ...] = module.eval()(*args)
    return result


# The clip


def test_the_moving_part_swings() -> None:
    clip = load_clip()
    assert [clip.view(frame) for frame in range(9)] == [0, 1, 2, 1, 0, 1, 2, 1, 0]
    background, first = (np.asarray(clip.picture(frame)) for frame in (1, 0))
    moved = (background != first).any(axis=-1)
    assert moved.any()
    assert not (moved & ~(clip.mask(0) | clip.mask(1))).any()
    height, width = moved.shape
    for frame in range(3):
        x, y = clip.center(frame)
        rows, columns = np.nonzero(clip.mask(frame))
        assert abs(columns.mean() - x * width) < 2
        assert abs(rows.mean() - y * height) < 2
        assert all(not clip.mask(frame)[round(y * height), round(x * width)] for x, y in clip.still)


def test_a_missing_clip_is_one_sentence(tmp_path) -> None:
    with pytest.raises(HarnessError, match=sentence("no-checkout")):
        load_clip(path=tmp_path / "clip.toml")
    (tmp_path / "clip.toml").write_text("crop = [0, 0, 1]\nsize = [1, 1]")
    with pytest.raises(HarnessError, match=sentence("bad-description")):
        load_clip(path=tmp_path / "clip.toml")


# What is captured


@pytest.mark.parametrize("capture", [CLICKS, PROPAGATION], ids=lambda capture: capture.kind)
def test_activations_are_tensors_by_name_and_their_parts_are_attributes(capture) -> None:
    activations = captured(capture)
    assert all(isinstance(tensor, Tensor) and tensor.isfinite().all() for tensor in activations.values())
    for name, tensor in activations.items():
        part, _, last = name.rpartition("/")
        assert getattr(getattr(activations, part) if part else activations, last) is tensor


@pytest.mark.wide
def test_clicks_are_the_same_in_another_run() -> None:
    with upstream():
        again = CLICKS.run(interactive_model(), CLICKS.load_inputs(None))
    for name, tensor in captured(CLICKS).items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.wide
@torch.no_grad()
def test_a_propagation_is_the_same_in_another_run_and_does_not_read_what_is_unread() -> None:
    clip, model = load_clip(), interactive_model()
    unread = {name for name, _ in model.named_parameters() if re.fullmatch("|".join(UNREAD_PARAMETERS), name)}
    ours = [name for name in unread if name.startswith("inst_interactive_predictor.")]
    assert ours == ["inst_interactive_predictor.model.no_mem_pos_enc"]
    parameter = model.get_parameter(ours[0])
    before = parameter.clone()
    parameter.fill_(torch.nan)
    with upstream():
        features = propagation._encode_frames(model, clip)
        again = propagation._track_three_objects(model.inst_interactive_predictor.model, clip, features)
    parameter.copy_(before)
    for name, tensor in captured(PROPAGATION).second.items():
        assert torch.equal(again[name], tensor), name


def test_memories_are_rounded_as_upstream_stores_them() -> None:
    for frame in (captured(PROPAGATION).full, captured(PROPAGATION).second):
        assert torch.equal(frame.memories.bfloat16().float(), frame.memories)


# Which kinds of input the components see


def test_prompts_of_every_kind() -> None:
    prompts = samples("prompt_encoder").values()
    assert {int(label) for args in prompts for label in args["labels"].unique()} == {-1, 0, 1, 2, 3}
    assert {bool(flag) for args in prompts for flag in args["has_mask"]} == {False, True}
    assert {len(args["points"]) for args in prompts} >= {1, 3}


def test_single_masks_that_are_stable_and_that_are_not() -> None:
    chosen = []
    for args in samples("mask_decoder").values():
        masks, _, single, *_ = run(MaskDecoder(interactive_model()), *args.values())
        chosen += [
            bool((candidates == mask).flatten(1).all(1).any()) for candidates, mask in zip(masks, single, strict=True)
        ]
    assert set(chosen) == {False, True}, "the best of three masks, and the single one"


def test_objects_that_are_there_and_that_are_not() -> None:
    logits = torch.cat([args["object_logits"] for args in samples("memory_encoder").values()])
    assert (logits > 0).any() and (logits <= 0).any()
    assert {tuple(args["masks"].shape[-2:]) for args in samples("memory_encoder").values()} == {
        (1008, 1008),
        (1152, 1152),
    }
    assert {bool(args["from_points"]) for args in samples("memory_encoder").values()} == {False, True}
    (args,) = samples("mask_pointer").values()
    assert [bool(mask.any()) for mask in args["masks"]] == [True, False]


def test_the_propagation_follows_the_memory_rules() -> None:
    """Networks and state machine run together there, without memory selection."""
    activations, rules = captured(PROPAGATION), MemoryRules(use_memory_selection=False)
    for frame, conditioning, expected in (
        (1, [0], activations.second),
        (16, [0], activations.full),
        (19, [0, 1, 2, 3], activations.most_memories),
    ):
        scores = {each: None for each in range(frame) if each not in conditioning}
        plan = plan_attention(frame, conditioning, scores, num_frames=propagation.FRAMES, rules=rules)
        assert [rank for _, rank in plan.memories] == expected.ranks.tolist()
        assert [time for _, time in plan.pointers] == expected.times.tolist()


def test_banks_of_every_size() -> None:
    seen = [(*args["memories"].shape[:2], len(args["pointers"]) // 4) for args in samples("memory_attention").values()]
    assert sorted(seen) == [(1, 1, 1), (1, 3, 1), (7, 1, 16), (10, 1, 19)]
    assert sorted(len(args["times"]) for args in samples("object_pointers").values()) == [1, 16, 19]


def test_banks_that_one_program_answers() -> None:
    """Those of one object; a target that takes no symbolic axes gets a program for each."""
    banks = samples("memory_attention")
    assert same_shape_samples(banks, COMPONENTS["memory_attention"].symbolic) == {
        "full": "full",
        "most": "full",
        "second": "second",
        "first": "full",
    }
    assert same_shape_samples(banks, {}) == {name: name for name in banks}


def test_pointers_of_any_number_of_objects_are_one_program_for_each_number_of_pointers() -> None:
    pointers = samples("object_pointers")
    first = {name: {"pointers": args["pointers"][:, :1], "times": args["times"]} for name, args in pointers.items()}
    answered = same_shape_samples({**pointers, "one": first["second"]}, COMPONENTS["object_pointers"].symbolic)
    assert answered == {"full": "full", "most": "most", "second": "second", "one": "second"}


def test_attention_to_memories_is_neither_uniform_nor_one_hot() -> None:
    encoder = interactive_model().inst_interactive_predictor.model.transformer.encoder
    seen = captured(PROPAGATION).full
    attention = encoder.layers[0].cross_attn_image
    with torch.no_grad():
        keys = attention.k_proj((seen.prompt + seen.prompt_pos)[:, 0])
        queries = attention.q_proj(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)))
        weights = torch.softmax(queries @ keys.T / 16, -1)
    perplexity = torch.exp(-(weights * weights.clamp_min(1e-30).log()).sum(-1))
    assert 8 < perplexity.median() < 0.6 * len(keys)
    assert weights.amax(-1).median() < 0.5


# Components put things together as upstream does


def test_memories_are_put_together_as_upstream_does() -> None:
    tracker, seen = interactive_model().inst_interactive_predictor.model, captured(PROPAGATION).second
    with recorded_methods(tracker.transformer.encoder, "forward") as calls:
        (conditioned,) = run(MemoryAttention(interactive_model()), *samples("memory_attention")["second"].values())
    ((arguments),) = (call.arguments for call in calls["forward"])
    assert torch.equal(arguments["prompt"], seen.prompt)
    assert torch.equal(arguments["prompt_pos"], seen.prompt_pos)
    torch.testing.assert_close(conditioned, seen.conditioned, **NEAR)


def test_masks_are_remembered_as_upstream_does() -> None:
    for seen in (captured(PROPAGATION).tracked, captured(PROPAGATION).clicked):
        args = (seen.features, seen.masks, seen.object_logits, seen.from_points)
        (memory,) = run(MemoryEncoder(interactive_model()), *args)
        torch.testing.assert_close(memory, seen.memory, **NEAR)


# What upstream's prompts promise

corner = st.floats(0, 1008, width=32)
points = st.lists(st.tuples(corner, corner, st.sampled_from((0, 1))), min_size=1, max_size=5)


def no_mask(objects: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(objects, 1, 288, 288), torch.tensor([False])


def encoded(coordinates: Tensor, labels: Tensor) -> Tensor:
    """The prompt tokens of points [B, P, 2] with labels [B, P]."""
    sparse, _ = run(
        PromptEncoder(tracker_of(interactive_model()).sam_prompt_encoder),
        coordinates,
        labels,
        *no_mask(len(coordinates)),
    )
    return sparse


@examples(20)
@given(st.lists(st.tuples(corner, corner, corner, corner), min_size=1, max_size=3))
@torch.no_grad()
def test_a_box_equals_its_two_corners(boxes) -> None:
    encoder = interactive_model().inst_interactive_predictor.model.sam_prompt_encoder
    corners = torch.tensor(boxes).view(-1, 2, 2)
    as_box, _ = encoder(points=None, boxes=torch.tensor(boxes), masks=None)
    as_points = encoded(corners, torch.tensor([[2, 3]], dtype=torch.int32).expand(len(boxes), 2))
    torch.testing.assert_close(as_box, as_points[:, :2], **NEAR)


@examples(20)
@given(points, st.tuples(corner, corner), st.tuples(corner, corner))
def test_where_padding_lies_changes_nothing(clicks, here, there) -> None:
    labels = torch.tensor([[*(label for _, _, label in clicks), -1]], dtype=torch.int32)
    first, second = (
        encoded(torch.tensor([[*((x, y) for x, y, _ in clicks), place]]), labels) for place in (here, there)
    )
    assert torch.equal(first, second)
    assert torch.equal(first[:, -1], first[:, -2]), "upstream pads with the same token itself"
    alone = encoded(torch.tensor([[(x, y) for x, y, _ in clicks]]), labels[:, :-1])
    torch.testing.assert_close(first[:, : len(clicks)], alone[:, : len(clicks)], **NEAR)


@examples(20)
@given(points, st.randoms(use_true_random=False))
def test_tokens_follow_the_order_of_points(clicks, random) -> None:
    order = list(range(len(clicks)))
    random.shuffle(order)
    shuffled = [clicks[place] for place in order]
    first, second = (
        encoded(
            torch.tensor([[(x, y) for x, y, _ in each]]),
            torch.tensor([[label for _, _, label in each]], dtype=torch.int32),
        )
        for each in (clicks, shuffled)
    )
    torch.testing.assert_close(first[:, [*order, len(clicks)]], second, **NEAR)


def test_masks_do_not_depend_on_the_order_of_points() -> None:
    args = samples("mask_decoder")["refined"]
    decoder = MaskDecoder(interactive_model())
    sparse = args["sparse"]
    first = run(decoder, *args.values())
    second = run(decoder, *(args | {"sparse": sparse.flip(1)}).values())
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# What upstream's answers depend on silently


def areas_by_search(mask: np.ndarray) -> np.ndarray:
    """For each pixel of a mask the size of its 8-connected component, found by breadth-first search."""
    areas = np.zeros(mask.shape, np.int64)
    for start in zip(*np.nonzero(mask), strict=True):
        if areas[start]:
            continue
        found, waiting = {start}, deque([start])
        while waiting:
            row, column = waiting.popleft()
            near = [(row + dy, column + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
            for y, x in near:
                inside = 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1]
                if inside and mask[y, x] and (y, x) not in found:
                    found.add((y, x))
                    waiting.append((y, x))
        for place in found:
            areas[place] = len(found)
    return areas


@examples(40)
@given(st.integers(1, 24), st.integers(1, 24), st.floats(0, 1), st.integers(0, 2**31))
def test_components_are_found_without_scikit_image(height: int, width: int, share: float, seed: int) -> None:
    mask = np.random.default_rng(seed).random((height, width)) < share
    from harness.models.sam3.patches.tracking import holes_are_filled

    with upstream(), holes_are_filled.apply():
        from sam3.perflib.connected_components import connected_components

        labels, areas = connected_components(torch.from_numpy(mask)[None, None].to(torch.uint8))
    assert np.array_equal(areas[0, 0].numpy(), areas_by_search(mask))
    assert np.array_equal(labels[0, 0].numpy() > 0, mask)


def test_small_holes_are_filled_and_nothing_is_skipped() -> None:
    transforms = interactive_model().inst_interactive_predictor._transforms
    mask = torch.full((1, 1, 288, 288), 3.0)
    mask[..., 10:20, 10:20] = -1.0  # 100 pixels
    mask[..., 100:120, 100:120] = -1.0  # 400 pixels
    with upstream(), warnings.catch_warnings():
        warnings.simplefilter("error")
        filled = transforms.postprocess_masks(mask, (288, 288))
    assert (filled[..., 10:20, 10:20] == 10).all()
    assert (filled[..., 100:120, 100:120] == -1).all()


def test_features_for_the_tracker_stay_float32() -> None:
    with upstream():
        from sam3.model.sam3_image import Sam3ImageOnVideoMultiGPU as Detector

        features = {"backbone_fpn": [torch.full((1,), 1 / 3)] * 3, "vision_pos_enc": []}
        answers = ("pred_logits", "pred_boxes", "pred_boxes_xyxy", "pred_masks")
        answer = {name: torch.zeros(1) for name in answers}
        answer["prev_encoder_out"] = {"backbone_out": {"sam2_backbone_out": features}}
        detector = SimpleNamespace(
            rank=0, world_size=1, gather_backbone_out=True, forward_grounding=lambda **_: dict(answer)
        )
        detector._gather_tensor = lambda tensor: Detector._gather_tensor(detector, tensor)
        buffer: dict[int, dict[str, tuple[Tensor, None]]] = {}
        Detector._build_multigpu_buffer_next_chunk(detector, {}, [None], None, 0, 1, 1, buffer)
    assert torch.equal(buffer[0]["tracker_backbone_fpn_0"][0], torch.full((1,), 1 / 3))
