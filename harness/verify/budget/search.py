"""Searches for the groups that must stay float32 to hold a limit: measures each alone, then chosen groups together."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compiler.targets import TARGETS
from harness.core.budget import NO_GROUPS, Budget, Groups
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.files import write_text
from harness.core.outcome import Stage
from harness.core.precision import PRECISIONS
from harness.core.settings import Settings
from harness.models.registry import component_of, models, subjects
from harness.runtime.decoding import convert
from harness.verify.budget.choice import Contribution, choose, predict_errors

if TYPE_CHECKING:
    from harness.verify.budget.measurement import Bench, Measurement

ADVICE = "choose another file with --out"
"""Advice for the user if a file cannot be written."""
STEPS = 6
"""Number of points of the curve of error over time, including float32 and half precision throughout."""

_STEP = 0.9
"""Smallest factor by which the next choice aims lower, if a choice exceeds the limit when it is measured."""

_SLIGHTLY_LESS = 1 - 1e-9
"""Makes a capacity too small for the choice that was just refused."""


@dataclass(frozen=True)
class Rates:
    """Speeds of products, from which time is estimated.

    Attributes:
        fp32: 10⁹ operations per second in float32.
        half: 10⁹ operations per second in half precision.
    """

    fp32: float
    half: float

    def seconds(self, operations: int, *, half: bool) -> float:
        """Returns the estimated time of products."""
        return operations / (self.half if half else self.fp32) / 1e9

    def saved_seconds(self, operations: int) -> float:
        """Returns the estimated time that products save in half precision."""
        return self.seconds(operations, half=False) - self.seconds(operations, half=True)


@dataclass(frozen=True)
class GroupError:
    """The error of one group in half precision, with everything else in float32.

    Attributes:
        name: Name of the group.
        operations: Number of operations of its products with half operands, in one run of all samples.
        r_rms: By output, the error that the group adds: the square root of the increase of the squared error.
        float32: Whether the group stays float32.
    """

    name: str
    operations: int
    r_rms: Mapping[str, float]
    float32: bool


@dataclass(frozen=True)
class Point:
    """One choice of groups, a point of the curve of error over time.

    Attributes:
        half: Number of groups in half precision.
        seconds: Estimated time of all groups' products.
        predicted: Largest r_rms of an output, predicted from the errors of single groups.
        measured: Largest measured r_rms of an output.
    """

    half: int
    seconds: float
    predicted: float
    measured: float


@dataclass(frozen=True)
class Result:
    """The result of `sam3-tvm budget`.

    Attributes:
        budget: The chosen budget.
        groups: The measured error of each group.
        untouched: Groups that are always float32 on the target.
        front: The curve, from float32 to half precision throughout.
        chosen: The point of the chosen groups.
        outputs: By output, r_rms in float32, in half precision throughout, and of the choice.
        rates: Speeds from which time is estimated.
        cpu: LLVM's name of the processor that code was compiled for; empty for a GPU.
        gains: Whether the processor multiplies linear layers faster in bfloat16 than in fp32; None for a GPU.
        refused: Number of choices that held the limit as predicted, but exceeded it when they were measured.
        reused_count: Number of measurements of earlier runs.
        new_count: Number of measurements of this run.
    """

    budget: Budget
    groups: tuple[GroupError, ...]
    untouched: tuple[str, ...]
    front: tuple[Point, ...]
    chosen: Point
    outputs: Mapping[str, Mapping[str, float]]
    rates: Rates
    cpu: str
    gains: bool | None
    refused: int
    reused_count: int
    new_count: int

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of the file: the budget and the measurements."""
        measured = {
            name: value for name, value in asdict(self).items() if name not in ("budget", "reused_count", "new_count")
        }
        return self.budget.to_json() | {"measured": measured}


