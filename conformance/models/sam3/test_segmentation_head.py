"""The segmentation head as it is deployed; test_artifact and test_end_to_end hold the whole of it to upstream's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from conformance.support.examples import examples
from harness.models.sam3.deployed.segmentation import ComposedConvolution, UpsampledConvolution

pytestmark = pytest.mark.law

EXTENTS = st.integers(1, 5)


@given(batch=EXTENTS, channels=EXTENTS, filters=EXTENTS, height=EXTENTS, width=EXTENTS, seed=st.integers(0, 99))
@examples(50, deadline=None)
def test_it_is_the_convolution_of_the_upsampled_image(
    batch: int, channels: int, filters: int, height: int, width: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, channels, height, width, generator=random, dtype=torch.float64)
    weight = torch.randn(filters, channels, 3, 3, generator=random, dtype=torch.float64)
    expected = F.conv2d(F.interpolate(image, scale_factor=2, mode="nearest"), weight, padding=1)
    for module in (UpsampledConvolution(weight), ComposedConvolution(weight)):
        torch.testing.assert_close(module(image), expected, rtol=1e-12, atol=1e-12)
