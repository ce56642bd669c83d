"""Formats the result of `sam3-tvm budget`: the groups, the curve of error over time, and the choice."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from harness.verify.budget.search import Result

_TABLE_ROWS = 40
"""Number of groups in the table; the file has all of them."""


def groups_table(result: Result) -> Table:
    """Builds a table of the groups for the terminal (rich), largest error first."""
    budget, rates = result.budget, result.rates
    table = Table(
        "group", title=f"{budget.component}, {budget.precision}, {budget.target}: one group in half precision"
    )
    table.add_column("MFLOP", justify="right")
    table.add_column("saves, µs", justify="right")
    table.add_column("adds r_rms", justify="right")
    table.add_column("stays")
    for group in sorted(result.groups, key=lambda group: -max(group.r_rms.values(), default=0.0))[:_TABLE_ROWS]:
        table.add_row(
            Text(group.name),
            f"{group.operations / 1e6:.1f}",
            f"{rates.saved_seconds(group.operations) * 1e6:.1f}",
            f"{max(group.r_rms.values(), default=0.0):.4f}",
            "float32" if group.float32 else "",
        )
    if len(result.groups) > _TABLE_ROWS:
        table.add_row(f"and {len(result.groups) - _TABLE_ROWS} more, in the file", "", "", "", "")
    return table


def front_table(result: Result) -> Table:
    """Builds a table of the curve of error over time for the terminal (rich)."""
    table = Table("groups in half precision", title="error over time, from float32 to half precision throughout")
    for column in ("time, µs", "r_rms, predicted", "r_rms, measured"):
        table.add_column(column, justify="right")
    for point in result.front:
        table.add_row(
            f"{point.half} of {len(result.groups)}",
            f"{point.seconds * 1e6:.1f}",
            f"{point.predicted:.4f}",
            f"{point.measured:.4f}",
        )
    return table


def summary(result: Result) -> str:
    """Returns the choice in sentences."""
    budget, chosen, rates = result.budget, result.chosen, result.rates
    fp32, half = result.front[0], result.front[-1]
    stay = f"{len(budget.float32)} of {len(result.groups)} groups stay float32"
    lines = [
        f"{stay}: r_rms {chosen.measured:.3f} measured ({chosen.predicted:.3f} predicted), limit {budget.limit:g}; "
        f"products take {chosen.seconds * 1e6:.1f} µs, {fp32.seconds * 1e6:.1f} in float32 and "
        f"{half.seconds * 1e6:.1f} in half precision throughout.",
        f"Time is counted, not measured: operations at {rates.fp32:g} GFLOP/s in fp32 and {rates.half:g} in half "
        "precision (--fp32-rate, --half-rate).",
    ]
    if result.gains is False:
        lines.append(f"{result.cpu} has nothing that multiplies bfloat16 faster than fp32: there, layers gain no time.")
    if result.untouched:
        lines.append(f"{len(result.untouched)} groups are float32 on {budget.target} in any case.")
    if result.refused:
        lines.append(f"{result.refused} faster choices exceeded the limit when they were measured.")
    lines.append(f"{result.new_count} measurements were made, {result.reused_count} are from an earlier run.")
    return "\n".join(lines)
