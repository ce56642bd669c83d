"""From a case and a limit to the groups that stay float32: measured alone, chosen together, and measured again."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.budget.choice import Contribution, choose, predicted
from harness.core.budget import NONE, Budget, Groups
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import Stage
from harness.core.precision import PRECISIONS
from harness.core.settings import Settings
from harness.models.registry import models, subjects
from harness.targets import TARGETS

if TYPE_CHECKING:
    from harness.budget.log import Log
    from harness.budget.measuring import Bench, Measurement

STEPS = 6
"""Points of the curve of error over time, those of float32 and of half precision throughout among them."""

_STEP = 0.9
"""How much lower the next choice aims at most, where one exceeds the limit when it is measured."""

_BELOW = 1 - 1e-9
"""Makes a capacity too small for the choice that has just been refused."""


@dataclass(frozen=True)
class Rates:
    """Speeds of products by which time is counted.

    Attributes:
        fp32: 10⁹ operations a second in float32.
        half: The same in half precision.
    """

    fp32: float
    half: float

    def seconds(self, operations: int, *, half: bool) -> float:
        """Returns the time of products."""
        return operations / (self.half if half else self.fp32) / 1e9


@dataclass(frozen=True)
class GroupError:
    """One group in half precision, everything else in float32.

    Attributes:
        name: Its name.
        operations: Operations of its products with half operands, in one run of all samples.
        r_rms: By output: the error that it adds, the square root of what the squared error is larger by.
        float32: Whether it stays float32.
    """

    name: str
    operations: int
    r_rms: Mapping[str, float]
    float32: bool


@dataclass(frozen=True)
class Point:
    """One choice, a point of the curve of error over time.

    Attributes:
        half: Number of the groups in half precision.
        seconds: Time of all groups' products, counted.
        predicted: Largest r_rms of an output, predicted from each group alone.
        measured: The same, measured.
    """

    half: int
    seconds: float
    predicted: float
    measured: float


@dataclass(frozen=True)
class Result:
    """What `sam3-tvm budget` found.

    Attributes:
        budget: The choice.
        groups: What was measured of each group.
        untouched: Groups that are float32 on the target in any case.
        front: The curve, from float32 to half precision throughout.
        chosen: The point of the choice.
        outputs: By output: r_rms in float32, in half precision throughout, and of the choice.
        rates: By which time is counted.
        cpu: LLVM's name of the processor that code was compiled for; empty for a GPU.
        gains: Whether it multiplies linear layers faster in bfloat16 than in fp32; None for a GPU.
        refused: Number of choices that exceeded the limit when they were measured, although not as predicted.
        reused: Number of measurements that an earlier run had made.
        made: Number of measurements that this run made.
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
    reused: int
    made: int

    def to_json(self) -> dict[str, Any]:
        """Returns what the file has: the choice, and what was measured."""
        measured = {name: value for name, value in asdict(self).items() if name not in ("budget", "reused", "made")}
        return self.budget.to_json() | {"measured": measured}


