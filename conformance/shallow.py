"""The shallow model with seed 0, built once per process."""

from __future__ import annotations

from functools import cache
from typing import Any

from harness.model.build import build_model


@cache
def shallow_model() -> Any:
    """`build_model("shallow", 0)`; shared, so whoever changes it must put it back."""
    return build_model("shallow", 0)
