"""Declares the form of a verification report's JSON, by which a file is checked when it is read.

`harness.verify.report.verification.document` describes the fields. Those that no page needs are not declared here.
JSON has no NaN and no infinity: NaN (the metric does not apply) is null, infinities are the strings "inf" and "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from harness.core.outcome import BINS, CELLS, MASKS, CaseError, MaskPicture, Stage, Status, VerdictKind
from harness.runtime.decoding import Count

SCHEMA = 1

_Float = float | Literal["inf", "-inf"] | None
_Error = Annotated[float, Meta(ge=0)] | Literal["inf"] | None


def number(value: float | str | None) -> float:
    """Returns a float of the JSON."""
    return math.nan if value is None else float(value)


def jsonable(value: float) -> float | str | None:
    """Returns a float in the form that `number` reads."""
    if math.isnan(value):
        return None
    return str(value) if math.isinf(value) else value


def error_rows(largest: Sequence[str]) -> list[list[float]]:
    """Returns the rows of a map of errors, which are strings of numbers in the JSON."""
    return [[float(value) for value in row.split()] for row in largest]


class _Distribution(Struct):
    histogram: list[Count]
    largest: Annotated[list[str], Meta(max_length=CELLS)]
    masks: Annotated[list[MaskPicture], Meta(max_length=MASKS)]

    def __post_init__(self) -> None:
        if len(self.histogram) not in (0, BINS):
            raise ValueError(f"`histogram` has {len(self.histogram)} counts, not {BINS}")
        try:
            rows = error_rows(self.largest)
        except ValueError as error:
            raise ValueError(f"`largest` has a word that is no number ({error})") from error
        if any(not 0 < len(row) <= CELLS or len(row) != len(rows[0]) for row in rows):
            raise ValueError("`largest` has rows of unequal or impossible lengths")
        if any(math.isnan(value) or value < 0 for row in rows for value in row):
            raise ValueError("`largest` has a number that is no error")


class _Output(Struct):
    name: str
    shape: list[Any]
    dtype: str
    elements: Count
    outside: Count
    max_abs: _Error
    mean_abs: _Error
    max_rel: _Error
    required_tolerance: _Error
    sqnr_db: _Float
    r_rms: _Error
    r_inf: _Error
    verdict: VerdictKind
    reason: str
    distribution: _Distribution | UnsetType = UNSET


class _Deviation(Struct):
    r_rms: _Error
    r_inf: _Error


class _Boundary(Struct):
    position: int
    function: str
    node: str
    source: str
    operators: list[str]
    between: list[str]
    local: _Deviation
    accumulated: _Deviation
    own_share: _Float


class _First(Struct):
    boundary: _Boundary
    confidence: str
    reason: str
    others: list[int]


class _Experiment(Struct):
    decides: str
    result: _Deviation | None
    problem: str


class _Ablation(Struct):
    cause: str | None
    reason: str
    experiments: list[_Experiment]


class _Diagnosis(Struct):
    program: str
    findings: str = field(name="told")
    boundaries: list[_Boundary]
    selected: list[int] = field(name="shown")
    first: _First | None
    ablation: _Ablation | None
    budget: dict[str, _Float]


class _Device(Struct):
    description: str = field(name="told")
    sent_bytes: Count


_Kernel = tuple[str, Count | None, Count, Count | None, Count | None, Count | None, Count | None, Count | None]
"""A value for each of `document.KERNEL_COLUMNS`."""


class _Case(Struct):
    component: str
    strategy: str
    target: str
    scale: str
    seed: int
    status: Status
    stage: Stage
    expected: bool | None
    problem: str | None
    why: str | None
    error: CaseError | None
    seconds: dict[str, _Float]
    sizes: dict[str, Count]
    peak_rss_bytes: Count
    repro: str
    outputs: list[_Output]
    precision: str = ""
    frontend: str = ""
    weights: str = ""
    device: _Device | UnsetType = UNSET
    emulated: bool = False
    lost_schedules: tuple[str, ...] = ()
    diagnosis: _Diagnosis | UnsetType = UNSET
    not_diagnosed: str = ""
    kernels: dict[str, Annotated[list[_Kernel], Meta(min_length=1)]] | UnsetType = UNSET


class _Machine(Struct):
    usable_cpus: float | None = None
    gpus: list[str] = []
    memory_bytes: Count | None = None
    cgroup_memory_bytes: Count | None = None
    usable_memory_bytes: Count | None = None


class _Summary(Struct):
    cases: int
    passed: int
    expected_failures: int
    unexpected: int
    unavailable: int
    outputs: int
    compiled_only: int = 0
    emulated: int = 0
    strict_outputs: int = 0


class Report(Struct):
    """A report, whose counts are those of its cases."""

    schema: Literal[1]
    created: str
    machine: _Machine
    versions: dict[str, Any]
    cases: list[_Case]
    summary: _Summary

    def __post_init__(self) -> None:
        counted = self.summary
        total = counted.passed + counted.expected_failures + counted.unexpected + counted.unavailable
        if not total == counted.cases == len(self.cases):
            raise ValueError("`summary` does not add up to the number of cases")
