"""What a strategy is: one way to get rotary position encoding (complex64 upstream) through the compiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Strategy:
    """One way to get complex RoPE through the compiler.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        apply: Changes the module for the duration of the context, so that torch.export sees the strategy's form; leaves
            module and upstream classes as they were afterwards.
    """

    name: str
    summary: str
    apply: Callable[[torch.nn.Module], AbstractContextManager[None]]
