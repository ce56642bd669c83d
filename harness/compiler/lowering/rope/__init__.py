"""Registers the strategies that bring rotary position encoding (complex64 upstream) through the compiler."""

from __future__ import annotations

from harness.compiler.lowering.rope.converter import CONVERTER
from harness.compiler.lowering.rope.llm import LLM
from harness.compiler.lowering.rope.lowering import LOWERING
from harness.compiler.lowering.rope.none import NONE
from harness.compiler.lowering.rope.real import REAL
from harness.compiler.lowering.rope.tensorir import TENSORIR
from harness.compiler.lowering.strategy import Strategy

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
