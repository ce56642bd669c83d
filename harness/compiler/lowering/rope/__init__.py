"""Registers the strategies that bring rotary position encoding (complex64 upstream) through the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from harness.compiler.lowering.strategy import Strategy


def _strategies() -> Iterator[Strategy]:
    """Yields the strategies that the modules of this package define."""
    for module in iter_modules(__path__, f"{__name__}."):
        if not module.ispkg:
            yield from (value for value in vars(import_module(module.name)).values() if isinstance(value, Strategy))


_FIRST = ("none", "real", "lowering", "converter")
"""The strategies that listings begin with; the others follow by name."""


def _position(strategy: Strategy) -> tuple[int, str]:
    return (_FIRST.index(strategy.name) if strategy.name in _FIRST else len(_FIRST), strategy.name)


STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in sorted(_strategies(), key=_position)}
"""Every strategy by name, in the order of listings; a new strategy is one file of this folder."""

__all__ = ["STRATEGIES", "Strategy"]
