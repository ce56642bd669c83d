"""Defines the strategy `none`: upstream's unchanged complex RoPE, the control that fails at import on complex64."""

from __future__ import annotations

from harness.compiler.lowering.strategy import Strategy

NONE = Strategy(
    name="none",
    summary="upstream's complex64 RoPE, untouched: the control, which the Relax import cannot take",
)
