"""The modules of interactive segmentation in PyTorch are upstream's `predict_inst`, whatever places are absent."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from conformance.support.shallow import interactive_model
from harness.models.sam3.deployed.entry_points import predict_masks
from harness.models.sam3.deployed.interactive import InteractiveFeatures, MaskPrediction, click_head
from harness.models.sam3.deployed.options import Sam3Options
from harness.models.sam3.fixtures import read_questions
from harness.models.sam3.interactive.questions import QUESTIONS, Question
from harness.models.sam3.upstream import upstream
from harness.runtime import ObjectPrompt
from harness.runtime.sam3.description import Capacity
from harness.runtime.sam3.interactive import encode_object_prompt, select_masks

SIZE = (451, 300)
REFINED = np.random.default_rng(3).standard_normal((288, 288)).astype(np.float32) * 4
PROMPTS = {
    "click": ObjectPrompt([(200, 150)]),
    "clicks": ObjectPrompt([(200, 150), (10, 10), (300, 80)], [1, 0, 1]),
    "box": ObjectPrompt(box=(60, 20, 400, 290)),
    "box_and_click": ObjectPrompt([(10, 10)], [0], (60, 20, 400, 290)),
    "mask": ObjectPrompt(mask=REFINED),
    "mask_and_click": ObjectPrompt([(200, 150)], mask=REFINED),
}


@cache
def features() -> tuple[torch.Tensor, ...]:
    """Of a trunk's output that is drawn: what it shows does not matter here."""
    drawn = torch.randn(1, 1024, 72, 72, generator=torch.Generator().manual_seed(5))
    with upstream(), torch.no_grad():
        computed = InteractiveFeatures(interactive_model()).eval()(drawn)
    return tuple(computed)


@cache
def predicted(name: str, clicks: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and IoU of all four masks, from a model for so many clicks."""
    inputs = encode_object_prompt(PROMPTS[name], SIZE, Capacity(clicks=clicks)).inputs
    with upstream(), torch.no_grad():
        module = MaskPrediction(click_head(interactive_model())).eval()
        masks, iou, _ = module(*features(), *map(torch.from_numpy, inputs.values()))
    return masks[0].numpy(), iou[0].numpy()


def asked_upstream(prompt: ObjectPrompt, multimask: bool) -> tuple[np.ndarray, np.ndarray]:
    """Logits and IoU as upstream's predictor gives them for the same features."""
    width, height = SIZE
    embedding, first, second = features()
    given: dict[str, Any] = {
        "point_coords": prompt.points and np.array(prompt.points, np.float64),
        "point_labels": prompt.points and np.array(prompt.labels or [1] * len(prompt.points)),
        "box": prompt.box and np.array(prompt.box, np.float64),
        "mask_input": None if prompt.mask is None else prompt.mask[None],
    }
    with upstream():
        predictor = interactive_model().inst_interactive_predictor
        predictor._features = {"image_embed": embedding, "high_res_feats": [first, second]}
        predictor._is_image_set, predictor._orig_hw = True, [(height, width)]
        try:
            _, iou, logits = predictor.predict(**given, multimask_output=multimask)
        finally:
            predictor.reset_predictor()
    return logits, iou


@pytest.mark.parametrize("multimask", [True, False])
@pytest.mark.parametrize("name", PROMPTS)
def test_they_are_upstreams_predictor(name: str, multimask: bool) -> None:
    logits, iou = select_masks(*predicted(name, 16), multimask)
    expected, expected_iou = asked_upstream(PROMPTS[name], multimask)
    np.testing.assert_allclose(logits.clip(-32, 32), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(iou, expected_iou, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROMPTS)
def test_absent_places_change_nothing(name: str) -> None:
    few, many = predicted(name, 3), predicted(name, 16)
    np.testing.assert_allclose(few[0], many[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(few[1], many[1], rtol=1e-5, atol=1e-6)


def test_without_the_mask_absent_places_would_matter() -> None:
    inputs = encode_object_prompt(PROMPTS["click"], SIZE, Capacity(clicks=16)).inputs
    padded = {**inputs, "labels": np.where(inputs["labels"] == -2, -1, inputs["labels"])}
    with upstream(), torch.no_grad():
        masks, _, _ = MaskPrediction(click_head(interactive_model())).eval()(
            *features(), *map(torch.from_numpy, padded.values())
        )
    assert np.abs(masks[0].numpy() - predicted("click", 16)[0]).max() > 1e-2


def test_a_box_is_its_corners() -> None:
    """Upstream gives a box's corners labels of their own; the order of the two places does not matter."""
    inputs = encode_object_prompt(PROMPTS["box"], SIZE, Capacity(clicks=3)).inputs
    swapped = [array[:, [1, 0, *range(2, 6)]] for array in (inputs["coordinates"], inputs["labels"])]
    with upstream(), torch.no_grad():
        module = MaskPrediction(click_head(interactive_model())).eval()
        rest = (inputs["mask"], inputs["has_mask"])
        masks, _, _ = module(*features(), *map(torch.from_numpy, (*swapped, *rest)))
    np.testing.assert_allclose(masks[0].numpy(), predicted("box", 3)[0], rtol=2e-5, atol=2e-5)


def test_the_questions_ask_for_every_kind_of_prompt_and_three_rounds() -> None:
    questions = read_questions(QUESTIONS, Question)
    assert {question.multimask for question in questions} == {True, False}
    assert max(len(question.rounds) for question in questions) >= 3
    rounds = [asked for question in questions for asked in question.rounds]
    assert {(bool(asked.points), asked.box is not None) for asked in rounds} == {
        (True, False), (False, True), (True, True), (False, False)
    }  # fmt: skip
    assert len({question.image for question in questions}) >= 3
    assert predict_masks(click_head(interactive_model()), Sam3Options()).outputs == ("masks", "iou", "object_score")
