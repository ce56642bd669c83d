"""Runs compiled models on NumPy arrays, without torch, sam3 or any other package of this project."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import EncodedImage
    from harness.runtime.sam3.interactive import ObjectPrompt, Prediction
    from harness.runtime.sam3.model import Sam3
    from harness.runtime.sam3.prompts import Prompt
    from harness.runtime.sam3.segmentation import Found, Outputs

__all__ = ["EncodedImage", "Found", "ObjectPrompt", "Outputs", "Prediction", "Prompt", "Sam3"]

_MODULES = {
    "EncodedImage": "image_model",
    "Found": "segmentation",
    "ObjectPrompt": "interactive",
    "Outputs": "segmentation",
    "Prediction": "interactive",
    "Prompt": "prompts",
    "Sam3": "model",
}
"""The module of `harness.runtime.sam3` that defines each public name."""


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, so that importing one part of this package loads little of the rest."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"harness.runtime.sam3.{_MODULES[name]}"), name)
