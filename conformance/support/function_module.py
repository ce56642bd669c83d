"""Wraps a function as a module, to export it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class FunctionModule(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        """Returns the result of the function."""
        return self.function(*args)
