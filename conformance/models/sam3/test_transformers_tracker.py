"""Transformers' `Sam3TrackerModel` and upstream's `predict_inst` on the same weights answer the same.

Answers about one encoded photograph are compared in float64, every operator of theirs, so what is left of a difference
is meant and not rounded; encoding it, and what passes between the modules, in fp32 under the strict gate.
It takes the extra `transformers` (some 140 MB) and about three minutes:

    pip install --constraint constraints.txt --editable ".[test,transformers]"
    pytest conformance/models/sam3/test_transformers_tracker.py

There are two differences, with a test each: `Sam3TrackerModel` leaves `no_memory_embedding` out of the features that
it decodes, and asks with two tokens more where a mask comes alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conformance.models.sam3 import test_interactive
from conformance.models.sam3.test_hugging_face import published
from conformance.support.hugging_face import to_hugging_face
from conformance.support.shallow import captured, interactive_model
from harness.models.sam3.capture import load_inputs
from harness.models.sam3.captures import CLICKS
from harness.models.sam3.fixtures import read_questions
from harness.models.sam3.images import preprocess
from harness.models.sam3.interactive.questions import QUESTIONS as INTERACTIVE
from harness.models.sam3.interactive.questions import Question
from harness.models.sam3.interactive.upstream import InteractivePrediction
from harness.models.sam3.scales import SCALES
from harness.models.sam3.upstream import upstream
from harness.parity.oracle import oracle
from harness.runtime import ObjectPrompt
from harness.runtime.sam3.images import load_image

transformers = pytest.importorskip(
    "transformers", "5.23", reason="Transformers is not installed: install the project with its extra [transformers]"
)

NEAR = {"rtol": 1e-5, "atol": 1e-5}
"""The strict gate, for what both compute in fp32."""

GATE = 1e-10
"""Largest difference in float64, of outputs of order one; differences that are meant are 10⁵ times as large."""

IMAGE_SIZE = 1008
"""Height and width of the model's square input, in whose pixels Transformers' model takes points and boxes."""

ROUNDS = ("click", "box", "refined", "objects")
"""Of `harness.models.sam3.tracker.clicks`: what `predict_inst` was asked, and what passed in it."""

QUESTIONS = {
    question.name: question
    for question in read_questions(INTERACTIVE, Question)
    if len(question.rounds) == 1 and question.float64
}
"""Questions without a mask, which takes minutes in float64."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Transformers' model, loaded by Transformers from a file in the video model's published layout, written here."""
    folder = tmp_path_factory.mktemp("sam3_tracker")
    config, scale = transformers.Sam3TrackerConfig(), SCALES["shallow"]
    trunk = config.vision_config.backbone_config
    trunk.num_hidden_layers = scale["ViT"]["depth"]
    trunk.global_attn_indexes = list(scale["ViT"]["global_att_blocks"])
    trunk.layer_norm_eps = 1e-5  # upstream's; `test_transformers.py` shows what Transformers' own does
    config.save_pretrained(folder)
    state = published(to_hugging_face(interactive_model().state_dict()))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    loaded, report = transformers.Sam3TrackerModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return loaded.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def embeddings(model: Any) -> list[torch.Tensor]:
    """What Transformers' model makes of the photograph: [1, 32, 288, 288], [1, 64, 144, 144], [1, 256, 72, 72]."""
    encoded: list[torch.Tensor] = model.get_image_embeddings(preprocess(load_image(load_inputs().image)))
    return encoded


def with_no_memory(model: Any, features: torch.Tensor) -> torch.Tensor:
    """The features [1, 256, 72, 72] as upstream decodes them on the first frame and on photographs."""
    return features + model.no_memory_embedding.view(1, -1, 1, 1)


# In fp32


def test_the_photograph_is_encoded_alike(model: Any, embeddings: list[torch.Tensor]) -> None:
    seen = captured(CLICKS)
    for found, expected in zip(embeddings[:2], (seen.high_res_0, seen.high_res_1), strict=True):
        torch.testing.assert_close(found, expected, **NEAR)
    torch.testing.assert_close(with_no_memory(model, embeddings[2]), seen.image_embed, **NEAR)


@pytest.mark.parametrize("name", ROUNDS)
def test_prompts_are_encoded_alike(name: str, model: Any) -> None:
    asked = getattr(captured(CLICKS), name)
    mask = asked.masks if asked.has_mask else None
    sparse, dense = model.prompt_encoder(asked.points[None], asked.labels[None], None, mask)
    torch.testing.assert_close(sparse[0], asked.sparse, **NEAR)
    torch.testing.assert_close(dense.expand_as(asked.dense), asked.dense, **NEAR)


