"""Records the progress of a case, and defines its outcome as plain data that the report is rendered from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from harness.runtime.decoding import Count

EDGES = tuple(10.0 ** (half_decades / 2) for half_decades in range(-10, 5))
"""Upper edges of the bins of a histogram, in units of the strict gate; the last bin has no upper edge."""
BINS = len(EDGES) + 1
WITHIN = EDGES.index(1.0) + 1
"""Number of bins within the gate; the others are outside."""
CELLS = 24
"""Maximum number of rows and of columns of an error map."""
PIXELS = 96
"""Maximum number of rows and of columns of a mask picture."""
MASKS = 3
"""Maximum number of masks of one output that are kept as pictures."""
Picture = Annotated[bytes, Meta(min_length=1, max_length=18_000)]
"""A PNG file of at most `PIXELS` × `PIXELS` pixels of 8 bits, uncompressed, with twice the room for PNG's overhead."""


@dataclass(frozen=True)
class MaskPicture:
    """A mask of PyTorch and of the compiled model, at most `PIXELS` high and wide, as PNG files.

    Attributes:
        index: Index of the mask on all axes of the output but the last two.
        size: Height and width of the mask, in pixels.
        differing: Number of pixels of the full mask that are inside, or not a number, on one side only.
        torch: PyTorch's mask. Grey: 8 levels up to zero, 8 above; a boolean mask is black and white.
        tvm: The compiled model's mask in the same levels; None if both pictures are equal.
        marks: A picture that is transparent except where a pixel differs; None if no pixel differs.
    """

    index: tuple[Count, ...]
    size: tuple[Count, Count]
    differing: Count
    torch: Picture
    tvm: Picture | None
    marks: Picture | None


@dataclass(frozen=True)
class Distribution:
    """The distribution of the errors of one output against PyTorch fp32.

    Attributes:
        histogram: Elements by |error| / gate, where the gate is 1e-5 + 1e-5·|torch|: `BINS` counts between `EDGES`, of
            which the first `WITHIN` lie within the gate. NaN and infinities that differ are in the last bin, equal ones
            in the first. Empty for integers and booleans, which have no gate.
        largest: Largest |error| of the elements in each cell of the image, over all other axes: at most `CELLS` rows
            and columns, which divide height and width evenly; inf where NaN and infinities differ. Empty if the output
            is not an image.
        masks: At most `MASKS` masks in their order: first those in which most pixels differ, then those whose inside
            and outside are both large. Empty if the output is not a mask.
    """

    histogram: tuple[int, ...] = ()
    largest: tuple[tuple[float, ...], ...] = ()
    masks: tuple[MaskPicture, ...] = ()


class Stage(StrEnum):
    """The stages of a case, in their order."""

    BUILD = "build"
    EXPORT = "export"
    IMPORT = "import"
    COMPILE = "compile"
    LOAD = "load"
    RUN = "run"
    JUDGE = "judge"


class Status(StrEnum):
    """The way in which a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    UNAVAILABLE = "unavailable"


class VerdictKind(StrEnum):
    """The kind of a verdict on one output."""

    STRICT = "strict"
    ORACLE = "oracle"
    FAILED = "failed"
    NOT_JUDGEABLE = "not_judgeable"

    @property
    def passes(self) -> bool:
        """Returns whether the output is right: strictly, or by the oracle."""
        return self in (VerdictKind.STRICT, VerdictKind.ORACLE)


METRICS = ("max_abs", "mean_abs", "max_rel", "required_tolerance", "sqnr_db", "r_rms", "r_inf")
"""The floats of a verdict."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one output, with every metric; floats are NaN where a metric does not apply.

    Attributes:
        name: Name of the output; samples other than the main one are prefixed, for instance `empty/features`.
        shape: Shape of the compiled model's output.
        dtype: NumPy dtype name of the compiled model's output.
        elements: Number of elements.
        outside: Elements outside the strict gate (all of them where structure, shape or dtype differ).
        max_abs, mean_abs, max_rel: Error against PyTorch fp32, over the elements that are finite on both sides.
        required_tolerance: Smallest t for which |tvm − torch| ≤ t + t·|torch| holds everywhere.
        sqnr_db: Signal to quantization-noise ratio against PyTorch fp32, dB; inf where equal.
        r_rms, r_inf: Error against the float64 oracle divided by PyTorch's own.
        kind: The verdict.
        reason: One sentence that says why the output is not strict; empty if it is.
        distribution: Distribution of the errors, if it was measured.
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
    distribution: Distribution | None = None


