"""Seeded weights: the same everywhere, never degenerate, and activations in the range where errors show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.support.shallow import interactive_model, photograph, shallow_model
from harness.models.sam3.build import build_architecture
from harness.models.sam3.weights import generator, seed_weights

ROOT = Path(__file__).resolve().parents[3]


KNOWN_VALUES = [-0.121470004, -0.6631228, 0.75620335, -0.046127237]


def digests(model: Any) -> dict[str, str]:
    """Name → hash of the bits of every parameter and buffer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: blake2b(torch.view_as_real(t).numpy() if t.is_complex() else t.numpy(), digest_size=8).hexdigest()
        for name, t in named
    }


@cache
def interactive_digests() -> dict[str, str]:
    return digests(interactive_model())


def test_equal_in_another_process_and_after_other_random_numbers() -> None:
    script = (
        "import json, torch\n"
        "torch.manual_seed(7); torch.rand(3)\n"
        "from conformance.models.sam3.test_model_weights import digests, interactive_model\n"
        "print(json.dumps(digests(interactive_model())))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == interactive_digests()


def test_interactive_model_has_the_same_weights_and_more() -> None:
    plain, interactive = digests(shallow_model()), interactive_digests()
    assert plain.items() < interactive.items()


def test_same_name_same_values_at_full_scale() -> None:
    full = build_architecture("full")
    shared = dict(shallow_model().named_parameters())
    seed_weights(full, 0, set(shared))
    assert set(shared) < set(dict(full.named_parameters()))
    for name, parameter in shared.items():
        assert torch.equal(full.get_parameter(name), parameter), name


def test_known_values() -> None:
    # Guards reports and caches of earlier runs: these numbers change only on purpose.
    parameter = shallow_model().get_parameter("transformer.decoder.query_embed.weight")
    np.testing.assert_array_equal(parameter[0, :4].numpy(), np.array(KNOWN_VALUES, np.float32))


def test_seeds_and_names_give_different_numbers() -> None:
    drawn = {
        (seed, name): generator(seed, name).standard_normal(4).tobytes()
        for seed in (0, 1, 10, -1)
        for name in ("a.weight", "a.bias", "1:a", "")
    }
    assert len(set(drawn.values())) == len(drawn)


def test_other_seed_changes_every_parameter_and_names_restrict_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Embedding(3, 8))
    model.requires_grad_(False)
    seed_weights(model, 0)
    first = digests(model)
    seed_weights(model, 1)
    second = digests(model)
    assert all(first[name] != second[name] for name in first)
    seed_weights(model, 0, {"0.weight"})
    assert [name for name in first if digests(model)[name] == first[name]] == ["0.weight"]


def test_single_numbers_are_not_near_zero_for_any_seed() -> None:
    model = torch.nn.Linear(4, 1).requires_grad_(False)
    for seed in range(200):
        seed_weights(model, seed)
        assert 0.02 < model.bias.abs() < 0.25


def test_no_parameter_of_full_starts_like_another() -> None:
    names = list(dict(build_architecture("full", interactive=True).named_parameters()))
    starts = {generator(0, name).standard_normal(8, dtype=np.float32).tobytes() for name in names}
    assert len(starts) == len(names) > 1000


def test_no_degenerate_tensor() -> None:
    for name, parameter in interactive_model().named_parameters():
        values = parameter.numpy().reshape(-1)
        assert values.min() > -8 and values.max() < 8, name  # no comparison with NaN is true
        assert np.count_nonzero(values) > (1 - 1e-5) * values.size, name  # a normal is zero once in 17 million
        # What this tensor adds to a sum of as many terms is of order one, and nowhere near 1e-6.
        assert np.linalg.norm(values) > 0.02, name
        if values.size > 1:
            assert values.std() > 1e-3, name
            some = values[:: max(1, values.size // 10_000)]
            assert len(np.unique(some)) > 0.5 * min(some.size, 10_000), name
    hashes = interactive_digests()
    parameters = [hashes[name] for name, _ in interactive_model().named_parameters()]
    assert len(set(parameters)) == len(parameters)


def test_outputs_are_finite_and_of_order_one() -> None:
    seen = photograph()
    for name, tensor in seen.items():
        if tensor.is_floating_point():
            assert torch.isfinite(tensor).all(), name
            assert tensor.abs().max() < 40, name
    for name in ("img_feats", "fpn_0", "fpn_1", "text_features", "geometry_features", "memory", "hs"):
        assert 0.3 < seen[name].std() < 4, name


def test_scores_boxes_and_masks_are_not_saturated() -> None:
    seen = photograph()
    assert seen.pred_logits.abs().max() < 11.5  # upstream clamps at 12
    assert seen.pred_logits.std() > 0.1
    assert 0.05 < seen.presence_logits.abs().max() < 8
    assert seen.pred_boxes.min() > 1e-3
    assert seen.pred_boxes.max() < 1 - 1e-3
    assert seen.pred_boxes.flatten(0, 1).std(0).min() > 0.05
    moved = (seen.reference_boxes[1] - seen.reference_boxes[0]).abs()
    assert 0.01 < moved.mean() < 0.2
    for logits in (seen.pred_masks, seen.semantic_seg):
        assert 0.1 < (logits > 0).float().mean() < 0.9
    assert seen.pred_masks.std((2, 3)).min() > 0.3


def test_queries_and_tokens_do_not_collapse() -> None:
    seen = photograph()
    assert seen.hs[-1].std(1).mean() > 0.3  # across the 200 queries
    assert seen.memory.std(0).mean() > 0.3  # across the 5184 tokens
    assert seen.img_feats.std(0).mean() > 0.3


def weights_of_attention(block: int) -> torch.Tensor:
    """Softmax weights [heads, 64 queries, keys] in one ViT block on the photograph."""
    trunk = shallow_model().backbone.vision_backbone.trunk
    attention = trunk.blocks[block].attn
    captured: list[tuple[torch.Tensor, ...]] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def look(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        captured.append((q, k))
        return original(q, k, v)

    generator_ = torch.Generator().manual_seed(0)
    size = attention.input_size[0]
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
        attention(trunk.blocks[block].norm1(torch.randn(1, size, size, 1024, generator=generator_)))
    q, k = captured[0]
    return torch.softmax(q[0, :, ::81][:, :64] @ k[0].transpose(-1, -2) / q.shape[-1] ** 0.5, -1)


@pytest.mark.parametrize("block", [0, 1])
def test_attention_is_neither_uniform_nor_one_hot(block: int) -> None:
    weights = weights_of_attention(block)
    keys = weights.shape[-1]
    perplexity = torch.exp(-(weights * weights.clamp_min(1e-30).log()).sum(-1))
    assert perplexity.median() < 0.6 * keys
    assert perplexity.median() > 4
    assert weights.amax(-1).median() < 0.5
