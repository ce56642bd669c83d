"""Registers the strategies that bring rotary position encoding (complex64 upstream) through the compiler."""

from __future__ import annotations

from harness.lowering.rope.converter import CONVERTER
from harness.lowering.rope.llm import LLM
from harness.lowering.rope.lowering import LOWERING
from harness.lowering.rope.none import NONE
from harness.lowering.rope.real import REAL
from harness.lowering.rope.tensorir import TENSORIR
from harness.lowering.strategy import Strategy

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        NONE,
        REAL,
        LOWERING,
        CONVERTER,
        LLM,
        TENSORIR,
    )
}
"""Every strategy by name, in the order of listings; a new strategy is one file and one line here."""

__all__ = ["STRATEGIES", "Strategy"]
