"""What the figures say, in sentences: goals reached or not, and the titles of the plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.report.performance.document import GoalResult, Ratio, Section, group_rates, ratio, shares
from harness.report.performance.reading import LABELS, PYTORCH, TUNED, UNTUNED, Measurement

_MOST_NAMES = 6
"""Names in one sentence; the tables have all."""


def factor(value: float) -> str:
    """A ratio with two decimals below 10, one above: 2.41, 12.3."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def gain(value: float) -> str:
    """A ratio as per cent above 1: +4.2 %."""
    return f"{100 * (value - 1):+.1f} %".replace("-", "−")


def told(found: Ratio, as_gain: bool = False) -> str:
    """A ratio with its interval: 2.41 (2.38–2.46)."""
    text = gain if as_gain else factor
    interval = "" if found.low is None or found.high is None else f" ({text(found.low)}–{text(found.high)})"
    if as_gain:
        interval = interval.replace("–", " to ")
    return f"{text(found.value)}{interval}"


def bar(value: float, as_gain: bool) -> str:
    """What a goal asks for: 1.2, or 10 %."""
    return f"{100 * (value - 1):.0f} %" if as_gain else f"{value:g}"


def verdict(result: GoalResult) -> str:
    """A word and a symbol for the table of goals."""
    if result.reached is None:
        return "⏭ not measured"
    if not result.reached:
        return "❌ not reached"
    return "✅ aim reached" if not result.below_aim else "✅ reached"


def sentence(result: GoalResult) -> str:
    """What is reached of a goal and what is not, in plain words."""
    goal, count = result.goal, len(result.values)
    if not count:
        reasons = dict.fromkeys(result.missing.values())
        return f"Not measured: {'; '.join(reasons)}." if reasons else "Not measured: these files have nothing of it."
    below, below_aim = result.below_least, result.below_aim
    least, aim = bar(goal.least, goal.as_gain), bar(goal.aim, goal.as_gain)
    if goal.as_gain:
        parts = [_listed(result.values, goal.as_gain)]
        if below:
            parts.append(f"tuning makes {_names(below)} slower")
    elif below:
        parts = [f"{len(below)} of {count} below {least}: {_listed(below, goal.as_gain)}"]
    else:
        parts = [f"{'all ' if count > 1 else ''}{count} at {least} or above"]
        worst = min(result.values.items(), key=lambda item: item[1].value)
        parts.append(f"{'the least is ' if count > 1 else ''}{worst[0]} with {told(worst[1])}")
    if below_aim:
        parts.append(f"the aim of {aim} is reached by {count - len(below_aim)} of {count}")
    else:
        parts.append(f"the aim of {aim} is reached")
    if result.noisy:
        parts.append(f"within the noise, where another run may say otherwise: {_names(result.noisy)}")
    if result.missing:
        parts.append(f"not measured: {_names(result.missing)}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def headline(section: Section) -> str:
    """The whole section in one line."""
    results = [result for result in section.goals if result.reached is not None]
    missed = [result for result in results if not result.reached]
    if not results:
        return "**No goal was measured:** these files have neither components nor questions to the whole model."
    left = len(section.goals) - len(results)
    more = f"; {left} not measured" if left else ""
    if missed:
        return f"❌ **{len(missed)} of {len(results)} measured goals not reached**{more}."
    return f"✅ **{_plural(len(results), 'measured goal')} reached**{more}."


def speedup_title(section: Section) -> str:
    """How the components compare with PyTorch."""
    side = TUNED if any(TUNED in m.sides for m in section.components) else UNTUNED
    found = {section.names[m]: r for m in section.components if (r := ratio(m, PYTORCH, side))}
    faster = [name for name, value in found.items() if value.value > 1]
    values = [value.value for value in found.values()]
    reach = f"{factor(min(values))} to {factor(max(values))} times as fast as PyTorch"
    if len(found) == 1:
        return f"{LABELS[side]}, {next(iter(found))} is {factor(values[0])} times as fast as in PyTorch"
    if len(faster) == len(found):
        return (
            f"{LABELS[side]}, all {len(found)} components are faster than PyTorch: {reach.removesuffix(' as PyTorch')}"
        )
    return f"{LABELS[side]}, {len(faster)} of {len(found)} components are faster than PyTorch: {reach}"


def latency_title(measurements: Sequence[Measurement], what: str) -> str:
    """What tuning changes."""
    gains = [r.value for m in measurements if (r := ratio(m, UNTUNED, TUNED))]
    if not gains:
        return f"{what}: before tuning"
    least, most = min(gains), max(gains)
    if len(gains) == 1:
        return f"{what}: tuning gains {gain(least)}"
    return f"{what}: tuning gains {gain(least)} to {gain(most)}"


def roofline_title(section: Section) -> str:
    """How near the peak the groups that take most of the time are."""
    compute = [group for group in group_rates(section.kernels) if group.bound == "compute"]
    if not compute:
        return "Kernels of the components against the machine's measured limits"
    best = compute[0]
    return f"Kernels alone: {best.group} at {best.share:.0%} of the measured peak, PyTorch's at {best.torch_share:.0%}"


def kernels_title(measurements: Sequence[Measurement]) -> str:
    """How much of the time the kernels that are longest take."""
    first = [found[0] for m in measurements if (found := shares(m.kernels))]
    if len(first) == 1:
        return f"One kernel takes {first[0].share:.0%} of the time"
    least, most = min(first, key=lambda share: share.share), max(first, key=lambda share: share.share)
    return f"The longest kernel takes {least.share:.0%} to {most.share:.0%} of a component's time"


def peers_title(section: Section) -> str:
    """Who is faster than ours."""
    wins, total = 0, 0
    for measurement in section.measurements:
        ours = measurement.ours
        for name in section.peers:
            found = ratio(measurement, name, ours.name) if ours else None
            if found:
                total, wins = total + 1, wins + (found.value >= 1)
    return f"Ours is at least as fast as a peer in {wins} of {total} comparisons"


def _listed(values: Mapping[str, Ratio], as_gain: bool) -> str:
    return _cut([f"{name} {told(value, as_gain)}" for name, value in values.items()])


def _names(values: Iterable[str]) -> str:
    return _cut(list(values))


def _cut(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_NAMES
    return ", ".join(texts) if more <= 0 else f"{', '.join(texts[:_MOST_NAMES])} and {more} more"


def _plural(count: int, noun: str) -> str:
    return f"All {count} {noun}s" if count != 1 else f"The one {noun}"