@dataclass(frozen=True)
class CaseError:
    """The error that stopped a case: the exception's type name, its message, and the end of its traceback or output."""

    type: str
    message: str
    details: str = ""


@dataclass(frozen=True)
class Kernel:
    """One GPU kernel as the compiler's report or its source describes it; None where neither tells.

    Attributes:
        name: Name of the function on the device.
        architecture: Architecture that the numbers hold for: `sm_90`, or `metal`.
        threads: Threads of a block (threadgroup) in every launch.
        shared_bytes: Static shared (threadgroup) memory of a block.
        buffers: Number of arguments that occupy a buffer slot (Metal).
        registers: Registers per thread.
        constant_bytes: Constant memory, arguments included.
        stack_bytes: Local memory per thread.
        spill_bytes: Spilled registers: bytes stored to and loaded from local memory, together.
    """

    name: str
    architecture: str
    threads: int | None = None
    shared_bytes: int = 0
    buffers: int | None = None
    registers: int | None = None
    constant_bytes: int | None = None
    stack_bytes: int | None = None
    spill_bytes: int | None = None


@dataclass(frozen=True)
class Device:
    """The machine that ran a case, if another machine compiled and judged it.

    Attributes:
        name, cpu, system, architecture, threads: The machine, as in `compiler.execution.remote.device.Description`.
        target: The compilation target.
        hardware: Name of the processor or GPU that runs the target.
        address: Address at which the machine was reached.
        sent_bytes: Size of the weights and code that the device did not have yet.
    """

    name: str
    cpu: str
    hardware: str
    target: str
    system: str
    architecture: str
    threads: int
    address: str
    sent_bytes: int

    def __str__(self) -> str:
        runs = f"{self.target} on {self.hardware}" if self.hardware != self.cpu else self.target
        machine = f"{self.name} ({self.cpu}, {self.system} on {self.architecture}, {self.threads} threads"
        return f"{machine}; {runs}), at {self.address}"


@dataclass
class Outcome:
    """The outcome of one case; while the case runs, what is known of it.

    Attributes:
        stage: Last stage that the case entered.
        status: The way in which the case ended.
        error: The error that stopped the case, if it did not pass.
        seconds: Wall-clock time of each finished stage.
        sizes: Bytes by artifact name (library, parameters, …).
        peak_rss_bytes: Largest resident set of the worker process.
        verdicts: One verdict per output, if the case was judged.
        device: The machine that ran the case, if it was another one and the case got that far.
        kernels: Kernels of a GPU target, for all samples, once per architecture.
        emulated: Whether the CPU emulated the GPU's kernels or its own matrix unit.
        lost_schedules: One sentence for each schedule that could not be applied to a function of any sample.
    """

    stage: Stage
    status: Status
    error: CaseError | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    verdicts: tuple[Verdict, ...] = ()
    device: Device | None = None
    kernels: tuple[Kernel, ...] = ()
    emulated: bool = False
    lost_schedules: tuple[str, ...] = ()

    @property
    def compiled(self) -> bool:
        """Returns whether code was generated for the target.

        A case that cannot be compiled here stops before that.
        """
        stages = list(Stage)
        position = stages.index(self.stage) - stages.index(Stage.COMPILE)
        return position > 0 or (position == 0 and self.status is Status.UNAVAILABLE)


@dataclass
class Progress:
    """The progress of a case: its outcome so far, and the function that hears of each stage."""

    on_stage: Callable[[str], None]
    outcome: Outcome = field(default_factory=lambda: Outcome(Stage.BUILD, Status.PASSED))

    @contextmanager
    def time_stage(self, stage: Stage) -> Iterator[None]:
        """Announces the stage, and adds its duration if it ends without an error."""
        self.outcome.stage = stage
        self.on_stage(stage.value)
        start, seconds = time.perf_counter(), self.outcome.seconds
        yield
        seconds[stage.value] = seconds.get(stage.value, 0.0) + time.perf_counter() - start

    @contextmanager
    def time_steps(self, stage_of: Callable[[str], Stage]) -> Iterator[Callable[[str], None]]:
        """Yields a callback for the steps of a task; each step is a stage that ends where the next begins."""
        with ExitStack() as current:

            def on_step(step: str) -> None:
                current.close()
                current.enter_context(self.time_stage(stage_of(step)))

            yield on_step

    def end(self, status: Status, error: CaseError | None = None, verdicts: tuple[Verdict, ...] = ()) -> Outcome:
        """Returns the outcome of a case that ends here."""
        return replace(self.outcome, status=status, error=error, verdicts=verdicts)
