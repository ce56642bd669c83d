"""Computes the positions of the parts of a drawing, which the templates draw, and their descriptions in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.outcome import EDGES, WITHIN, Stage
from harness.verify.report.verification.diagnosis import Call, Diagnosis
from harness.verify.report.verification.numbers import number
from harness.verify.report.verification.wording import count, digits

BAR = 18
"""Width of a bar of a histogram, including the gap."""
BARS_LEFT = 16
BARS_HEIGHT = 80
"""Height of the tallest bar."""
BARS_TOP = 14
WIDTH, HEIGHT = 680, 250
"""Size of the curves over depth, with their axes."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 22, 32
_MAX_DECADES = 12


@dataclass(frozen=True)
class Tick:
    """A line of a scale, with its position and label."""

    position: float
    label: str


@dataclass(frozen=True)
class Histogram:
    """Bars of a histogram as SVG paths; their height is proportional to the logarithm of the count.

    Attributes:
        bars_inside, bars_outside: The bars inside and outside the gate.
        description: Description in words.
    """

    bars_inside: str
    bars_outside: str
    description: str


@dataclass(frozen=True)
class Dot:
    """A point of a curve, and its call."""

    x: float
    y: float
    call: Call


@dataclass(frozen=True)
class Curves:
    """Errors of the calls of a program over depth, on a logarithmic scale.

    Attributes:
        dots: Own error of each call.
        accumulated: Points of the line of accumulated errors in the run.
        rows: Lines of the r_rms scale.
        columns: Lines of the call scale.
        first: Dot of the first call that diverges; None if none does.
        description: Description in words.
    """

    dots: tuple[Dot, ...]
    accumulated: str
    rows: tuple[Tick, ...]
    columns: tuple[Tick, ...]
    first: Dot | None
    description: str


@dataclass(frozen=True)
class Step:
    """A stage of a case: start and length in percent of the total time, and its seconds."""

    name: str
    start: float
    length: float
    seconds: float


GATE_X = BARS_LEFT + WITHIN * BAR
"""X coordinate of the gate, between the bars."""
EDGE_TICKS = tuple(
    Tick(BARS_LEFT + (n + 1) * BAR - 1, digits(edge).replace(".0e", "e"))
    for n, edge in enumerate(EDGES)
    if n % 2 == 0 and edge != 1
)
"""The scale of every histogram, in units of the gate."""


def histogram(counts: Sequence[int]) -> Histogram:
    """Draws the number of errors between `EDGES`, in units of the gate."""
    tallest = math.log1p(max(counts, default=0)) or 1.0
    bars = [
        _bar(BARS_LEFT + n * BAR, BARS_HEIGHT * math.log1p(height) / tallest) if height else ""
        for n, height in enumerate(counts)
    ]
    return Histogram("".join(bars[:WITHIN]), "".join(bars[WITHIN:]), _describe_counts(counts))


def curves(diagnosis: Diagnosis) -> Curves | None:
    """Draws the errors of the calls of a program; None if no call has an error."""
    calls = [call for call in diagnosis.calls if not (math.isnan(call.local[0]) or math.isnan(call.accumulated[0]))]
    values = [value for call in calls for value in (call.local[0], call.accumulated[0]) if 0 < value < math.inf]
    if not values:
        return None
    top = max(1, math.ceil(math.log10(max(values))))
    bottom = max(min(-1, math.floor(math.log10(min(values)))), top - _MAX_DECADES)
    last = max(1, max(call.position for call in diagnosis.calls))

    def x(position: int) -> float:
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * position / last, 1)

    def y(value: float) -> float:
        decades = min(max(math.log10(value), bottom), top) if 0 < value < math.inf else (top if value else bottom)
        return round(_TOP + (HEIGHT - _TOP - _BOTTOM) * (top - decades) / (top - bottom), 1)

    dots = tuple(Dot(x(call.position), y(call.local[0]), call) for call in calls)
    step = max(1, -(-(top - bottom) // 6))
    return Curves(
        dots=dots,
        accumulated=" ".join(f"{x(call.position):g},{y(call.accumulated[0]):g}" for call in calls),
        rows=tuple(Tick(y(10.0**decade), digits(10.0**decade)) for decade in range(bottom, top + 1, step)),
        columns=tuple(Tick(x(position), str(position)) for position in range(0, last + 1, max(1, -(-last // 8)))),
        first=next((dot for dot in dots if dot.call.position == diagnosis.first), None),
        description=_describe_calls(calls, diagnosis.first),
    )


def timeline(seconds: Mapping[str, Any]) -> tuple[Step, ...]:
    """Returns the stages of a case one after the other."""
    durations = [(stage, number(seconds[stage])) for stage in (member.value for member in Stage) if stage in seconds]
    finite = [(stage, length) for stage, length in durations if math.isfinite(length)]
    total = math.fsum(length for _, length in finite) or 1.0
    steps, start = [], 0.0
    for stage, length in finite:
        steps.append(Step(stage, 100 * start / total, 100 * length / total, length))
        start += length
    return tuple(steps)


def _bar(x: float, height: float) -> str:
    """Returns the SVG path of a bar of a histogram, at least one unit high."""
    bottom = BARS_TOP + BARS_HEIGHT
    return f"M{x:g} {bottom}v-{max(height, 1):.1f}h{BAR - 2}V{bottom}z"


def _describe_counts(counts: Sequence[int]) -> str:
    parts = []
    for n, height in enumerate(counts):
        if height:
            below = f"at most {digits(EDGES[n])}" if n < len(EDGES) else f"more than {digits(EDGES[-1])}"
            above = f"above {digits(EDGES[n - 1])} and " if 0 < n < len(EDGES) else ""
            parts.append(f"{count(height)} {above}{below}")
    return f"Elements by error in units of the gate: {', '.join(parts)}." if parts else "There is no element."


def _describe_calls(calls: Sequence[Call], first: int | None) -> str:
    worst = max(calls, key=lambda call: call.local[0])
    last = calls[-1]
    diverges = "no call diverges" if first is None else f"call {first} is the first that diverges"
    return (
        f"{len(calls)} calls: {diverges}; the largest own r_rms is {digits(worst.local[0])}, of call {worst.position}; "
        f"after the last one r_rms is {digits(last.accumulated[0])}. The table below has every number."
    )