def find_budget(
    case: Case,
    settings: Settings,
    limit: float,
    rates: Rates,
    log: Path,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Result:
    """Measures the groups of a component and chooses which stay float32, in a process of its own.

    Args:
        case: The component; its precision is half.
        settings: Weights, schedules and processors.
        limit: Largest r_rms of every output.
        rates: Speeds of products by which time is counted.
        log: File of the measurements, which an interrupted run has left and this one goes on with.
        on_stage: Called with what is done, as it begins.

    Raises:
        HarnessError: The options make no sense, the case does not get as far as running, or no choice holds the limit.
    """
    from harness.processes import WorkerEnd, run_isolated

    if not (math.isfinite(limit) and limit > 0):
        raise HarnessError(f"--limit {limit:g} is no limit: give a number above 0, in units of autocast's error")
    if not 0 < rates.fp32 < rates.half < math.inf:
        raise HarnessError(
            f"products at {rates.half:g} GFLOP/s in half precision and {rates.fp32:g} in fp32 save no time, so that "
            "everything stays float32: give a --half-rate above --fp32-rate"
        )
    if not PRECISIONS[case.precision].is_half:
        raise HarnessError(f"a budget is of a half precision: --precision {case.precision} is none")
    if subjects()[case.component].whole:
        raise HarnessError(f"{case.component} is no component: make the budgets of those that it is made of")
    request = (case, settings, limit, rates, log)
    ended = run_isolated("harness.budget.budgeting:budget_request", request, breadcrumb=on_stage)
    if ended.kind is not WorkerEnd.OK:
        line = ended.error.message.partition("\n")[0] if ended.error else ended.kind.value
        raise HarnessError(f"no budget for {case.id}: {ended.stage}: {line}")
    result: Result = ended.value
    return result


def budget_request(request: tuple[Case, Settings, float, Rates, Path], announce: Callable[[str], None]) -> Result:
    """Calls `find_budget` as `harness.processes` calls functions, in this process."""
    from harness.budget.log import Log
    from harness.budget.measuring import Bench

    case, settings, limit, rates, file = request
    with models()[subjects()[case.component].model].context():
        log = Log(file, conditions_of(case, settings))
        announce(Stage.BUILD)
        return Search(Bench(case, settings), log, rates, announce).found(case, settings, limit)


def conditions_of(case: Case, settings: Settings) -> str:
    """Returns a digest of all that the errors of a case depend on: weights, code, processor, versions, schedules."""
    from harness.machine import versions
    from harness.parity.closure import closure_digest
    from harness.runtime.weights import file_digest
    from harness.tuned.database import chosen_schedules

    checkpoint = None if settings.checkpoint is None else file_digest(settings.checkpoint).sha256
    described = {
        "case": case.to_json(),
        "checkpoint": checkpoint,
        "code": closure_digest("harness.budget.measuring"),
        "target": str(TARGETS[case.target].tvm_target(settings.processors)),
        "schedules": chosen_schedules(settings.database, case.target, settings.processors).origin,
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class Search:
    """The measurements of one component, and the choices among its groups."""

    def __init__(self, bench: Bench, log: Log, rates: Rates, announce: Callable[[str], None]) -> None:
        """Measures float32, half precision throughout, and each group alone."""
        self._bench, self._log, self._rates, self._announce = bench, log, rates, announce
        groups = bench.groups
        self._base = self._measured(NONE, "float32")
        self._whole = self._measured(frozenset(groups), "half precision")
        alone = [self._measured(frozenset([name]), f"group {n} of {len(groups)}") for n, name in enumerate(groups, 1)]
        self._contributions = tuple(map(self._contribution, groups, alone))

    def found(self, case: Case, settings: Settings, limit: float) -> Result:
        """Returns the choice that holds a limit, and the curve.

        Raises:
            HarnessError: Not even float32 throughout holds the limit.
        """
        from harness.schedules.cpu.bf16 import has_instruction
        from harness.schedules.cpu.vpmaddwd import multiplies_integers

        chosen, refused = self._within(limit)
        half = frozenset(chosen.half)
        names = self._bench.groups
        target = TARGETS[case.target].tvm_target(settings.processors)
        return Result(
            Budget(
                subjects()[case.component].model,
                case.component,
                str(case.scale),
                case.target,
                case.precision,
                limit,
                tuple(name for name in names if name not in half),
            ),
            tuple(
                GroupError(
                    each.group,
                    self._bench.operations(each.group),
                    {output: math.sqrt(square) for output, square in each.squares.items()},
                    each.group not in half,
                )
                for each in self._contributions
            ),
            self._bench.untouched,
            self._front(),
            self._point(chosen),
            {
                output: {"fp32": self._base.r_rms[output], "half": self._whole.r_rms[output], "chosen": error}
                for output, error in chosen.r_rms.items()
            },
            self._rates,
            str(target.attrs.get("mcpu", "")),
            has_instruction(target) or multiplies_integers(target) if "cpu" in target.keys else None,
            refused,
            self._log.reused,
            self._log.made,
        )

    def _within(self, limit: float) -> tuple[Measurement, int]:
        """Returns the fastest choice whose measured errors hold a limit, and how many others did not hold it."""
        aim, refused = limit, 0
        while True:
            half = self._chosen(aim)
            chosen = self._measured(half, f"choice {refused + 1}")
            if chosen.worst <= limit and not chosen.failed:
                return chosen, refused
            if not half:
                reason = chosen.failed or f"r_rms {chosen.worst:.3g} in float32 throughout"
                raise HarnessError(f"--limit {limit:g} cannot be held: {reason}; give a larger one")
            # Errors are not quite independent: aim lower by what was missed, in steps, and at another choice at least.
            aim = min(aim * max(limit / chosen.worst, _STEP), self._worst(half)) * _BELOW
            refused += 1

    def _front(self) -> tuple[Point, ...]:
        low, high = self._base.worst, self._worst(frozenset(self._bench.groups))
        aims = [low + (high - low) * n / (STEPS - 1) for n in range(1, STEPS - 1)]
        choices = dict.fromkeys([NONE, *map(self._chosen, aims), frozenset(self._bench.groups)])
        return tuple(self._point(self._measured(half, f"point {n} of the curve")) for n, half in enumerate(choices, 1))

    def _chosen(self, limit: float) -> Groups:
        capacities = {output: limit**2 - error**2 for output, error in self._base.r_rms.items()}
        return choose(self._contributions, capacities)

    def _measured(self, half: Groups, what: str) -> Measurement:
        if not self._log.knows(half):
            self._announce(what)
        return self._log.measured(half, self._bench.measure)

    def _contribution(self, group: str, alone: Measurement) -> Contribution:
        operations = self._bench.operations(group)
        saved = self._rates.seconds(operations, half=False) - self._rates.seconds(operations, half=True)
        squares = {output: max(alone.r_rms[output] ** 2 - error**2, 0.0) for output, error in self._base.r_rms.items()}
        return Contribution(group, saved, squares)

    def _worst(self, half: Groups) -> float:
        inside: Sequence[Contribution] = [each for each in self._contributions if each.group in half]
        return max(predicted(self._base.r_rms, inside).values(), default=0.0)

    def _point(self, measured: Measurement) -> Point:
        half = frozenset(measured.half)
        seconds = math.fsum(
            self._rates.seconds(self._bench.operations(group), half=group in half) for group in self._bench.groups
        )
        return Point(len(half), seconds, self._worst(half), measured.worst)
