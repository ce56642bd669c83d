"""Defines `sam3-tvm list`: lists every name that an option takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from harness.cli.console import console
from harness.compiler.lowering.frontends import FRONTENDS
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.targets import TARGETS
from harness.core.case import DEFAULT_STRATEGY, Scale, Weights
from harness.core.precision import PRECISIONS
from harness.models.registry import subjects
from harness.models.selection import strategies_of


def list_() -> None:
    """List components, strategies, targets, precisions, frontends, weights and scales."""
    components = Table("component", "what", "inputs", "outputs", "strategies", title="Components")
    for entry in subjects().values():
        components.add_row(
            entry.name,
            entry.summary,
            ", ".join(entry.inputs),
            ", ".join(entry.outputs),
            ", ".join(strategies_of(entry.name)),
        )
    console.print(components)
    registries: dict[str, Mapping[str, Any]] = {
        "Strategies": STRATEGIES,
        "Targets": TARGETS,
        "Precisions": PRECISIONS,
        "Frontends": FRONTENDS,
    }
    for title, registry in registries.items():
        table = Table("name", "what", title=title)
        for item in registry.values():
            table.add_row(item.name, item.summary)
        console.print(table)
    console.print(
        f"Scales: {', '.join(Scale)}. Weights: {', '.join(Weights)}. "
        f"Strategy of components without rotary encoding: {DEFAULT_STRATEGY}."
    )