def find_budget(
    case: Case,
    settings: Settings,
    limit: float,
    rates: Rates,
    log: Path,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Result:
    """Measures the groups of a component and chooses which stay float32, in a separate process.

    Args:
        case: The component; its precision is half.
        settings: Weights, schedules and processors.
        limit: Largest r_rms of every output.
        rates: Speeds of products, from which time is estimated.
        log: File of measurements, which continues that of an interrupted run.
        on_stage: Called with the name of each step as it begins.

    Raises:
        HarnessError: The options make no sense, the case does not run, or no choice holds the limit.
    """
    from harness.core.processes.call import run_isolated

    if not (math.isfinite(limit) and limit > 0):
        raise HarnessError(f"--limit {limit:g} is no limit: give a number above 0, in units of autocast's error")
    if not 0 < rates.fp32 < rates.half < math.inf:
        raise HarnessError(
            f"products at {rates.half:g} GFLOP/s in half precision and {rates.fp32:g} in fp32 save no time, so that "
            "everything stays float32: give a --half-rate above --fp32-rate"
        )
    if not PRECISIONS[case.precision].is_half:
        raise HarnessError(f"a budget needs a half precision, and {case.precision} is none: give another --precision")
    component_of(case.component, "measure")
    worker = run_isolated(f"{__name__}:search_budget", case, settings, limit, rates, log, on_stage=on_stage)
    budget_result: Result = worker.require(f"no budget for {case.id}")
    return budget_result


def search_budget(
    case: Case, settings: Settings, limit: float, rates: Rates, log: Path, on_stage: Callable[[str], None]
) -> Result:
    """Searches for a budget in this process; the arguments are those of `find_budget`."""
    from harness.verify.budget.measurement import Bench

    with models()[subjects()[case.component].model].context():
        measured = Log(log, conditions_of(case, settings))
        on_stage(Stage.BUILD)
        return Search(Bench(case, settings), measured, rates, on_stage).find(case, settings, limit)


def conditions_of(case: Case, settings: Settings) -> str:
    """Returns a digest of everything that a case's errors depend on: weights, code, CPU, versions, schedules."""
    from harness.compiler.tuned.database import choose_schedules
    from harness.core.checkpoint_file import checkpoint_digest
    from harness.core.machine import versions
    from harness.parity.closure import closure_digest

    checkpoint = None if settings.checkpoint is None else checkpoint_digest(settings.checkpoint).sha256
    described = {
        "case": case.to_json(),
        "checkpoint": checkpoint,
        "code": closure_digest("harness.verify.budget.measurement"),
        "target": str(TARGETS[case.target].tvm_target(settings.processors)),
        "schedules": choose_schedules(settings.database, case.target, settings.processors).origin,
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class Log:
    """Measurements under some conditions, in a file that is rewritten as a whole after each.

    Attributes:
        measurements: The measurements by their groups in half precision.
    """

    def __init__(self, file: Path, conditions: str) -> None:
        """Reads the file, if it exists.

        Args:
            file: The file.
            conditions: A digest of everything that errors depend on besides the groups.

        Raises:
            HarnessError: The file cannot be read.
        """
        from harness.verify.budget.measurement import Measurement

        self._file, self._conditions = file, conditions
        try:
            self._lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        except (OSError, ValueError) as error:
            raise HarnessError(f"cannot read {file}: {error}; {ADVICE}") from error
        self.measurements: dict[Groups, Measurement] = {}
        for number, line in enumerate(self._lines, 1):
            try:
                data = convert(json.loads(line), dict[str, Any])
                if data["conditions"] == conditions:
                    measurement = convert(data, Measurement)
                    self.measurements[frozenset(measurement.half)] = measurement
            except (ValueError, KeyError, RecursionError) as error:
                raise HarnessError(f"{file} is damaged in line {number}: delete it to measure again") from error

    def add(self, measurement: Measurement) -> None:
        """Adds a measurement, and writes the file.

        Raises:
            HarnessError: The file cannot be written.
        """
        self._lines.append(json.dumps({"conditions": self._conditions, **asdict(measurement)}))
        write_text(self._file, "".join(f"{line}\n" for line in self._lines), advice=ADVICE, durable=True)
        self.measurements[frozenset(measurement.half)] = measurement


class Search:
    """The measurements of one component, and choices among its groups."""

    def __init__(self, bench: Bench, log: Log, rates: Rates, on_stage: Callable[[str], None]) -> None:
        """Measures float32, half precision throughout, and each group alone."""
        self._bench, self._log, self._rates, self._on_stage = bench, log, rates, on_stage
        self._used: set[Groups] = set()
        self._new_count = 0
        groups = bench.groups
        self._base = self._measure(NO_GROUPS, "float32")
        self._half = self._measure(frozenset(groups), "half precision")
        single_groups = [
            self._measure(frozenset([name]), f"group {n} of {len(groups)}") for n, name in enumerate(groups, 1)
        ]
        self._contributions = tuple(map(self._contribution, groups, single_groups))

    def find(self, case: Case, settings: Settings, limit: float) -> Result:
        """Returns the choice that holds a limit, and the curve of error over time.

        Raises:
            HarnessError: Even float32 throughout does not hold the limit.
        """
        from harness.compiler.schedules.cpu.microkernels.choice import rounding_kernels

        chosen, refused = self._fastest_within(limit)
        half = frozenset(chosen.half)
        target = TARGETS[case.target].tvm_target(settings.processors)
        budget = Budget(
            subjects()[case.component].model,
            case.component,
            str(case.scale),
            case.target,
            case.precision,
            limit,
            tuple(name for name in self._bench.groups if name not in half),
        )
        groups = tuple(
            GroupError(
                contribution.group,
                self._bench.operations(contribution.group),
                {output: math.sqrt(square) for output, square in contribution.squares.items()},
                contribution.group not in half,
            )
            for contribution in self._contributions
        )
        outputs = {
            output: {"fp32": self._base.r_rms[output], "half": self._half.r_rms[output], "chosen": error}
            for output, error in chosen.r_rms.items()
        }
        return Result(
            budget,
            groups,
            untouched=self._bench.untouched,
            front=self._front(),
            chosen=self._point(chosen),
            outputs=outputs,
            rates=self._rates,
            cpu=str(target.attrs.get("mcpu", "")),
            gains=bool(rounding_kernels(target)) if "cpu" in target.keys else None,
            refused=refused,
            reused_count=len(self._used) - self._new_count,
            new_count=self._new_count,
        )

    def _fastest_within(self, limit: float) -> tuple[Measurement, int]:
        """Returns the fastest choice whose measured errors hold a limit, and the number of refused choices."""
        aim, refused = limit, 0
        while True:
            half = self._choose(aim)
            chosen = self._measure(half, f"choice {refused + 1}")
            if chosen.worst <= limit and not chosen.failed:
                return chosen, refused
            if not half:
                reason = chosen.failed or f"r_rms {chosen.worst:.3g} in float32 throughout"
                raise HarnessError(f"--limit {limit:g} cannot be held: {reason}; give a larger one")
            # Errors are not quite independent: aim lower by the excess, in steps, and at least at another choice.
            aim = min(aim * max(limit / chosen.worst, _STEP), self._worst(half)) * _SLIGHTLY_LESS
            refused += 1

    def _front(self) -> tuple[Point, ...]:
        """Measures the curve: float32 throughout, choices for `STEPS` - 2 limits between, half precision throughout."""
        low, high = self._base.worst, self._worst(frozenset(self._bench.groups))
        aims = [low + (high - low) * n / (STEPS - 1) for n in range(1, STEPS - 1)]
        choices = dict.fromkeys([NO_GROUPS, *map(self._choose, aims), frozenset(self._bench.groups)])
        return tuple(self._point(self._measure(half, f"point {n} of the curve")) for n, half in enumerate(choices, 1))

    def _choose(self, limit: float) -> Groups:
        """Returns the groups to compute in half precision so that the predicted errors hold a limit."""
        capacities = {output: limit**2 - error**2 for output, error in self._base.r_rms.items()}
        return choose(self._contributions, capacities)

    def _measure(self, half: Groups, step: str) -> Measurement:
        if half not in self._log.measurements:
            self._on_stage(step)
            self._log.add(self._bench.measure(half))
            self._new_count += 1
        self._used.add(half)
        return self._log.measurements[half]

    def _contribution(self, group: str, measurement: Measurement) -> Contribution:
        """Returns the effects of a group from the measurement of it alone in half precision."""
        saved_seconds = self._rates.saved_seconds(self._bench.operations(group))
        squares = {
            output: max(measurement.r_rms[output] ** 2 - error**2, 0.0) for output, error in self._base.r_rms.items()
        }
        return Contribution(group, saved_seconds, squares)

    def _worst(self, half: Groups) -> float:
        """Returns the largest predicted r_rms of an output if these groups are half precision."""
        contributions: Sequence[Contribution] = [
            contribution for contribution in self._contributions if contribution.group in half
        ]
        return max(predict_errors(self._base.r_rms, contributions).values(), default=0.0)

    def _point(self, measurement: Measurement) -> Point:
        half = frozenset(measurement.half)
        seconds = math.fsum(
            self._rates.seconds(self._bench.operations(group), half=group in half) for group in self._bench.groups
        )
        return Point(len(half), seconds, self._worst(half), measurement.worst)
