"""The contents of the performance report, by machine: ratios, goals, shares; plain data for the page and the plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from harness.core.precision import DEFAULT_PRECISION
from harness.report.performance.cases import precision_of
from harness.report.performance.reading import KernelRate, KernelTime, Measurement, ResultFile
from harness.report.performance.sides import OPENVINO_F32, OURS, PEERS, PYTORCH, TUNED, UNTUNED

CONFIDENCE = 0.95
"""How sure an interval is to hold the median."""
TOP_KERNELS = 5
"""Kernels of a component that are told apart; what is left is added up."""

Entry = TypeVar("Entry", Measurement, KernelRate)

_MACHINE_KEYS = ("cpu", "features", "usable_cpus", "memory_bytes")
"""Facts in which two descriptions of one machine agree, besides the threads."""


@dataclass(frozen=True)
class Ratio:
    """How many times longer one side takes than another.

    Attributes:
        value: Ratio of the medians.
        low: Lower end of the interval of the median of the round-by-round ratios, widened to the value if need be;
            None with too few rounds.
        high: Its upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None


def ratio(measurement: Measurement, over: str, under: str) -> Ratio | None:
    """Divides `over`'s time by `under`'s; None where one of them was not measured."""
    upper, lower = measurement.side(over), measurement.side(under)
    if upper is None or lower is None:
        return None
    value = upper.median / lower.median
    if len(upper.seconds) != len(lower.seconds):  # then rounds are not pairs
        return Ratio(value)
    interval = median_interval([a / b for a, b in zip(upper.seconds, lower.seconds, strict=True)])
    return Ratio(value) if interval is None else Ratio(value, min(value, interval[0]), max(value, interval[1]))


def best_side(measurements: Iterable[Measurement]) -> str:
    """Returns the tuned side if any measurement has one, else the untuned one."""
    return TUNED if any(measurement.side(TUNED) for measurement in measurements) else UNTUNED


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Computes an interval for the median of the distribution, whatever it is, that the samples are drawn from.

    Two order statistics, as far inside as the binomial distribution of samples below the median allows (the interval
    that inverts the sign test); None if even the extremes are not sure enough, which takes six samples.
    """
    count, ordered = len(samples), sorted(samples)
    below = 0.0  # probability that at most `rank` samples lie below the median
    rank = -1
    while rank + 1 < count / 2:
        following = below + math.comb(count, rank + 1) * 0.5**count
        if 2 * following > 1 - confidence:
            break
        below, rank = following, rank + 1
    return None if rank < 0 else (ordered[rank], ordered[count - 1 - rank])


@dataclass(frozen=True)
class Goal:
    """A goal of issue and design for the speed.

    Attributes:
        what: The goal in words.
        least: Ratio that must be reached.
        aim: Ratio that is aimed at.
        over: The side whose time is above the line.
        under: The side whose time is below it.
        applies: Whether it applies to a measurement.
        as_gain: Whether it is written as per cent above 1.
    """

    what: str
    least: float
    aim: float
    over: str
    under: str
    applies: Callable[[Measurement], bool]
    as_gain: bool = False


def _of_component(measurement: Measurement) -> bool:
    return measurement.kind == "component" and measurement.case.precision == DEFAULT_PRECISION


GOALS = (
    Goal("every component, PyTorch / TVM untuned", 1.0, 1.8, PYTORCH, UNTUNED, _of_component),
    Goal("every component, PyTorch / TVM tuned", 1.2, 2.4, PYTORCH, TUNED, _of_component),
    Goal(
        "`vision_backbone`, OpenVINO in f32 / TVM tuned",
        0.95,
        1.1,
        OPENVINO_F32,
        TUNED,
        lambda measurement: _of_component(measurement) and measurement.name == "vision_backbone",
    ),
    Goal(
        "gain of tuning over the default schedules, end to end",
        1.0,
        1.1,
        UNTUNED,
        TUNED,
        lambda measurement: measurement.kind == "question",
        as_gain=True,
    ),
)
"""In fp32, on two threads of the project's own kind of machine, at full scale, in one interleaved run."""


@dataclass(frozen=True)
class GoalResult:
    """A goal and what was measured.

    Attributes:
        goal: The goal.
        values: The ratio of each measurement that it applies to.
        missing: Measurements that it applies to but that lack a side, with the reason.
    """

    goal: Goal
    values: Mapping[str, Ratio]
    missing: Mapping[str, str]

    @property
    def below_least(self) -> dict[str, Ratio]:
        """Those that do not reach what must be, worst first; a gain must be negative beyond its noise."""
        noise = self.noisy if self.goal.as_gain else {}
        return {name: ratio for name, ratio in self._below(self.goal.least).items() if name not in noise}

    @property
    def below_aim(self) -> dict[str, Ratio]:
        """Those that do not reach the aim, worst first."""
        return self._below(self.goal.aim)

    @property
    def noisy(self) -> dict[str, Ratio]:
        """Those whose interval holds the least that must be: another run may say otherwise."""
        least = self.goal.least
        return {
            name: ratio
            for name, ratio in self.values.items()
            if ratio.low is not None and ratio.high is not None and ratio.low < least <= ratio.high
        }

    @property
    def reached(self) -> bool | None:
        """Whether all reach the least; None if nothing was measured."""
        return not self.below_least if self.values else None

    def _below(self, bar: float) -> dict[str, Ratio]:
        found = {name: ratio for name, ratio in self.values.items() if ratio.value < bar}
        return dict(sorted(found.items(), key=lambda item: item[1].value))


