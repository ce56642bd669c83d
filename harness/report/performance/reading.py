"""Reads what `pytest perf … --benchmark-json=FILE` wrote, and checks that it is what the suites write.

The `extra_info` of a benchmark in pytest-benchmark's JSON says what it is:

- of `perf/test_components.py`: `case`, the fields of a `harness.core.case.Case`; `sample`, empty or not there where it
  is the main one; `sides` by name, each
  {"error": sentence} or {"seconds": raw rounds, "median", "mean", "p95", "p99", "throughput", "first_call",
  "compile_seconds", "load_seconds", "memory", "worst_r_rms", "verdict", "reason"}, of peers also "setting" and, where
  a peer chooses the type that it computes in, "computes_in"; `peak_flops`, `peak_bandwidth`, `flop`; `kernels`
  [{"name", "size", "calls", "seconds", "flop", "bytes"}] of the side `profiled`; and `note` where tuning changed
  nothing;
- of `perf/test_end_to_end.py`, `perf/test_classes.py` and `perf/test_interactive.py`: the same without `sample`, and
  the question `what`;
- of `perf/test_kernels.py`: `bound`, `work`, `moved`, `peaks`, `rate`, `torch_rate`, …

Others (the suites' tests of their own instruments, the rotary strategies) are left alone.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import VerdictKind
from harness.report.performance.cases import question_variant_of, recorded_case, variant_of
from harness.report.performance.sides import LABELS, OURS, PYTORCH, TUNED, UNTUNED, recorded_side

ENOUGH_FOR_P95, ENOUGH_FOR_P99 = 20, 100
"""Rounds below which a percentile is not believed, whatever the file says."""

_RELATIVE_ROUNDING = 1e-6
"""Relative difference that a figure may have from the one that its raw rounds give."""


@dataclass(frozen=True)
class Source:
    """Where a figure comes from.

    Attributes:
        file: Name of the JSON file.
        benchmark: Name of the benchmark in it.
        created: When the file was written.
    """

    file: str
    benchmark: str
    created: datetime


@dataclass(frozen=True)
class Memory:
    """Resident memory, bytes: what loading adds, what a run takes above that, and both."""

    weights: int
    run: int
    peak: int


@dataclass(frozen=True)
class Side:
    """One side of an interleaved measurement; times are seconds of one call.

    Attributes:
        name: Name in the file, for instance `torch` or `tuned`.
        seconds: One number for each round.
        p95, p99: Percentiles; None with fewer than `ENOUGH_FOR_P95` or `ENOUGH_FOR_P99` rounds.
        throughput: Calls per second.
        worst_r_rms: Error against float64 over PyTorch's own, of the worst output; None for PyTorch itself.
        verdict: What the parity gate said, None where it was not asked.
        reason: Why that is no pass; empty if it is one.
        setting: How a peer was set, and the type that it chose; empty where the file does not say.
    """

    name: str
    seconds: tuple[float, ...]
    median: float
    mean: float
    p95: float | None
    p99: float | None
    throughput: float
    first_call: float | None = None
    compile_seconds: float | None = None
    load_seconds: float | None = None
    memory: Memory | None = None
    worst_r_rms: float | None = None
    verdict: str | None = None
    reason: str = ""
    setting: str = ""

    @property
    def unsound(self) -> bool:
        """Whether the parity gate was asked and said no: its time buys another result."""
        return self.verdict in (VerdictKind.FAILED.value, VerdictKind.NOT_JUDGEABLE.value)

    @property
    def label(self) -> str:
        """How it is called in the report."""
        return LABELS.get(self.name, self.name)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the rounds; of a single round, that round."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third


@dataclass(frozen=True)
class KernelTime:
    """A kernel within a component.

    Attributes:
        name: Name of the compiled function.
        size: Its extents in words, empty where they are not known.
        calls: How often one run calls it.
        seconds: Time of all its calls in one run.
        flop: Floating-point operations of all its calls, None where they are not known.
        bytes: What they must read and write at least, None where it is not known.
    """

    name: str
    size: str
    calls: int
    seconds: float
    flop: float | None
    bytes: float | None


@dataclass(frozen=True, eq=False)
class Measurement:
    """A component, or a question to the whole model: sides whose rounds were interleaved.

    Attributes:
        source: The benchmark.
        kind: Which suite.
        case: The case.
        name: The component, or the question.
        machine: From `harness.machine.describe_machine`.
        versions: Installed packages, empty if the file does not say.
        sides: Sides by name; PyTorch is one of them.
        absent: Sides that could not be measured, with the reason.
        nothing_found: Whether tuning changed nothing, so that untuned and tuned are one program, measured once.
        flop: Floating-point operations of one run, None where they are not counted.
        peak_flops: FLOP/s that the machine did in the same run, None where it was not probed; bandwidth likewise.
        profiled: The side whose kernels these are.
        kernels: Kernels of that side.
        sample: Name of the component's sample; empty for its main one.
    """

    source: Source
    kind: Literal["component", "question"]
    case: Case
    name: str
    threads: int
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    sides: Mapping[str, Side]
    absent: Mapping[str, str] = field(default_factory=dict)
    nothing_found: bool = False
    flop: float | None = None
    peak_flops: float | None = None
    peak_bandwidth: float | None = None
    profiled: str = UNTUNED
    kernels: tuple[KernelTime, ...] = ()
    sample: str = ""

    @property
    def scale(self) -> str:
        """`full` or `shallow`; empty if the file does not say."""
        return str(self.case.scale)

    @property
    def variant(self) -> str:
        """Strategy, target, scale and sample of a component, scale of a question; and what is not as usual."""
        if self.kind == "question":
            return question_variant_of(self.case)
        return " · ".join(filter(None, (variant_of(self.case), self.sample)))

    @property
    def ours(self) -> Side:
        """The best of ours: tuned where there is a database that fits, else untuned."""
        return next(self.sides[name] for name in OURS if name in self.sides)

    def side(self, name: str) -> Side | None:
        """Returns a side by name; untuned is tuned as well where tuning changed nothing."""
        return self.sides.get(UNTUNED if name == TUNED and self.nothing_found else name)


@dataclass(frozen=True)
class KernelRate:
    """A kernel alone, from `perf/test_kernels.py`.

    Attributes:
        bound: Whether `work` is operations or bytes.
        moved: Bytes read and written at least.
        peaks: What the machine did right before and after, per second, in the unit of `work`.
        rate, torch_rate: Work per second at our median, and at PyTorch's.
        seconds, torch_seconds: Our median, and PyTorch's.
    """

    source: Source
    group: str
    kernel: str
    shape: str
    bound: Literal["compute", "memory"]
    threads: int
    machine: Mapping[str, Any]
    work: float
    moved: float
    peaks: tuple[float, ...]
    rate: float
    torch_rate: float
    seconds: float
    torch_seconds: float

    @property
    def torch_over_ours(self) -> float:
        """PyTorch's median / ours."""
        return self.torch_seconds / self.seconds

    @property
    def peak(self) -> float:
        """The median of the probes."""
        return statistics.median(self.peaks)


