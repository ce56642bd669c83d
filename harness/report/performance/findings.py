"""The findings in sentences: goals reached or not, and the titles of the plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.report.performance.document import GoalResult, Ratio, Section, best_side, group_rates, ratio, shares
from harness.report.performance.formatting import factor, gain, percent
from harness.report.performance.reading import Measurement
from harness.report.performance.sides import LABELS, PYTORCH, TUNED, UNTUNED

_MOST_NAMES = 6
"""Names in one sentence; the tables have all."""


def format_ratio(found: Ratio, as_gain: bool = False) -> str:
    """Writes a ratio with its interval: 2.41 (2.38–2.46)."""
    text = gain if as_gain else factor
    interval = "" if found.low is None or found.high is None else f" ({text(found.low)}–{text(found.high)})"
    if as_gain:
        interval = interval.replace("–", " to ")
    return f"{text(found.value)}{interval}"


def format_goal(value: float, as_gain: bool) -> str:
    """Writes what a goal asks for: 1.2, or 10 %."""
    return f"{100 * (value - 1):.0f} %" if as_gain else f"{value:g}"


def verdict(result: GoalResult) -> str:
    """Returns a word and a symbol for the table of goals."""
    if result.reached is None:
        return "⏭ not measured"
    if not result.reached:
        return "❌ not reached"
    if result.noisy:
        return "❔ within the noise"
    return "✅ aim reached" if not result.below_aim else "✅ reached"


def sentence(result: GoalResult) -> str:
    """Says what is reached of a goal and what is not."""
    goal, count = result.goal, len(result.values)
    if not count:
        reasons = dict.fromkeys(result.missing.values())
        return f"Not measured: {'; '.join(reasons)}." if reasons else "Not measured: these files have nothing of it."
    below, below_aim = result.below_least, result.below_aim
    least, aim = format_goal(goal.least, goal.as_gain), format_goal(goal.aim, goal.as_gain)
    if goal.as_gain:
        parts = [_listed(result.values, goal.as_gain)]
        if below:
            parts.append(f"tuning makes {_names(below)} slower")
    elif below:
        parts = [f"{len(below)} of {count} below {least}: {_listed(below, goal.as_gain)}"]
    elif count == 1:
        parts = [_listed(result.values)]
    else:
        worst, found = min(result.values.items(), key=lambda item: item[1].value)
        parts = [f"all {count} at {least} or above, the least is {worst} with {format_ratio(found)}"]
    if below_aim:
        by = f"reached by {count - len(below_aim)} of {count}" if count > 1 else "not reached"
        parts.append(f"the aim of {aim} is {by}")
    else:
        parts.append(f"the aim of {aim} is reached")
    if result.noisy:
        parts.append(f"within the noise, where another run may say otherwise: {_names(result.noisy)}")
    if result.missing:
        parts.append(f"not measured: {_names(result.missing)}")
    text = "; ".join(parts)
    return f"{text}."


def headline(section: Section) -> str:
    """Says the whole section in one line."""
    results = [result for result in section.goals if result.reached is not None]
    missed = [result for result in results if not result.reached]
    noisy = [result for result in results if result.reached and result.noisy]
    if not results:
        return "**No goal was measured:** these files have neither components nor questions to the whole model."
    left = len(section.goals) - len(results)
    more = f"; {len(noisy)} within the noise" if noisy else ""
    more += f"; {left} not measured" if left else ""
    more += "; the goals are for full scale, and this is another" if "full" not in section.scales else ""
    if missed:
        return f"❌ **{len(missed)} of {len(results)} measured goals not reached**{more}."
    return f"{'❔' if noisy else '✅'} **{_plural(len(results), 'measured goal')} reached**{more}."


def speedup_title(section: Section) -> str:
    """Says how the components compare with PyTorch."""
    side = best_side(section.components)
    found = {section.names[m]: r for m in section.components if (r := ratio(m, PYTORCH, side))}
    faster = [name for name, value in found.items() if value.value > 1]
    values = [value.value for value in found.values()]
    reach = f"{factor(min(values))} to {factor(max(values))} times as fast"
    if len(found) == 1:
        return f"{LABELS[side]}, {next(iter(found))} is {factor(values[0])} times as fast as in PyTorch"
    if len(faster) == len(found):
        all_of_them = "both" if len(found) == 2 else f"all {len(found)}"
        return f"{LABELS[side]}, {all_of_them} components are faster than PyTorch: {reach}"
    return f"{LABELS[side]}, {len(faster)} of {len(found)} components are faster than PyTorch: {reach}"


def latency_title(measurements: Sequence[Measurement], what: str) -> str:
    """Says what tuning changes."""
    gains = [r.value for m in measurements if (r := ratio(m, UNTUNED, TUNED))]
    if not gains:
        parts = [m.ours.median / m.sides[PYTORCH].median for m in measurements]
        span = dict.fromkeys((percent(min(parts)), percent(max(parts))))
        return f"{what}: {measurements[0].ours.label} takes {' to '.join(span)} of PyTorch's time"
    least, most = min(gains), max(gains)
    if len(gains) == 1:
        return f"{what}: tuning gains {gain(least)}"
    return f"{what}: tuning gains {gain(least)} to {gain(most)}"


def roofline_title(section: Section) -> str:
    """Says how near the peak the groups are that take most of the time."""
    compute = [group for group in group_rates(section.kernels) if group.bound == "compute"]
    if not compute:
        return "Kernels of the components against the machine's measured limits"
    best = compute[0]
    ours, theirs = percent(best.share), percent(best.torch_share)
    return f"Kernels alone: {best.group} at {ours} of the measured peak, PyTorch's at {theirs}"


def component_roofline_title(measurements: Sequence[Measurement]) -> str:
    """Says how near the peak the multiplying kernels of the components are, weighted by their times."""
    seconds = at_peak = 0.0
    for measurement in measurements:
        for kernel in measurement.kernels:
            if kernel.flop and measurement.peak_flops:
                seconds += kernel.seconds
                at_peak += kernel.flop / measurement.peak_flops
    if not seconds:
        return "Kernels within the components, against the machine's measured limits"
    return f"Within the components, the kernels that multiply run at {percent(at_peak / seconds)} of the measured peak"


def kernels_title(measurements: Sequence[Measurement]) -> str:
    """Says which share of the time the longest kernels take, and on which side."""
    first = [found[0].share for m in measurements if (found := shares(m.kernels))]
    sides = " and ".join(dict.fromkeys(LABELS.get(m.profiled, m.profiled) for m in measurements))
    least, most = percent(min(first)), percent(max(first))
    share = most if least == most else f"{least} to {most}"
    return f"{sides}: the longest kernel takes {share} of the time"


def peers_title(section: Section) -> str:
    """Says how often ours is the faster one."""
    wins, total = 0, 0
    for measurement in section.measurements:
        ours = measurement.ours
        for name in section.peers:
            found = ratio(measurement, name, ours.name)
            if found:
                total, wins = total + 1, wins + (found.value >= 1)
    return f"{LABELS[best_side(section.measurements)]} is at least as fast in {wins} of {total} comparisons with peers"


def _listed(values: Mapping[str, Ratio], as_gain: bool = False) -> str:
    return _cut([f"{name} {format_ratio(value, as_gain)}" for name, value in values.items()])


def _names(values: Iterable[str]) -> str:
    return _cut(list(values))


def _cut(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_NAMES
    return ", ".join(texts) if more <= 0 else f"{', '.join(texts[:_MOST_NAMES])} and {more} more"


def _plural(count: int, noun: str) -> str:
    return f"All {count} {noun}s" if count > 1 else f"The one {noun}"
