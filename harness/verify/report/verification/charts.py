"""Computes the drawings of a page: positions in histograms, curves and timelines, pictures of maps, and their words."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.outcome import EDGES, WITHIN, Stage
from harness.verify.report.verification.schema import number
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
_LIGHT, _DARK = (246, 240, 220), (20, 40, 110)
"""Colours of no error and of the largest error; their lightness differs, so that nobody needs to tell colours apart."""
_SHADES = 16


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
    """A point of a curve, and the boundary of its call in the JSON."""

    x: float
    y: float
    boundary: Mapping[str, Any]


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


@dataclass(frozen=True)
class ErrorMap:
    """A map of the largest errors over an image.

    Attributes:
        source: Address of the picture, with one pixel per cell.
        rows, columns: Number of cells.
        description: Description of the map in words.
    """

    source: str
    rows: int
    columns: int
    description: str


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
    bottom = BARS_TOP + BARS_HEIGHT
    bars = [""] * len(counts)
    parts = []
    for n, height in enumerate(counts):
        if height:
            length = max(BARS_HEIGHT * math.log1p(height) / tallest, 1)
            bars[n] = f"M{BARS_LEFT + n * BAR} {bottom}v-{length:.1f}h{BAR - 2}V{bottom}z"
            below = f"at most {digits(EDGES[n])}" if n < len(EDGES) else f"more than {digits(EDGES[-1])}"
            above = f"above {digits(EDGES[n - 1])} and " if 0 < n < len(EDGES) else ""
            parts.append(f"{count(height)} {above}{below}")
    description = f"Elements by error in units of the gate: {', '.join(parts)}." if parts else "There is no element."
    return Histogram("".join(bars[:WITHIN]), "".join(bars[WITHIN:]), description)


def diverging(diagnosis: Mapping[str, Any]) -> list[int]:
    """Returns the positions of the calls that diverge, of which there may be none."""
    first = diagnosis["first"]
    return [first["boundary"]["position"], *first["others"]] if first else []


def curves(diagnosis: Mapping[str, Any]) -> Curves | None:
    """Draws the errors of the calls of a program; None if no call has an error."""

    def r_rms(boundary: Mapping[str, Any], kind: str) -> float:
        return number(boundary[kind]["r_rms"])

    kinds = "local", "accumulated"
    calls = [call for call in diagnosis["boundaries"] if not any(math.isnan(r_rms(call, kind)) for kind in kinds)]
    local, accumulated = ([r_rms(call, kind) for call in calls] for kind in kinds)
    values = [value for value in (*local, *accumulated) if 0 < value < math.inf]
    if not values:
        return None
    top = max(1, math.ceil(math.log10(max(values))))
    bottom = max(min(-1, math.floor(math.log10(min(values)))), top - _MAX_DECADES)
    positions = [call["position"] for call in calls]
    last: int = max(1, *positions)
    first = next(iter(diverging(diagnosis)), None)

    def x(position: int) -> float:
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * position / last, 1)

    def y(value: float) -> float:
        decades = min(max(math.log10(value), bottom), top) if value else bottom
        return round(_TOP + (HEIGHT - _TOP - _BOTTOM) * (top - decades) / (top - bottom), 1)

    dots = tuple(map(Dot, map(x, positions), map(y, local), calls))
    step = max(1, -(-(top - bottom) // 6))
    largest = max(local)
    diverges = "no call diverges" if first is None else f"call {first} is the first that diverges"
    return Curves(
        dots=dots,
        accumulated=" ".join(f"{x(n):g},{y(error):g}" for n, error in zip(positions, accumulated, strict=True)),
        rows=tuple(Tick(y(10.0**decade), digits(10.0**decade)) for decade in range(bottom, top + 1, step)),
        columns=tuple(Tick(x(position), str(position)) for position in range(0, last + 1, max(1, -(-last // 8)))),
        first=next((dot for dot in dots if dot.boundary["position"] == first), None),
        description=(
            f"{len(calls)} calls: {diverges}; the largest own r_rms is {digits(largest)}, of call "
            f"{positions[local.index(largest)]}; after the last one r_rms is {digits(accumulated[-1])}. The table "
            "below has every number."
        ),
    )


def timeline(seconds: Mapping[str, Any]) -> tuple[Step, ...]:
    """Returns the finished stages of a case one after the other."""
    durations = {stage.value: number(seconds.get(stage.value)) for stage in Stage}
    finite = {stage: length for stage, length in durations.items() if math.isfinite(length)}
    total = math.fsum(finite.values()) or 1.0
    steps, start = [], 0.0
    for stage, length in finite.items():
        steps.append(Step(stage, 100 * start / total, 100 * length / total, length))
        start += length
    return tuple(steps)


def error_map(rows: Sequence[Sequence[float]]) -> ErrorMap:
    """Draws a map in shades from no error to the largest finite error; infinite errors have the same shade.

    Args:
        rows: The largest error in each cell, at least one.
    """
    from PIL import Image

    largest, row, column = max((value, -r, -c) for r, line in enumerate(rows) for c, value in enumerate(line))
    finite = max((value for line in rows for value in line if math.isfinite(value)), default=0.0) or 1.0
    shades = bytes(round((_SHADES - 1) * min(value / finite, 1.0)) for line in rows for value in line)
    picture = Image.frombytes("P", (len(rows[0]), len(rows)), shades)
    shares = [n / (_SHADES - 1) for n in range(_SHADES)]
    picture.putpalette([round(a + (b - a) * share) for share in shares for a, b in zip(_LIGHT, _DARK, strict=True)])
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True, bits=4)
    description = (
        f"The largest error in each of {len(rows)} × {len(rows[0])} cells of the image. The largest of all is "
        f"{digits(largest)}, in row {1 - row} and column {1 - column}."
    )
    return ErrorMap(png(base64.b64encode(file.getvalue()).decode()), len(rows), len(rows[0]), description)


def png(data: str) -> str:
    """Returns the data URL of a PNG file given in base64."""
    return f"data:image/png;base64,{data}"