@pytest.mark.parametrize("name", ROUNDS)
def test_masks_are_decoded_alike(name: str, model: Any) -> None:
    seen = captured(CLICKS)
    asked = getattr(seen, name)
    answer = model(
        image_embeddings=[seen.high_res_0, seen.high_res_1, seen.image_embed],
        input_points=asked.points[None],
        input_labels=asked.labels[None],
        input_masks=asked.masks if asked.has_mask else None,
        multimask_output=asked.logits.shape[1] > 1,
    )
    torch.testing.assert_close(answer.pred_masks[0], asked.logits, **NEAR)
    torch.testing.assert_close(answer.iou_scores[0], asked.ious, **NEAR)
    torch.testing.assert_close(answer.object_score_logits[0], asked.object_logits, **NEAR)


def test_a_click_is_answered_alike(model: Any, embeddings: list[torch.Tensor]) -> None:
    """From the photograph's pixels on, with `no_memory_embedding`; Transformers leaves it out, and its masks differ.

    Its neck makes four feature maps, of which it decodes three; the embedding is added to the fourth.
    """
    assert len(model.vision_encoder.config.scale_factors) == len(model.backbone_feature_sizes) + 1
    asked = captured(CLICKS).click
    prompt = {"input_points": asked.points[None], "input_labels": asked.labels[None]}
    *finer, features = embeddings
    answer = model(image_embeddings=[*finer, with_no_memory(model, features)], **prompt)
    torch.testing.assert_close(answer.pred_masks[0], asked.logits, **NEAR)
    torch.testing.assert_close(answer.iou_scores[0], asked.ious, **NEAR)
    own = model(image_embeddings=embeddings, **prompt)
    assert (own.pred_masks[0] - asked.logits).abs().max() > 0.1


def test_transformers_asks_with_two_points_of_no_kind_where_a_mask_is_alone(model: Any) -> None:
    """As upstream's tracker does; upstream's `predict_inst` asks with none, and gets other masks."""
    image_embed, *finer = test_interactive.features()
    mask = test_interactive.REFINED
    answer = model(image_embeddings=[*finer, image_embed], input_masks=torch.from_numpy(mask)[None, None])
    found = answer.pred_masks[0, 0].clip(-32, 32).numpy()
    expected, _ = test_interactive.asked_upstream(ObjectPrompt(mask=mask), True)
    assert np.abs(found - expected).max() > 1e-3
    # `predict_inst` itself adds the second one.
    expected, _ = test_interactive.asked_upstream(ObjectPrompt([(0, 0)], [-1], mask=mask), True)
    np.testing.assert_allclose(found, expected, **NEAR)


# In float64


class Transformers(torch.nn.Module):
    """Transformers' model, asked a question of one round about an encoded photograph."""

    def __init__(self, model: Any, question: Question) -> None:
        super().__init__()
        self.model = model
        self._question = question

    def forward(self, *features: torch.Tensor) -> list[torch.Tensor]:
        *finer, coarsest = features
        embeddings = [*finer, with_no_memory(self.model, coarsest)]
        (asked,) = self._question.rounds
        prompt: dict[str, Any] = {}
        if asked.points:
            prompt["input_points"] = torch.tensor(asked.points)[None, None] * IMAGE_SIZE
            prompt["input_labels"] = torch.tensor(asked.labels)[None, None]
        if asked.box:
            prompt["input_boxes"] = torch.tensor(asked.box)[None, None] * IMAGE_SIZE
        answer = self.model(image_embeddings=embeddings, multimask_output=self._question.multimask, **prompt)
        return [answer.pred_masks[0, 0], answer.iou_scores[0, 0]]


def encoded() -> tuple[torch.Tensor, ...]:
    """The photograph as upstream's `predict_inst` finds it."""
    seen = captured(CLICKS)
    no_memory = interactive_model().inst_interactive_predictor.model.no_mem_embed
    return seen.high_res_0, seen.high_res_1, seen.image_embed - no_memory.view(1, -1, 1, 1)


def asked_upstream(question: Question) -> dict[str, np.ndarray]:
    size = load_image(question.image).size
    with upstream():
        return oracle(
            InteractivePrediction(interactive_model(), size, question.rounds, question.multimask),
            encoded(),
            ("logits", "iou", "masks", "undecided"),
        )


def asked_transformers(model: Any, question: Question) -> dict[str, np.ndarray]:
    return oracle(Transformers(model, question), encoded(), ("logits", "iou"))


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_agree(name: str, model: Any) -> None:
    expected, found = asked_upstream(QUESTIONS[name]), asked_transformers(model, QUESTIONS[name])
    for output, array in found.items():
        assert array.dtype == expected[output].dtype == np.float64
        assert array.shape == expected[output].shape
        assert np.abs(expected[output]).max() > 0.1
        assert np.abs(array - expected[output]).max() < GATE, output
