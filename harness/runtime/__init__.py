"""Running compiled models: NumPy in, NumPy out; never torch or sam3, and nothing else of the project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.runtime.sam3.interactive import ObjectPrompt, Prediction
    from harness.runtime.sam3.model import EncodedImage, Found, Outputs, Sam3
    from harness.runtime.sam3.prompts import Prompt

__all__ = ["EncodedImage", "Found", "ObjectPrompt", "Outputs", "Prediction", "Prompt", "Sam3"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for: the command needs little of this folder."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harness.runtime.sam3 import interactive, model, prompts

    return getattr(next(module for module in (prompts, interactive, model) if hasattr(module, name)), name)
