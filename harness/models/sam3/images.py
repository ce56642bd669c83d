"""Preprocesses images as upstream does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.core.errors import HarnessError
from harness.runtime.sam3.images import RESOLUTION

if TYPE_CHECKING:
    import torch
    from PIL import Image


def preprocess(image: Image.Image) -> torch.Tensor:
    """Returns the model's input, bitwise equal to `Sam3Processor.transform`: 8-bit antialiased bilinear, then -1…1.

    Returns:
        fp32 [1, 3, 1008, 1008].

    Raises:
        HarnessError: The image has no pixels.
    """
    import torch
    from torchvision.transforms import v2

    if min(image.size) < 1:
        raise HarnessError(f"The image has no pixels ({image.width}x{image.height}); use another one.")
    pixels = v2.functional.to_image(image.convert("RGB"))
    resized = v2.functional.resize(
        pixels, [RESOLUTION, RESOLUTION], interpolation=v2.InterpolationMode.BILINEAR, antialias=True
    )
    scaled = v2.functional.to_dtype(resized, torch.float32, scale=True)
    normalized: torch.Tensor = v2.functional.normalize(scaled, mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])
    return normalized.as_subclass(torch.Tensor).unsqueeze(0)
