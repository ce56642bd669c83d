"""Preprocessing is upstream's, bit by bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from conformance.support.examples import examples
from conformance.support.sentences import sentence
from harness.core.errors import HarnessError
from harness.models.sam3.images import preprocess
from harness.models.sam3.upstream import import_sam3
from harness.runtime.sam3.images import RESOLUTION, load_image

pytestmark = pytest.mark.law

PHOTOGRAPHS = sorted((Path(__file__).resolve().parents[3] / "fixtures" / "images").glob("*.png"))


@cache
def upstream_transform() -> Any:
    import_sam3()
    from sam3.model.sam3_image_processor import Sam3Processor

    return Sam3Processor(model=None, device="cpu").transform


def upstream_preprocess(image: Image.Image) -> torch.Tensor:
    """What `Sam3Processor.set_image` feeds to the backbone."""
    from torchvision.transforms import v2

    result: torch.Tensor = upstream_transform()(v2.functional.to_image(image)).unsqueeze(0)
    return result


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.stem)
def test_preprocess_is_bitwise_upstreams(path: Path) -> None:
    image = load_image(path)
    ours, theirs = preprocess(image), upstream_preprocess(image)
    assert type(ours) is torch.Tensor
    assert ours.dtype == theirs.dtype == torch.float32
    assert ours.shape == (1, 3, RESOLUTION, RESOLUTION)
    assert torch.equal(ours, theirs)
    assert ours.std() > 0.2


@examples(12)
@given(width=st.integers(1, 2100), height=st.integers(1, 1300), seed=st.integers(0, 2**32 - 1))
def test_preprocess_is_bitwise_upstreams_for_any_size(width: int, height: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    assert torch.equal(preprocess(image), upstream_preprocess(image))


def test_preprocessing_nothing() -> None:
    with pytest.raises(HarnessError, match=sentence("no-pixels")):
        preprocess(Image.new("RGB", (0, 5)))