@dataclass(frozen=True)
class ResultFile:
    """One JSON file.

    Attributes:
        name: Name of the file, without its folder.
        created: When the run ended, UTC.
        commit: Commit of the checkout, with ` (changed)` where it had uncommitted changes; empty if unknown.
        left_alone: Benchmarks that this report does not show.
    """

    name: str
    created: datetime
    commit: str
    measurements: tuple[Measurement, ...]
    kernels: tuple[KernelRate, ...]
    left_alone: tuple[str, ...] = ()


def read_results(paths: Sequence[Path]) -> list[ResultFile]:
    """Reads all files, in the order given.

    Raises:
        HarnessError: There is none, one cannot be read or is not of the suites, or one is named twice.
    """
    if not paths:
        raise HarnessError("There are no results: name the files that pytest perf --benchmark-json=FILE wrote.")
    names = [path.name for path in paths]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled:
        raise HarnessError(
            f"Two results are called {doubled}: every figure names its file, so give them distinct names."
        )
    return [read_result(path) for path in paths]


def read_result(path: Path) -> ResultFile:
    """Reads one file.

    Raises:
        HarnessError: It is missing, not JSON, not of pytest-benchmark, or holds nothing of the suites.
    """
    again = "write it with `pytest perf/test_components.py --benchmark-json=FILE`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HarnessError(f"Cannot read the results {path}: {error.strerror or error}; {again}.") from error
    except ValueError as error:
        raise HarnessError(f"{path} is not JSON ({error}): the run that wrote it was cut off; {again}.") from error
    if not isinstance(data, dict) or not isinstance(data.get("benchmarks"), list):
        raise HarnessError(f"{path} is not a JSON file of pytest-benchmark: it has no list `benchmarks`; {again}.")
    try:
        return _file(path.name, _Fields(data, "the file"))
    except _Problem as problem:
        raise HarnessError(f"{path}: {problem}; {again}.") from problem


