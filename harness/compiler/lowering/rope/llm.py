"""Defines the strategy `llm`: TVM's rotary position encoding of language models, once for each axis of the image.

Axial RoPE is two one-dimensional interleaved (GPT-J style) RoPEs of half a head each. A position map gives, for every
token and axis, the row of a one-dimensional table that holds its scaled position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from harness.compiler.lowering.rotation import Rotation, use_rotation
from harness.compiler.lowering.strategy import Strategy

if TYPE_CHECKING:
    import torch


def _apply(module: torch.nn.Module) -> AbstractContextManager[None]:
    from harness.compiler.lowering.rope.operators import position_maps

    names = ("rope_positions", "rope_table")
    return use_rotation(module, Rotation(names, position_maps.from_table, position_maps.axial, position_maps.rotate))


def _converters() -> Mapping[str, Callable[..., Any]]:
    from harness.compiler.lowering.rope.operators.position_maps import OPERATOR, convert

    return {OPERATOR: convert}


LLM = Strategy(
    name="llm",
    summary="TVM's RoPE of language models, one for each axis, with position maps and upstream's scaled positions",
    apply=_apply,
    converters=_converters,
)
