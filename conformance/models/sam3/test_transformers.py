"""Transformers' SAM 3, which nobody here wrote, and upstream's on the same weights compute the same.

Both run in float64, every operator of theirs, so what is left of a difference is meant and not rounded.
It takes the extra `transformers` (some 140 MB) and about two minutes:

    pip install --constraint constraints.txt --editable ".[test,transformers]"
    pytest conformance/models/sam3/test_transformers.py
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conformance.models.sam3.test_hugging_face import LAYOUT, POSITIONS, published, shapes, theirs
from conformance.support.shallow import shallow_model
from harness.models.sam3.build import build_architecture
from harness.models.sam3.capture import load_inputs
from harness.models.sam3.checkpoints.hugging_face import POINTS
from harness.models.sam3.checkpoints.loading import load_checkpoint
from harness.models.sam3.images import preprocess
from harness.models.sam3.scales import SCALES
from harness.models.sam3.upstream import upstream
from harness.parity.oracle import oracle
from harness.runtime.sam3.images import load_image

transformers = pytest.importorskip(
    "transformers", "5.23", reason="Transformers is not installed: install the project with its extra [transformers]"
)

GATE = 1e-10
"""Largest difference in float64, of outputs of order one; differences that are meant are 10⁵ times as large."""

CASES = ("text", "boxes", "text without the CLS token")
OUTPUTS = ("logits", "boxes_xyxy", "masks", "presence", "semantic")
NAMES = ("fpn_0", "fpn_1", "fpn_2", *(f"{case}: {output}" for case in CASES for output in OUTPUTS))
BOXES = torch.tensor([[0.48, 0.52, 0.55, 0.62], [0.8, 0.2, 0.25, 0.3]]).view(-1, 1, 4)
LABELS = torch.tensor([1, 0]).view(-1, 1)
UPSTREAMS_EPSILON = 1e-5


def configuration(epsilon: float = UPSTREAMS_EPSILON) -> Any:
    """Transformers' own configuration, with the shallow model's depths and another epsilon in the trunk."""
    config, scale = transformers.Sam3Config(), SCALES["shallow"]
    trunk = config.vision_config.backbone_config
    trunk.num_hidden_layers = scale["ViT"]["depth"]
    trunk.global_attn_indexes = list(scale["ViT"]["global_att_blocks"])
    trunk.layer_norm_eps = epsilon
    config.text_config.num_hidden_layers = scale["VETextEncoder"]["layers"]
    config.geometry_encoder_config.num_layers = scale["SequenceGeometryEncoder"]["num_layers"]
    config.detr_encoder_config.num_layers = scale["TransformerEncoderFusion"]["num_layers"]
    config.detr_decoder_config.num_layers = scale["TransformerDecoder"]["num_layers"]
    return config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Transformers' model, loaded by Transformers from a file in its published layout, written here."""
    folder = tmp_path_factory.mktemp("sam3")
    configuration().save_pretrained(folder)
    save_file(published(theirs()), folder / "model.safetensors", metadata={"format": "pt"})
    loaded, report = transformers.Sam3Model.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return loaded.eval().requires_grad_(False)


def widen_tables(model: Any) -> None:
    """Makes Transformers' rotary tables again; inside the oracle, in float64."""
    for layer in model.vision_encoder.backbone.layers:
        layer.position_ids = layer.precompute_positions(layer.config, layer.window_size)
        layer.rotary_emb.inv_freq, _ = layer.rotary_emb.compute_axial_rope_parameters(layer.config)


