"""Weights of outliers: what is measured of them is what `harness.models.sam3.outliers` states, and nothing overflows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.models.sam3.test_model_weights import digests
from conformance.support.shallow import drawn_by, interactive_model, photograph, shallow_model
from harness.core.errors import HarnessError
from harness.core.weights import Weights
from harness.models.sam3.build import build_architecture, build_model
from harness.models.sam3.outliers import (
    DEGREES_OF_FREEDOM,
    GAIN_SIGMA,
    LARGE_GAIN,
    MEDIAN_GAIN,
    STREAMS,
    Stream,
    concentrated_heads,
    outlier_weights,
)
from harness.models.sam3.upstream import upstream
from harness.models.sam3.weights import is_norm

KNOWN_VALUES = [0.0]
TRUNK, TEXT, GEOMETRY, FUSION, MEMORY = STREAMS


@pytest.fixture(autouse=True)
def outliers() -> Iterator[None]:
    with drawn_by(Weights.OUTLIERS):
        yield


@cache
def run() -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Results of residual blocks, and queries and keys of the trunk's attention, while the photograph is looked at."""
    model, streams, attended = shallow_model(), {}, {}
    original = torch.nn.functional.scaled_dot_product_attention
    blocks = {
        "trunk": model.backbone.vision_backbone.trunk.blocks,
        "text encoder": model.backbone.language_backbone.encoder.transformer.resblocks,
        "geometry encoder": model.geometry_encoder.encode,
        "fusion encoder": model.transformer.encoder.layers,
    }

    def keep(name: str) -> Any:
        def hook(_module: Any, _arguments: Any, result: Tensor) -> None:
            streams[name] = result

        return hook

    def look(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if q.shape[1] == 16 and q.shape[2] in (576, 5184):
            attended[f"{'windowed' if q.shape[2] == 576 else 'global'}"] = (q[:1, :, ::81], k[:1])
        return original(q, k, v, *arguments, **options)

    hooks = [each[-1].register_forward_hook(keep(name)) for name, each in blocks.items()]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
            photograph()
    finally:
        for hook in hooks:
            hook.remove()
    return streams, attended