class _Problem(ValueError):
    """A problem in a file, with the place."""


class _Fields:
    """An object of the JSON, and what it is, for sentences."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise _Problem(f"{where} is not an object")
        self.data, self.where = data, where

    def wrong(self, key: str) -> _Problem:
        if key not in self.data:
            return _Problem(f"{self.where} has no `{key}`")
        text = repr(self.data[key])
        return _Problem(f"`{key}` of {self.where} is {text if len(text) <= 60 else f'{text[:60]}…'}")

    def text(self, key: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str):
            raise self.wrong(key)
        return value

    def number(self, key: str, positive: bool = True) -> float:
        value = _finite(self.data.get(key))
        if value is None or value < 0 or (positive and value == 0):
            raise self.wrong(key)
        return value

    def perhaps(self, key: str) -> float | None:
        """Reads a number that may be missing, null, NaN or `n/a`; None then."""
        value = self.data.get(key)
        if value in (None, "n/a") or (isinstance(value, float) and math.isnan(value)):
            return None
        return self.number(key, positive=False)

    def numbers(self, key: str) -> tuple[float, ...]:
        values = self.data.get(key)
        if not isinstance(values, list) or not values:
            raise self.wrong(key)
        found = tuple(number for value in values if (number := _finite(value)) is not None and number > 0)
        if len(found) != len(values):
            raise self.wrong(key)
        return found

    def inner(self, key: str) -> _Fields:
        if key not in self.data:
            raise self.wrong(key)
        return _Fields(self.data[key], f"`{key}` of {self.where}")

    def inner_or_nothing(self, key: str) -> Mapping[str, Any]:
        return self.inner(key).data if self.data.get(key) is not None else {}


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _file(name: str, fields: _Fields) -> ResultFile:
    created = _moment(fields)
    measurements: list[Measurement] = []
    kernels: list[KernelRate] = []
    left_alone = []
    for number, data in enumerate(fields.data["benchmarks"], 1):
        benchmark = _Fields(data, f"benchmark {number}")
        source = Source(name, benchmark.text("name"), created)
        extra = _Fields(benchmark.data.get("extra_info", {}), source.benchmark)
        if "bound" in extra.data:
            kernels.append(_kernel_rate(source, extra))
        elif isinstance(extra.data.get("sides"), dict):
            measurements.append(_measurement(source, extra))
        else:
            left_alone.append(source.benchmark)
    if not measurements and not kernels:
        kinds = "of perf/test_components.py, perf/test_end_to_end.py or perf/test_kernels.py"
        raise _Problem(f"it holds no benchmark {kinds} in the layout of this version")
    return ResultFile(name, created, _commit(fields), tuple(measurements), tuple(kernels), tuple(left_alone))


def _moment(fields: _Fields) -> datetime:
    try:
        return datetime.fromisoformat(fields.text("datetime"))
    except ValueError as error:
        raise error if isinstance(error, _Problem) else fields.wrong("datetime") from error


def _commit(fields: _Fields) -> str:
    info = fields.data.get("commit_info")
    if not isinstance(info, dict) or not info.get("id"):
        return ""
    return str(info["id"])[:12] + (" (changed)" if info.get("dirty") else "")


def _measurement(source: Source, extra: _Fields) -> Measurement:
    sides: dict[str, Side] = {}
    absent: dict[str, str] = {}
    given = extra.inner("sides")
    for name in given.data:
        side = given.inner(name)
        if "error" in side.data:
            absent[name] = side.text("error")
        else:
            sides[name] = _side(name, side)
    if PYTORCH not in sides or not any(name in sides for name in OURS):
        raise _Problem(f"{extra.where} lacks the side `{PYTORCH}` or both `{UNTUNED}` and `{TUNED}`")
    _check_ratios(extra, sides)
    names = {name: recorded_side(name, side) for name, side in given.data.items()}
    sides = {names[name]: replace(side, name=names[name]) for name, side in sides.items()}
    absent = {names[name]: reason for name, reason in absent.items()}
    question = "what" in extra.data
    case = _case(extra)
    listed = extra.data.get("kernels") or []
    if not isinstance(listed, list):
        raise extra.wrong("kernels")
    profiled = extra.data.get("profiled", next(name for name in OURS if name in sides))
    return Measurement(
        source=source,
        kind="question" if question else "component",
        case=case,
        name=extra.text("what") if question else case.component,
        threads=int(extra.number("threads")),
        machine=extra.inner("machine").data,
        versions=extra.inner_or_nothing("versions"),
        sides=sides,
        absent=absent,
        nothing_found=TUNED not in sides and bool(extra.data.get("note")),
        flop=extra.perhaps("flop"),
        peak_flops=extra.perhaps("peak_flops"),
        peak_bandwidth=extra.perhaps("peak_bandwidth"),
        profiled=str(profiled),
        kernels=tuple(_kernel_time(_Fields(kernel, f"a kernel of {extra.where}")) for kernel in listed),
        sample=str(extra.data.get("sample", "")),
    )


def _case(extra: _Fields) -> Case:
    try:
        case = recorded_case(extra.data)
    except ValueError as error:
        raise extra.wrong("case") from error
    if case is None:
        raise extra.wrong("case")
    return case


def _side(name: str, fields: _Fields) -> Side:
    seconds = fields.numbers("seconds")
    median = fields.number("median")
    if not math.isclose(median, statistics.median(seconds), rel_tol=_RELATIVE_ROUNDING):
        raise _Problem(
            f"`median` of {fields.where} is {median:g}, that of its rounds is {statistics.median(seconds):g}"
        )
    percentiles = {key: fields.perhaps(key) for key in ("p95", "p99")}
    for key, enough in (("p95", ENOUGH_FOR_P95), ("p99", ENOUGH_FOR_P99)):
        if percentiles[key] is not None and len(seconds) < enough:
            raise _Problem(f"{fields.where} has a `{key}` of {len(seconds)} rounds, where it takes {enough}")
    memory = fields.data.get("memory")
    verdict = fields.data.get("verdict")
    return Side(
        name=name,
        seconds=seconds,
        median=median,
        mean=fields.number("mean"),
        p95=percentiles["p95"],
        p99=percentiles["p99"],
        throughput=fields.number("throughput"),
        first_call=fields.perhaps("first_call"),
        compile_seconds=fields.perhaps("compile_seconds"),
        load_seconds=fields.perhaps("load_seconds"),
        memory=None if memory is None else _memory(fields.inner("memory")),
        worst_r_rms=fields.perhaps("worst_r_rms"),
        verdict=None if verdict is None else str(verdict),
        reason=str(fields.data.get("reason") or ""),
        setting=_setting(fields),
    )


def _setting(fields: _Fields) -> str:
    chosen = f"it computed in {fields.text('computes_in')}" if "computes_in" in fields.data else ""
    return "; ".join(filter(None, (str(fields.data.get("setting") or ""), chosen)))


def _memory(fields: _Fields) -> Memory:
    keys = ("weights_bytes", "run_bytes", "peak_bytes")
    values = {key: _finite(fields.data.get(key)) for key in keys}
    for key in keys:
        if values[key] is None:
            raise fields.wrong(key)
    return Memory(*(int(value) for value in values.values() if value is not None))


def _check_ratios(extra: _Fields, sides: Mapping[str, Side]) -> None:
    """Checks that the ratios in the file are those of its medians."""
    ratios = _Fields(extra.inner_or_nothing("ratios"), f"`ratios` of {extra.where}")
    for key in ratios.data:
        over, _, under = key.partition("_over_")
        if over in sides and under in sides:
            expected = sides[over].median / sides[under].median
            if not math.isclose(ratios.number(key), expected, rel_tol=_RELATIVE_ROUNDING):
                raise _Problem(f"`{key}` of {ratios.where} is {ratios.number(key):g}, its medians give {expected:g}")


def _kernel_time(fields: _Fields) -> KernelTime:
    return KernelTime(
        name=fields.text("name"),
        size=fields.text("size") if "size" in fields.data else "",
        calls=int(fields.number("calls")),
        seconds=fields.number("seconds", positive=False),
        flop=fields.perhaps("flop"),
        bytes=fields.perhaps("bytes"),
    )


def _kernel_rate(source: Source, extra: _Fields) -> KernelRate:
    bound = extra.text("bound")
    if bound not in ("compute", "memory"):
        raise extra.wrong("bound")
    return KernelRate(
        source=source,
        group=extra.text("group"),
        kernel=extra.text("kernel"),
        shape=extra.text("shape"),
        bound="compute" if bound == "compute" else "memory",
        threads=int(extra.number("threads")),
        machine=extra.inner("machine").data,
        work=extra.number("work"),
        moved=extra.number("moved"),
        peaks=extra.numbers("peaks"),
        rate=extra.number("rate"),
        torch_rate=extra.number("torch_rate"),
        seconds=extra.number("tvm_median"),
        torch_seconds=extra.number("torch_median"),
    )