class Transformers(torch.nn.Module):
    """Every case with Transformers' model; the image is encoded once."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, image: torch.Tensor, tokens: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor
    ) -> list[torch.Tensor]:
        widen_tables(self.model)
        encoded = self.model.get_vision_features(image)
        # A box that is padding brings the CLS token along, which Transformers leaves out where there are no boxes.
        cases: dict[str, dict[str, Any]] = {
            "text": {"input_boxes": boxes[:1].transpose(0, 1), "input_boxes_labels": torch.full((1, 1), -10)},
            "boxes": {"input_boxes": boxes.transpose(0, 1), "input_boxes_labels": labels.transpose(0, 1)},
            "text without the CLS token": {},
        }
        outputs = list(encoded.fpn_hidden_states[:3])
        for case in CASES:
            mask = (tokens != 0).long()
            out = self.model(vision_embeds=encoded, input_ids=tokens, attention_mask=mask, **cases[case])
            outputs += [out.pred_logits, out.pred_boxes, out.pred_masks, out.presence_logits, out.semantic_seg]
        return outputs


class Upstream(torch.nn.Module):
    """Every case with upstream's model, through its own `forward_grounding`."""

    def __init__(self, model: Any, text: str) -> None:
        super().__init__()
        self.model = model
        self.text = text

    def forward(self, image: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        for block in self.model.backbone.vision_backbone.trunk.blocks:
            block.attn._setup_rope_freqs()
        encoded = self.model.backbone.forward_image(image)
        encoded.update(self.model.backbone.forward_text([self.text], device="cpu"))
        outputs = list(encoded["backbone_fpn"])
        for case in CASES:
            count = len(boxes) if case == "boxes" else 0
            hooks = [self.model.geometry_encoder.register_forward_hook(hidden)] if "without" in case else []
            out = self._ground(dict(encoded), boxes[:count], labels[:count])
            outputs += [out["pred_logits"].squeeze(-1), out["pred_boxes_xyxy"], out["pred_masks"]]
            outputs += [out["presence_logit_dec"], out["semantic_seg"]]
            for hook in hooks:
                hook.remove()
        return outputs

    def _ground(self, encoded: dict[str, Any], boxes: torch.Tensor, labels: torch.Tensor) -> Any:
        from sam3.model.data_misc import FindStage
        from sam3.model.geometry_encoders import Prompt

        first = torch.zeros(1, dtype=torch.long)
        absent = ("boxes", "boxes_mask", "boxes_label", "points", "points_mask")
        return self.model.forward_grounding(
            backbone_out=encoded,
            find_input=FindStage(img_ids=first, text_ids=first, **{f"input_{name}": None for name in absent}),
            find_target=None,
            geometric_prompt=Prompt(
                box_embeddings=boxes, box_mask=torch.zeros(1, len(boxes), dtype=torch.bool), box_labels=labels
            ),
        )


def hidden(_module: torch.nn.Module, _inputs: Any, result: Any) -> Any:
    """What the geometry encoder returns, all of it masked as padding: its CLS token is not seen."""
    features, mask = result
    return features, torch.ones_like(mask)


@cache
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """The photograph [1, 3, 1008, 1008] and its text's tokens [1, 32]."""
    prompts = load_inputs()
    tokenizer = shallow_model().backbone.language_backbone.tokenizer
    return preprocess(load_image(prompts.image)), tokenizer([prompts.text], context_length=32)


@pytest.fixture(scope="module")
def upstreams() -> dict[str, np.ndarray]:
    with upstream():
        module = Upstream(shallow_model(), load_inputs().text)
        return oracle(module, (inputs()[0], BOXES, LABELS), NAMES)


@pytest.fixture(scope="module")
def transformers_own(model: Any) -> dict[str, np.ndarray]:
    return oracle(Transformers(model), (*inputs(), BOXES, LABELS), NAMES)


def test_the_names_in_fixtures_are_transformers_own(model: Any) -> None:
    assert shapes(model.state_dict()) == json.loads(LAYOUT.read_text(encoding="utf-8"))


def test_what_transformers_saves_is_loaded_bit_for_bit(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = build_architecture("shallow")
    with pytest.warns(UserWarning, match="no weights for point prompts"):
        left_out = load_checkpoint(loaded, tmp_path / "model.safetensors")
    assert all(POINTS.fullmatch(name) for name in left_out)
    for name, parameter in loaded.named_parameters():
        expected = shallow_model().get_parameter(name)
        if name == POSITIONS:  # without the class token's, which the layout does not have
            parameter, expected = parameter[:, 1:], expected[:, 1:]
        assert name in left_out or torch.equal(parameter, expected), name


@pytest.mark.parametrize("name", NAMES)
def test_outputs_agree(name: str, upstreams: dict[str, Any], transformers_own: dict[str, Any]) -> None:
    expected, found = upstreams[name], transformers_own[name]
    assert expected.dtype == found.dtype == np.float64
    assert expected.shape == found.shape
    assert np.abs(expected).max() > 0.1
    assert np.abs(found - expected).max() < GATE


@pytest.mark.parametrize("output", OUTPUTS)
def test_transformers_leaves_the_cls_token_out_of_a_text_alone(
    output: str, upstreams: dict[str, Any], transformers_own: dict[str, Any]
) -> None:
    """Its model runs the geometry encoder only if there are boxes; upstream's always, for the CLS token."""
    found = transformers_own[f"text without the CLS token: {output}"]
    assert np.abs(found - upstreams[f"text: {output}"]).max() > 1e-3


class Features(torch.nn.Module):
    """The coarsest feature map that Transformers' model makes with an epsilon of its trunk's LayerNorms."""

    def __init__(self, model: Any, epsilon: float) -> None:
        super().__init__()
        self.model = model
        self.epsilon = epsilon

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        widen_tables(self.model)
        for module in self.model.vision_encoder.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = self.epsilon
        features: torch.Tensor = self.model.get_vision_features(image).fpn_hidden_states[2]
        return features


def test_transformers_has_another_epsilon_in_the_trunk(model: Any, upstreams: dict[str, Any]) -> None:
    """1e-6 by default instead of 1e-5, which moves the features by more than PyTorch's rounding, by up to 2e-4."""
    trunk = shallow_model().backbone.vision_backbone.trunk
    assert {module.eps for module in trunk.modules() if isinstance(module, torch.nn.LayerNorm)} == {UPSTREAMS_EPSILON}
    default = transformers.Sam3Config().vision_config.backbone_config.layer_norm_eps
    assert default == 1e-6
    found = oracle(Features(model, default), inputs()[:1], ["fpn_2"])["fpn_2"]
    assert 1e-5 < np.abs(found - upstreams["fpn_2"]).max() < 1e-3


class Attentions(torch.nn.Module):
    """The first block's attention: upstream's, Transformers', Transformers' with rows as for rotated halves."""

    def __init__(self, ours: Any, model: Any) -> None:
        super().__init__()
        self.ours = ours
        self.model = model

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.ours._setup_rope_freqs()
        widen_tables(self.model)
        layer = self.model.vision_encoder.backbone.layers[0]
        attention, tables = layer.attention, layer.rotary_emb(x, layer.position_ids)
        outputs = [self.ours(x), attention(x, tables)[0]]
        for projection in (attention.q_proj, attention.k_proj):
            for name, rows in list(projection.named_parameters()):
                pairs = rows.unflatten(0, (attention.num_attention_heads, attention.head_dim // 2, 2))
                halves = pairs.transpose(1, 2).flatten(0, 2)
                setattr(projection, name, torch.nn.Parameter(halves, requires_grad=False))
        return [*outputs, attention(x, tables)[0]]


def test_queries_and_keys_keep_upstreams_order(model: Any) -> None:
    """Transformers rotates neighbours, as upstream does: rows that are permuted would be wrong."""
    x = torch.randn(1, 24, 24, 1024, generator=torch.Generator().manual_seed(0))
    with upstream():
        attention = shallow_model().backbone.vision_backbone.trunk.blocks[0].attn
        out = oracle(Attentions(attention, model), (x,), ["upstream", "transformers", "permuted"])
    assert np.abs(out["transformers"] - out["upstream"]).max() < GATE
    assert np.abs(out["permuted"] - out["upstream"]).max() > 0.01