def judge_goal(goal: Goal, measurements: Sequence[Measurement], names: Mapping[Measurement, str]) -> GoalResult:
    """Holds a goal to the measurements that it applies to."""
    values, missing = {}, {}
    for measurement in filter(goal.applies, measurements):
        found = ratio(measurement, goal.over, goal.under)
        if found is not None:
            values[names[measurement]] = found
            continue
        lacking = next(side for side in (goal.over, goal.under) if measurement.side(side) is None)
        missing[names[measurement]] = measurement.absent.get(lacking, NO_DATABASE if lacking == TUNED else NOT_ASKED)
    return GoalResult(goal, values, missing)


NO_DATABASE = "no schedules of its kernels were tried on this machine"
NOT_ASKED = "it was not measured"


@dataclass(frozen=True)
class Share:
    """A kernel and its part of a component's time; `calls` and rates are None for the rest that is added up."""

    name: str
    seconds: float
    share: float
    size: str = ""
    calls: int | None = None
    flop_rate: float | None = None
    byte_rate: float | None = None


def shares(kernels: Sequence[KernelTime], top: int = TOP_KERNELS) -> list[Share]:
    """Returns the longest kernels, longest first, and the rest in one; kernels of one name are added up."""
    merged: dict[str, list[KernelTime]] = {}
    for kernel in kernels:
        merged.setdefault(kernel.name, []).append(kernel)
    total = sum(kernel.seconds for kernel in kernels)
    if not total:
        return []
    found = [_share(name, group, total) for name, group in merged.items()]
    found.sort(key=lambda share: (-share.seconds, share.name))
    if len(found) <= top + 1:
        return found
    rest = found[top:]
    seconds = sum(share.seconds for share in rest)
    return [*found[:top], Share(f"{len(rest)} others", seconds, seconds / total)]


def _share(name: str, group: Sequence[KernelTime], total: float) -> Share:
    seconds = sum(kernel.seconds for kernel in group)
    return Share(
        name,
        seconds,
        seconds / total,
        group[0].size,
        sum(kernel.calls for kernel in group),
        _rate([kernel.flop for kernel in group], seconds),
        _rate([kernel.bytes for kernel in group], seconds),
    )


def _rate(amounts: Sequence[float | None], seconds: float) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) / seconds if known and len(known) == len(amounts) and sum(known) and seconds else None


@dataclass(frozen=True)
class GroupRate:
    """Kernels of one group together; each counts by its time.

    Attributes:
        share: Our share of the peak; `torch_share` is PyTorch's.
        torch_over_ours: PyTorch's time / ours, sums of medians.
        slower: Kernels that PyTorch does faster, the worst first.
    """

    group: str
    bound: str
    count: int
    rate: float
    share: float
    torch_share: float
    torch_over_ours: float
    slower: tuple[KernelRate, ...]


def group_rates(kernels: Sequence[KernelRate]) -> list[GroupRate]:
    """Rates each group of kernels, in the order of the file."""
    found = []
    for group in dict.fromkeys(kernel.group for kernel in kernels):
        members = [kernel for kernel in kernels if kernel.group == group]
        seconds, torch_seconds = sum(k.seconds for k in members), sum(k.torch_seconds for k in members)
        # Peaks differ from kernel to kernel with the clock: the time at the peak is what adds up.
        at_peak = sum(kernel.work / kernel.peak for kernel in members)
        slower = sorted(
            (k for k in members if k.torch_seconds < k.seconds),
            key=lambda kernel: kernel.torch_seconds / kernel.seconds,
        )
        found.append(
            GroupRate(
                group,
                members[0].bound,
                len(members),
                sum(kernel.work for kernel in members) / seconds,
                at_peak / seconds,
                at_peak / torch_seconds,
                torch_seconds / seconds,
                tuple(slower),
            )
        )
    return found


