"""Weights with outliers: what is measured of them is what `harness.models.sam3.outliers` states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.models.sam3.test_model_parameters import (
    INVARIANT_PARAMETERS,
    PARTS,
    UNREAD_PARAMETERS,
    matching,
    without_effect,
)
from conformance.support.sentences import sentence
from conformance.support.shallow import drawn_by, interactive_model, photograph, shallow_model
from harness.core.case import Case, Weights
from harness.core.errors import HarnessError
from harness.core.settings import SEEDED, Settings
from harness.models.sam3.build import build_architecture, build_case
from harness.models.sam3.capture import capture, load_inputs
from harness.models.sam3.deployed.entry_points import programs
from harness.models.sam3.deployed.options import GROUNDING_ALONE
from harness.models.sam3.outliers import (
    GAIN_SIGMA,
    LARGE_GAIN,
    MEDIAN_GAIN,
    SHARPENING,
    STREAMS,
    concentrated_heads,
    outlier_weights,
)
from harness.models.sam3.upstream import upstream
from harness.models.sam3.weights import is_norm, seed_weights

TRUNK = "backbone.vision_backbone.trunk"
FC1 = f"{TRUNK}.blocks.0.mlp.fc1.weight"
QKV = f"{TRUNK}.blocks.0.attn.qkv.weight"
KNOWN_VALUES = [-0.023226026445627213, -0.039913129061460495, -0.0016564748948439956, 0.014759066514670849]
TAIL = 0.00356
"""What of Student's t with five degrees of freedom is beyond four standard deviations; of a normal variable 0.00006."""


@pytest.fixture(scope="module", autouse=True)
def outliers() -> Iterator[None]:
    with drawn_by(Weights.OUTLIERS):
        yield


