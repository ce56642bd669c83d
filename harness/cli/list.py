"""`sam3-tvm list`: every name that an option takes."""

from __future__ import annotations

from rich.table import Table

from harness.cli.console import console
from harness.core.case import DEFAULT_STRATEGY, SUBJECTS, Scale, strategies_of
from harness.core.precision import PRECISIONS
from harness.lowering.rope import STRATEGIES
from harness.targets import TARGETS


def list_() -> None:
    """List components, strategies, targets, precisions and scales."""
    components = Table("component", "what", "inputs", "outputs", "strategies", title="Components")
    for entry in SUBJECTS.values():
        components.add_row(
            entry.name,
            entry.summary,
            ", ".join(entry.inputs),
            ", ".join(entry.outputs),
            ", ".join(strategies_of(entry.name)),
        )
    console.print(components)
    for title, registry in (("Strategies", STRATEGIES), ("Targets", TARGETS), ("Precisions", PRECISIONS)):
        table = Table("name", "what", title=title)
        for item in registry.values():
            table.add_row(item.name, item.summary)
        console.print(table)
    console.print(f"Scales: {', '.join(Scale)}. Strategy of components without rotary encoding: {DEFAULT_STRATEGY}.")
