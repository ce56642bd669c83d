"""Measures the errors of a component's outputs with some groups in half precision and the others in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property

import tvm

from harness.compiler.execution.executors import create_executor
from harness.compiler.execution.run import Run
from harness.compiler.lowering.groups import always_float32
from harness.compiler.lowering.precision import lower_precision, operations_of
from harness.compiler.lowering.route import Lowered, Route
from harness.compiler.schedules.common.origins import bindings_of
from harness.compiler.schedules.cpu.bf16 import allows_bf16
from harness.compiler.schedules.cpu.microkernels.choice import rounding_kernels
from harness.compiler.schedules.cpu.widening import lower_bf16
from harness.compiler.targets import TARGETS
from harness.compiler.tuned.database import choose_schedules
from harness.core.budget import NO_GROUPS, Groups
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import Progress, Verdict, VerdictKind
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.core.program import Arrays
from harness.core.settings import Settings
from harness.models.registry import subjects
from harness.models.traced import TracedWorkload
from harness.parity.monte_carlo import judge_by_draws
from harness.parity.references import Reference
from harness.parity.verdict import judge


@dataclass(frozen=True)
class Measurement:
    """The measured errors with some groups in half precision.

    Attributes:
        half: Names of the groups in half precision, sorted.
        r_rms: By output that has an error, its rms error against float64 divided by autocast's.
        failed: Why an output does not pass as it does in a verification; empty if all pass.
    """

    half: tuple[str, ...]
    r_rms: Mapping[str, float]
    failed: str = ""

    @property
    def worst(self) -> float:
        """The largest r_rms."""
        return max(self.r_rms.values(), default=0.0)


class Bench:
    """A component that is imported once, and compiled and run for each measurement.

    Attributes:
        groups: Names of its groups that differ between the precisions, in the order of computation.
    """

    def __init__(self, case: Case, settings: Settings) -> None:
        """Builds, exports and imports the component; must be called inside the model's context.

        Raises:
            HarnessError: The component cannot be measured: it is no trace of calls, its code does not run here, or
                nothing in it is half precision.
        """
        workload = subjects()[case.component].open(case, settings)
        if not isinstance(workload, TracedWorkload):
            raise HarnessError(f"{case.component} is a whole model: make a budget for each of its components")
        self._workload = workload
        executor = create_executor(settings)
        if problem := executor.run_problem(case.target):
            raise HarnessError(f"errors are measured by running, and {case.target} cannot run here: {problem}")
        schedules = choose_schedules(settings.database, case.target, settings.processors)
        self._run = Run(case, settings, Progress(lambda stage: None), executor, schedules)
        self._target = TARGETS[case.target].tvm_target(settings.processors)
        self._on_cpu = "cpu" in self._target.keys
        self._precision = PRECISIONS[case.precision]
        route = Route.from_case(replace(case, precision=DEFAULT_PRECISION))
        self._imported: dict[str, Lowered] = {}
        self._group_of: dict[str, dict[str, str]] = {}
        self._always_groups = NO_GROUPS
        for name, program in workload.programs.items():
            exported = route.export(program.module, tuple(program.example.values()), program.axes)
            imported = route.lower(exported, program.module)
            self._imported[name] = imported
            self._group_of[name] = route.groups(exported, imported.module, program.module)
            self._always_groups |= always_float32(program.module)
        names = dict.fromkeys(group for groups in self._group_of.values() for group in groups.values())
        self.groups = tuple(names)
        self._effects = {group: self._effect(group) for group in names}
        self.groups = tuple(group for group, effect in self._effects.items() if effect is not None)
        if not self.groups:
            raise HarnessError(f"nothing of {case.component} is {case.precision} on {case.target}: it needs no budget")

    def operations(self, group: str) -> int:
        """Returns the number of operations of a group's products with half operands, in all calls of the trace."""
        return self._effects[group] or 0

    @property
    def untouched(self) -> tuple[str, ...]:
        """Names of the groups that are always float32 on this target."""
        return tuple(group for group, effect in self._effects.items() if effect is None)

    def measure(self, half: Groups) -> Measurement:
        """Compiles the component with these groups in half precision, runs it, and judges every output."""
        lowered = {name: self._lower(name, half) for name in self._imported}
        compiled = self._run.compile(self._workload.programs, lowered)
        assert compiled is not None
        with closing(compiled):
            actual = compiled.run_trace(self._workload.trace)
        verdicts = self._judge(actual)
        errors = {verdict.name: verdict.r_rms for verdict in verdicts if not math.isnan(verdict.r_rms)}
        failed = [verdict for verdict in verdicts if verdict.kind is VerdictKind.FAILED]
        return Measurement(tuple(sorted(half)), errors, f"{failed[0].name}: {failed[0].reason}" if failed else "")

    def _lower(self, name: str, half: Groups) -> Lowered:
        """Returns a program with these groups in half precision and all others in float32."""
        imported = self._imported[name]
        group_of = self._group_of[name]
        float32 = self._always_groups.union(set(self.groups) - half)
        products = [product for product, group in group_of.items() if group in float32]
        return Lowered(lower_precision(imported.module, self._precision, products), imported.values)

    @cached_property
    def _reference(self) -> Reference:
        return self._workload.reference()

    @cached_property
    def _draws(self) -> Arrays:
        return self._workload.draw_small_outputs(self._reference.first)

    def _judge(self, actual: Arrays) -> tuple[Verdict, ...]:
        """Judges outputs by the oracle."""
        verdicts = judge(actual, self._reference, by_oracle=True)
        return judge_by_draws(verdicts, actual, self._reference, self._draws) if self._draws else verdicts

    def _effect(self, group: str) -> int | None:
        """Returns the operations of a group's half products; None if the group is equal in both precisions."""
        total: int | None = None
        for call in self._workload.trace:
            if group in self._group_of[call.program].values():
                module = self._lower(call.program, frozenset([group])).module
                module = lower_bf16(module) if self._on_cpu else module  # as the target computes it
                operations = self._half_operations(module)
                types = [str(getattr(parameter.ty, "dtype", "")) for parameter in module["main"].params]
                if operations or self._precision.dtype in types:
                    total = (total or 0) + operations
        return total

    def _half_operations(self, module: tvm.IRModule) -> int:
        """Returns two operations per term that is multiplied in half precision, for products of static shape."""
        values = [binding.value for binding in bindings_of(module["main"])]
        count = sum(operations_of(value, self._precision.dtype) for value in values)
        if self._on_cpu and not all(kernel.layers_only for kernel in rounding_kernels(self._target)):
            wide_dtype = PRECISIONS[DEFAULT_PRECISION].dtype
            count += sum(operations_of(value, wide_dtype) for value in values if allows_bf16(value))
        return count