@cache
def looked() -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """What runs through residual streams at their ends, and weights of attention by the number of keys of the trunk.

    Streams are [tokens, channels], by the names of `STREAMS`; weights of attention [heads, 64 queries, keys].
    The trunk runs here: `photograph` takes its outputs from an earlier process where there was one.
    """
    model = shallow_model()
    streams: dict[str, Tensor] = {}
    weights: dict[int, Tensor] = {}
    original = torch.nn.functional.scaled_dot_product_attention
    layers = {
        "trunk": model.backbone.vision_backbone.trunk.blocks,
        "text encoder": model.backbone.language_backbone.encoder.transformer.resblocks,
        "geometry encoder": model.geometry_encoder.encode,
        "fusion encoder": model.transformer.encoder.layers,
    }

    def keep(name: str) -> Any:
        def hook(_module: Any, _arguments: Any, result: Tensor) -> None:
            streams[name] = result.reshape(-1, result.shape[-1]).double()

        return hook

    def look(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if q.shape[1:] == k.shape[1:] == (16, k.shape[2], 64) and k.shape[2] in (576, 5184):
            some = q[0, :, :: k.shape[2] // 64][:, :64].double()
            weights[k.shape[2]] = torch.softmax(some @ k[0].double().transpose(-1, -2) / 8, -1)
        return original(q, k, v, *arguments, **options)

    hooks = [each[-1].register_forward_hook(keep(name)) for name, each in layers.items()]
    try:
        with pytest.MonkeyPatch.context() as patch, upstream():
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
            capture(model, load_inputs())
    finally:
        for hook in hooks:
            hook.remove()
    return streams, weights


def named(name: str) -> np.ndarray:
    """A parameter in float64."""
    return interactive_model().get_parameter(name).numpy().astype(np.float64)


def kurtosis(values: np.ndarray) -> float:
    """Excess kurtosis: 0 for normal values."""
    centered = values - values.mean()
    return float((centered**4).mean() / (centered**2).mean() ** 2 - 3)


def test_they_follow_from_seed_and_name_at_every_scale() -> None:
    full = build_architecture("full")
    names = {FC1, QKV, f"{TRUNK}.blocks.0.mlp.fc2.bias", f"{TRUNK}.blocks.1.norm1.weight"}
    outlier_weights(full, 0, names)
    for name in names:
        assert torch.equal(full.get_parameter(name), shallow_model().get_parameter(name)), name
        assert torch.equal(full.get_parameter(name), interactive_model().get_parameter(name)), name
    outlier_weights(full, 1, names)
    for name in names:
        assert not torch.equal(full.get_parameter(name), shallow_model().get_parameter(name)), name


def test_known_values() -> None:
    # Guards reports and caches of earlier runs: these numbers change only on purpose.
    np.testing.assert_array_equal(named(FC1)[0, :4], KNOWN_VALUES)


def test_every_tensor_is_finite_and_what_is_not_named_is_seeded() -> None:
    model = interactive_model()
    seeded = {"transformer.decoder.query_embed.weight", f"{TRUNK}.pos_embed", f"{TRUNK}.blocks.0.norm1.bias"}
    before = {name: model.get_parameter(name).clone() for name in seeded}
    seed_weights(model, 0, seeded)
    for name, values in before.items():
        assert torch.equal(model.get_parameter(name), values), name
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert (parameter != 0).float().mean() > 0.999, name


def test_products_have_the_tails_of_students_t() -> None:
    for name in (
        FC1,
        "transformer.encoder.layers.1.linear1.weight",
        "segmentation_head.pixel_decoder.conv_layers.0.weight",
    ):
        values = named(name)
        gain = 1.4 if "fc1" not in name else 1.0
        scaled = values / (gain / np.sqrt(np.prod(values.shape[1:])))
        assert scaled.std() == pytest.approx(1, rel=0.03), name
        assert (np.abs(scaled) > 4).mean() == pytest.approx(TAIL, rel=0.15), name
        assert kurtosis(values) > 3, name


def test_gains_span_three_decades() -> None:
    norms = [module for module in interactive_model().modules() if is_norm(module)]
    read = {id(parameter) for stream in STREAMS for parameter in gains_that_read(stream.readers)}
    gains = [n.weight.numpy().astype(np.float64) for n in norms if len(n.weight) >= 256 and id(n.weight) not in read]
    together = np.concatenate(gains)
    assert len(together) > 10_000
    logarithms = np.log(together[together != LARGE_GAIN])
    assert logarithms.std() == pytest.approx(GAIN_SIGMA, rel=0.03)
    assert logarithms.mean() == pytest.approx(np.log(MEDIAN_GAIN), abs=0.05)
    assert np.exp(2 * logarithms.mean() + 2 * logarithms.var()) == pytest.approx(1, rel=0.15)  # the mean square
    low, high = np.exp(np.quantile(logarithms, [0.001, 0.999]))
    assert np.log10(high / low) == pytest.approx(3, abs=0.15)
    assert all((each == LARGE_GAIN).sum() == len(each) // 256 for each in gains)


def gains_that_read(pattern: str) -> list[Tensor]:
    return [p for name, p in interactive_model().named_parameters() if re.fullmatch(pattern, name)]


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name.replace(" ", "_"))
def test_a_few_channels_are_massive(stream: Any) -> None:
    (source,) = (p for name, p in interactive_model().named_parameters() if re.fullmatch(stream.source, name))
    readers = gains_that_read(stream.readers)
    assert readers
    massive = stream.massive(0, len(source))
    assert len(set(massive)) == stream.channels
    assert source[massive].abs().eq(stream.size).all()
    assert (source.abs() == stream.size).sum() == stream.channels
    assert all(torch.allclose(gain[massive], torch.tensor(MEDIAN_GAIN, dtype=torch.float32)) for gain in readers)


# The next two every night, as the cases with outliers are: by day their weights alone are looked at.
@pytest.mark.wide
@pytest.mark.parametrize("stream", STREAMS[:4], ids=lambda stream: stream.name.replace(" ", "_"))
def test_they_are_a_hundred_times_the_median_and_carry_the_energy(stream: Any) -> None:
    activations = looked()[0][stream.name]
    massive = stream.massive(0, activations.shape[1])
    others = np.setdiff1d(np.arange(activations.shape[1]), massive)
    ratio = activations[:, massive].abs().median() / activations.abs().median()
    assert 60 < ratio < 160, ratio
    energy = activations.square().mean(0)
    assert energy[massive].sum() > 0.8 * energy.sum()
    assert energy[massive].min() > 5 * energy[others].max()
    # They act as biases: alike for every token.
    assert (activations[:, massive].std(0) < 0.2 * activations[:, massive].mean(0).abs()).all()


@pytest.mark.wide
@pytest.mark.parametrize(("block", "keys"), [(0, 576), (1, 5184)])
def test_attention_concentrates_in_a_quarter_of_the_heads(block: int, keys: int) -> None:
    weights = looked()[1][keys]
    perplexity = torch.exp(-(weights * weights.clamp_min(1e-300).log()).sum(-1)).median(1).values
    sharp = concentrated_heads(0, f"{TRUNK}.blocks.{block}.attn", 16)
    others = [head for head in range(16) if head not in sharp]
    assert len(sharp) == 4
    assert perplexity[sharp].max() < 0.05 * keys
    assert perplexity[sharp].median() < 0.3 * perplexity[others].median()
    assert perplexity[others].median() > 0.02 * keys


def test_queries_and_keys_of_those_heads_alone_are_larger() -> None:
    sharp = concentrated_heads(0, f"{TRUNK}.blocks.0.attn", 16)
    sizes = np.sqrt((named(QKV).reshape(3, 16, -1) ** 2).mean(-1)) * 32 / 1.4
    for head in range(16):
        larger = SHARPENING if head in sharp else 1
        assert sizes[:, head] == pytest.approx([larger, larger, 1], rel=0.05)


# Both every night, as the cases with outliers are.
@pytest.mark.wide
def test_outputs_are_finite() -> None:
    for name, tensor in photograph().items():
        if tensor.is_floating_point():
            assert torch.isfinite(tensor).all(), name
            assert tensor.std() > 1e-3 or tensor.numel() == 1, name


@pytest.mark.wide
@pytest.mark.parametrize("part", ["scoring_head"])
def test_every_parameter_matters(part: str) -> None:
    exempt = set(matching([*UNREAD_PARAMETERS, *INVARIANT_PARAMETERS]))
    names = [name for name in matching([PARTS[part][0]]) if name not in exempt]
    assert names
    assert without_effect(part, names) == []


def test_a_compiled_model_has_the_weights_of_its_case() -> None:
    case = Case("", "real", "llvm", "shallow", weights=Weights.OUTLIERS.value)
    with upstream():
        encoding = next(programs(case, SEEDED, GROUNDING_ALONE))
    (found,) = [tensor for name, tensor in encoding.module.state_dict().items() if FC1.endswith(name)]
    np.testing.assert_array_equal(found, named(FC1))


def test_a_checkpoint_has_weights_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=sentence("checkpoint-has-weights", weights="outliers")):
        build_case(Case("", "real", "llvm", weights="outliers"), Settings(tmp_path / "sam3.pt"))
