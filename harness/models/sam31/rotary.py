"""Defines the rotary attention of SAM 3.1's tracker, whose rotation a strategy replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.compiler.lowering.rotation import RotaryAttention, Rotation, Tables

if TYPE_CHECKING:
    import torch


def _apply_rope(rotation: Rotation, tables: Callable[[], Tables], _positions: int) -> Any:
    """Returns a replacement of `SimpleRoPEAttention.apply_rope`."""

    def apply_rope(_self: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotation.apply(q, k, tables(), k.shape[-2] // q.shape[-2])

    return apply_rope


TRACKER = RotaryAttention(
    ("harness.models.sam31.memory_attention", "SimpleRoPEAttention"), "freqs_cis", "apply_rope", _apply_rope
)
