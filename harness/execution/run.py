"""Running a workload: its programs lowered, compiled for the case's target and called, one trace after another."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from harness.core.budget import NONE, Groups, check_known
from harness.core.case import Case
from harness.core.outcome import Stage
from harness.core.program import Arrays, Output, Program, Trace
from harness.core.progress import Progress
from harness.core.settings import Settings
from harness.execution.executors import Executor, LoadedProgram
from harness.lowering.route import Lowered, Route
from harness.schedules import ChosenSchedules
from harness.targets import TARGETS
from harness.targets.compiling import LIBRARY_SUFFIX, compile_module


@dataclass(frozen=True)
class Run:
    """Everything that a workload is run with.

    Attributes:
        case: How it is lowered and what it is compiled for.
        settings: Weights, inputs and the processors to compile for.
        progress: Keeps which stage it is, and what was made.
        executor: What runs compiled code.
        schedules: What tuning found for the target.
        float32: Groups of products that stay float32 in a half precision.
    """

    case: Case
    settings: Settings
    progress: Progress
    executor: Executor
    schedules: ChosenSchedules
    float32: Groups = NONE

    def trace(self, programs: Mapping[str, Program], trace: Trace) -> Arrays | None:
        """Compiles programs and runs a trace of them.

        Args:
            programs: Programs by name; every call's is among them.
            trace: The calls.

        Returns:
            The outputs of all calls by name; None if the programs were compiled and cannot be run here.

        Raises:
            HarnessError: No program has one of the groups that are to stay float32.
        """
        return self.lowered_trace(programs, trace, self._lowered(programs))

    def lowered_trace(
        self, programs: Mapping[str, Program], trace: Trace, lowered: dict[str, Lowered]
    ) -> Arrays | None:
        """Does what `trace` does with programs that are lowered.

        Args:
            programs: Programs by name; every call's is among them.
            trace: The calls.
            lowered: The programs as Relax modules; each goes out of it when it was loaded.
        """
        with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as folder:
            libraries = {name: Path(folder) / f"{name}{LIBRARY_SUFFIX}" for name in lowered}
            with self.progress.during(Stage.COMPILE):
                target = TARGETS[self.case.target]
                for name, program in lowered.items():
                    compiled = compile_module(
                        program.module,
                        target,
                        libraries[name],
                        self.schedules.schedules,
                        processors=self.settings.processors,
                        for_emulation=self.executor.emulates,
                    )
                    self.progress.kernels += compiled.kernels
                    self.progress.lost_schedules += compiled.lost_schedules
            self.progress.sizes["library"] = sum(path.stat().st_size for path in libraries.values())
            if self.executor.run_problem(self.case.target) is not None:
                return None
            outputs = self._called(programs, trace, lowered, libraries)
        self.executor.close()  # others may be waiting for the device
        return outputs

    def _lowered(self, programs: Mapping[str, Program]) -> dict[str, Lowered]:
        route = Route.of(self.case, self.float32)
        with self.progress.during(Stage.EXPORT):
            exported = {
                name: route.export(program.module, tuple(program.example.values()), program.axes)
                for name, program in programs.items()
            }
        with self.progress.during(Stage.IMPORT):
            lowered = {name: route.lower(exported.pop(name), program.module) for name, program in programs.items()}
        check_known(self.float32, [program.float32 for program in lowered.values()], self.case.component)
        return lowered

    def _called(
        self,
        programs: Mapping[str, Program],
        trace: Trace,
        lowered: dict[str, Lowered],
        libraries: Mapping[str, Path],
    ) -> Arrays:
        last = {call.program: call.name for call in trace}
        read = {(value.call, value.name) for call in trace for value in call.arguments if isinstance(value, Output)}
        loaded: dict[str, LoadedProgram] = {}
        state: dict[tuple[str, str], npt.NDArray[Any]] = {}
        outputs: Arrays = {}
        for call in trace:
            if call.program not in loaded:
                loaded[call.program] = self._loaded(libraries[call.program], lowered.pop(call.program))
            inputs = [
                state[value.call, value.name] if isinstance(value, Output) else value.numpy()
                for value in call.arguments
            ]
            with self.progress.during(Stage.RUN):
                results = loaded[call.program].run(inputs)
            for name, array in zip(programs[call.program].outputs, results, strict=True):
                outputs[f"{call.prefix}{name}"] = array
                if (call.name, name) in read:
                    state[call.name, name] = array
            if last[call.program] == call.name:
                # Two programs of a large subject, their weights packed, would not fit side by side.
                del loaded[call.program]
                gc.collect()
        return outputs

    def _loaded(self, library: Path, lowered: Lowered) -> LoadedProgram:
        parameters = list(lowered.parameters().values())
        # All programs of a component have the same weights; their sizes differ by a few constants.
        self.progress.sizes["parameters"] = sum(array.nbytes for array in parameters)
        del lowered
        with self.progress.during(Stage.LOAD):
            return self.executor.executable(library, self.case.target, parameters)
