"""What became slower or faster between two runs of the same suite, beyond the noise that both runs show.

A machine that is slower that day is no slower program: a side's rounds are divided by those of PyTorch, with which they
were interleaved. Where there is no PyTorch, or another version of it, the arithmetic peak that was measured in the same
run stands in. What remains is compared by rank (Hodges and Lehmann's shift with Mann and Whitney's interval at 99 %),
which asks nothing of the distribution and little of outliers. A shift counts if the interval excludes none, and if it
is larger than the spread of the rounds of either run: what a run does to its own rounds is no news in another run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.verify.report.performance.reading import read_json
from perf.results import OURS, TORCH, UNTUNED

Info = Mapping[str, Any]
"""What a benchmark keeps in `extra_info`."""
Logarithms = npt.NDArray[np.float64]

Z = 2.576
"""Normal quantile of an interval of 99 %."""
SPREAD = (0.16, 0.84)
"""Quantiles between which two thirds of the rounds lie, as within one standard deviation."""
LEAST = 0.02
"""A smaller change is none: code and data lie elsewhere in memory in every process."""


class Change(StrEnum):
    """What became of a side."""

    SLOWER = "slower"
    FASTER = "faster"
    NONE = "no difference beyond noise"
    UNKNOWN = "too few rounds"


@dataclass(frozen=True)
class Shift:
    """By which factor times changed.

    Attributes:
        ratio: Time after over time before.
        low, high: Interval of the ratio; 0 and infinity where there are too few rounds for one.
        noise: The factor, above 1, that a change has to exceed in either direction.
    """

    ratio: float
    low: float
    high: float
    noise: float

    @property
    def change(self) -> Change:
        """What that means."""
        if self.high == math.inf:
            return Change.UNKNOWN
        if self.low > 1 and self.ratio > self.noise:
            return Change.SLOWER
        if self.high < 1 and 1 / self.ratio > self.noise:
            return Change.FASTER
        return Change.NONE


@dataclass(frozen=True)
class Comparison:
    """One side of one case in both runs.

    Attributes:
        case: Name of the benchmark.
        side: Of it.
        before, after: Median seconds, as measured.
        shift: What remains of the change when that of the machine is taken out.
        relative_to: What stands for the machine.
    """

    case: str
    side: str
    before: float
    after: float
    shift: Shift
    relative_to: str

    @property
    def is_slowdown(self) -> bool:
        """Whether what this project compiled became slower; others are shown, but are not its fault."""
        return self.side in OURS and self.shift.change is Change.SLOWER


def shift_between(before: Logarithms, after: Logarithms) -> Shift:
    """Compares logarithms of times of two runs, in any order; at least one each."""
    differences = np.sort(np.subtract.outer(after, before).ravel())
    pairs = len(differences)
    spread = max(float(np.diff(np.quantile(values, SPREAD))[0]) / 2 for values in (before, after))
    outside = pairs / 2 - Z * math.sqrt(pairs * (len(before) + len(after) + 1) / 12)
    low, high = -math.inf, math.inf
    if outside >= 0:
        low, high = differences[int(outside)], differences[pairs - 1 - int(outside)]
    noise = max(spread, math.log1p(LEAST))
    return Shift(*(math.exp(value) for value in (np.median(differences), low, high, noise)))


def compare_runs(before: Mapping[str, Info], after: Mapping[str, Info]) -> list[Comparison]:
    """Compares every side that both runs have, benchmark by benchmark.

    Raises:
        HarnessError: The case of a benchmark cannot be read.
    """
    known = {_identity(name, info): info for name, info in before.items()}
    return [
        comparison
        for name, info in after.items()
        if (earlier := known.get(_identity(name, info))) is not None
        for comparison in _compare(name, earlier, info)
    ]


def _identity(name: str, info: Info) -> object:
    """Returns what tells a benchmark from others: test, case and question, or its name if it is about no case."""
    if "case" not in info:
        return name
    try:
        return name.partition("[")[0], Case.from_json(info["case"]), info.get("what")
    except TypeError as error:
        raise HarnessError(f"the case of {name} is not told by its fields: measure it again") from error


def read_run(path: Path) -> dict[str, Info]:
    """The benchmarks of a stored run, by name; its file may be compressed by gzip.

    Raises:
        HarnessError: The file is missing or not of pytest-benchmark.
    """
    try:
        return {benchmark["fullname"]: benchmark.get("extra_info", {}) for benchmark in read_json(path)["benchmarks"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise HarnessError(f"{path} is no stored run: give a file of --benchmark-json") from error


def checked(comparisons: Sequence[Comparison], stored: str) -> Sequence[Comparison]:
    """The comparisons, if there are any.

    Raises:
        HarnessError: The runs have nothing in common.
    """
    if not comparisons:
        raise HarnessError(f"{stored} has no rounds of any of these benchmarks: compare a run of the same cases")
    return comparisons


def _compare(name: str, before: Info, after: Info) -> Iterator[Comparison]:
    runs = (rounds_of(before), rounds_of(after))
    same_torch = all(TORCH in run for run in runs) and _torch(before) == _torch(after)
    peaks: list[float] = [info["peak_flops"] for info in (before, after) if info.get("peak_flops")]
    for side in (side for side in runs[1] if side in runs[0]):
        own = [np.log(np.asarray(run[side], np.float64)) for run in runs]
        if side != TORCH and same_torch:
            relative_to = "PyTorch"
            own = [values - np.log(np.asarray(run[TORCH])) for values, run in zip(own, runs, strict=True)]
        elif len(peaks) == len(runs):
            relative_to = "peak"
            own = [values + math.log(peak) for values, peak in zip(own, peaks, strict=True)]
        else:
            relative_to = "nothing"
        medians = [float(np.median(run[side])) for run in runs]
        yield Comparison(name, side, medians[0], medians[1], shift_between(*own), relative_to)


def rounds_of(info: Info) -> dict[str, Sequence[float]]:
    """Raw rounds by side, of any of the suites; empty without them."""
    if "tvm_seconds" in info:
        return {TORCH: info["torch_seconds"], UNTUNED: info["tvm_seconds"]}
    sides = info.get("sides")
    if not isinstance(sides, Mapping):
        return {}
    return {name: side["seconds"] for name, side in sides.items() if side.get("seconds")}


def _torch(info: Info) -> Any:
    return info.get("versions", {}).get("torch")
