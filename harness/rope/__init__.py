"""Strategies: ways to get rotary position encoding (complex64 upstream) through the compiler, one file each."""

from __future__ import annotations

from harness.rope.converter import CONVERTER
from harness.rope.llm import LLM
from harness.rope.lowering import LOWERING
from harness.rope.none import NONE
from harness.rope.real import REAL
from harness.rope.strategy import Strategy
from harness.rope.tensorir import TENSORIR

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
"""Every strategy by name, in the order in which they are listed; a new one is one file and one line here."""

__all__ = ["STRATEGIES", "Strategy"]
