"""Defines the strategy `tensorir`: one operator of this project rotates queries and keys, by one kernel in TensorIR.

The rotation is that of `real`. On the CPU the kernel is folded into the attention that reads its results, if there is
such an attention (`harness.compiler.schedules.common.folding`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from harness.compiler.lowering.rope.real import real_rotation
from harness.compiler.lowering.rotation import use_rotation
from harness.compiler.lowering.strategy import Strategy

if TYPE_CHECKING:
    import torch


def _apply(module: torch.nn.Module) -> AbstractContextManager[None]:
    from harness.compiler.lowering.rope.operators import rotate_pairs

    return use_rotation(module, real_rotation(rotate_both=rotate_pairs.rotate))


def _converters() -> Mapping[str, Callable[..., Any]]:
    from harness.compiler.lowering.rope.operators.rotate_pairs import OPERATOR, convert

    return {OPERATOR: convert}


TENSORIR = Strategy(
    name="tensorir",
    summary="one custom operator for queries and keys, lowered to a TensorIR kernel or folded into attention",
    apply=_apply,
    converters=_converters,
)
