"""Outcome: what became of a case, as plain data that the report is rendered from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    """The stages of a case, in the order in which it walks through them."""

    BUILD = "build"
    EXPORT = "export"
    IMPORT = "import"
    COMPILE = "compile"
    LOAD = "load"
    RUN = "run"
    JUDGE = "judge"


class Status(StrEnum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    UNAVAILABLE = "unavailable"


class VerdictKind(StrEnum):
    """The judgement on one output; only `strict` and `oracle` are passes."""

    STRICT = "strict"
    ORACLE = "oracle"
    FAILED = "failed"
    NOT_JUDGEABLE = "not_judgeable"


@dataclass(frozen=True)
class Verdict:
    """The judgement on one output, with every metric; floats are NaN where a metric does not apply.

    Attributes:
        name: Output name; samples other than the main one are prefixed, for instance `empty/features`.
        shape: Shape that the compiled model returned.
        dtype: NumPy dtype name that the compiled model returned.
        elements: Number of elements.
        outside: Elements outside the strict gate (all of them where structure, shape or dtype differ).
        max_abs, mean_abs, max_rel: Error against PyTorch fp32, over the elements that are finite on both sides.
        required_tolerance: Smallest t for which |tvm − torch| ≤ t + t·|torch| holds everywhere.
        sqnr_db: Signal to quantization-noise ratio against PyTorch fp32, dB; inf where equal.
        r_rms, r_inf: Error against the float64 oracle divided by PyTorch's own.
        kind: The verdict.
        reason: One sentence that says why it is not strict; empty for strict.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    outside: int
    max_abs: float
    mean_abs: float
    max_rel: float
    required_tolerance: float
    sqnr_db: float
    r_rms: float
    r_inf: float
    kind: VerdictKind
    reason: str = ""


@dataclass(frozen=True)
class CaseError:
    """Why a case stopped: the exception's type name, its message, and the end of its traceback or output."""

    type: str
    message: str
    details: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of one case.

    Attributes:
        stage: Last stage that was entered.
        status: How it ended.
        error: Why it stopped, if it did not pass.
        seconds: Wall-clock time of each finished stage.
        sizes: Bytes by artifact name (library, parameters, …).
        peak_rss_bytes: Largest resident set of the worker process.
        verdicts: One per output, if it was judged.
    """

    stage: Stage
    status: Status
    error: CaseError | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    verdicts: tuple[Verdict, ...] = ()