@dataclass(frozen=True)
class Section:
    """Everything that one machine measured with one number of threads.

    Attributes:
        machine: From `harness.machine.describe_machine`, of the newest file.
        threads: Threads of TVM and of PyTorch.
        versions: Installed packages, of the newest file that has them.
        files: Where the figures come from.
        components: Components, in the order that was asked for.
        questions: Questions to the whole model.
        kernels: Kernels of perf/test_kernels.py.
        names: What each measurement is called: its name, with a precision or frontend that is not the default one, and
            with the whole variant where the name alone is ambiguous.
        goals: Goals of issue and design, and what was measured.
        superseded: Benchmarks of which another file has a newer run.
    """

    machine: Mapping[str, Any]
    threads: int
    versions: Mapping[str, Any]
    files: tuple[ResultFile, ...]
    components: tuple[Measurement, ...]
    questions: tuple[Measurement, ...]
    kernels: tuple[KernelRate, ...]
    names: Mapping[Measurement, str]
    goals: tuple[GoalResult, ...]
    superseded: tuple[str, ...]

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Components, then questions."""
        return self.components + self.questions

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers that were asked for, measured or not."""
        asked = {name for m in self.measurements for name in (*m.sides, *m.absent)}
        known = [name for name in PEERS if name in asked]
        return (*known, *sorted(asked - {*PEERS, *OURS, PYTORCH}))

    @property
    def scales(self) -> tuple[str, ...]:
        """Scales of the components and questions."""
        return tuple(dict.fromkeys(m.scale for m in self.measurements if m.scale))


def build_sections(files: Sequence[ResultFile], order: Sequence[str] = ()) -> list[Section]:
    """Builds one section for each machine and number of threads, in the order in which they appear.

    Args:
        files: What was measured.
        order: Names of components and whole models that come first, in this order.
    """
    keys: dict[str, None] = {}
    for file in files:
        keys |= dict.fromkeys(map(_key, file.measurements)) | dict.fromkeys(map(_key, file.kernels))
    return [_section(key, files, order) for key in keys]


def _key(entry: Measurement | KernelRate) -> str:
    return repr([entry.machine.get(key) for key in _MACHINE_KEYS] + [entry.threads])


def _section(key: str, files: Sequence[ResultFile], order: Sequence[str]) -> Section:
    measurements = [m for file in files for m in file.measurements if _key(m) == key]
    rates = [kernel for file in files for kernel in file.kernels if _key(kernel) == key]
    measurements.sort(key=lambda m: order.index(m.name) if m.name in order else len(order))
    measured, old = _newest(measurements, [(m.kind, m.name, m.case, m.sample) for m in measurements])
    kernels, old_kernels = _newest(rates, [(kernel.group, kernel.kernel, kernel.shape) for kernel in rates])
    entries: list[Measurement | KernelRate] = [*measured, *kernels]
    newest = max(entries, key=lambda entry: entry.source.created)
    used = {entry.source.file for entry in entries}
    names = _names(measured)
    full = [m for m in measured if m.scale == "full"] or measured
    superseded = [entry.source for entry in old] + [entry.source for entry in old_kernels]
    dated = sorted(measured, key=lambda m: m.source.created, reverse=True)
    return Section(
        machine=newest.machine,
        threads=newest.threads,
        versions=next((m.versions for m in dated if m.versions), {}),
        files=tuple(file for file in files if file.name in used),
        components=tuple(m for m in measured if m.kind == "component"),
        questions=tuple(m for m in measured if m.kind == "question"),
        kernels=tuple(kernels),
        names=names,
        goals=tuple(judge_goal(goal, full, names) for goal in GOALS),
        superseded=tuple(f"{source.benchmark} in {source.file}" for source in superseded),
    )


def _newest(entries: Sequence[Entry], identities: Sequence[object]) -> tuple[list[Entry], list[Entry]]:
    """Returns the newest of those with one identity, in the order of the first of them, and all others."""
    groups: dict[object, list[Entry]] = {}
    for entry, identity in zip(entries, identities, strict=True):
        groups.setdefault(identity, []).append(entry)
    newest = [max(group, key=_created) for group in groups.values()]
    return newest, [entry for group in groups.values() for entry in group if entry is not max(group, key=_created)]


def _created(entry: Measurement | KernelRate) -> datetime:
    return entry.source.created


def _names(measurements: Sequence[Measurement]) -> dict[Measurement, str]:
    plain = [measurement.name for measurement in measurements]
    details = {m: m.variant if m.sample or plain.count(m.name) > 1 else precision_of(m.case) for m in measurements}
    return {m: f"{m.name} ({text})" if text else m.name for m, text in details.items()}


@dataclass(frozen=True)
class Peak:
    """The measured peak of a machine per second: the median of all probes, the least and the most."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Peaks:
    """Arithmetic, FLOP/s, and bandwidth, byte/s; None where nothing was probed."""

    flops: Peak | None
    bandwidth: Peak | None


def peak_range(section: Section) -> Peaks:
    """Returns all that was probed beside the figures of the section."""
    flops = [m.peak_flops for m in section.measurements if m.peak_flops]
    flops += [peak for kernel in section.kernels if kernel.bound == "compute" for peak in kernel.peaks]
    bandwidths = [m.peak_bandwidth for m in section.measurements if m.peak_bandwidth]
    bandwidths += [peak for kernel in section.kernels if kernel.bound == "memory" for peak in kernel.peaks]
    return Peaks(
        *(Peak(statistics.median(found), min(found), max(found)) if found else None for found in (flops, bandwidths))
    )
