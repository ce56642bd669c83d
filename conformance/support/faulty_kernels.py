"""Breaks a component's generated kernels before the CPU runs them, and returns the verdicts on the results."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from harness.compiler.execution.emulation import device
from harness.compiler.execution.emulation.device import DeviceModule, read_device_module
from harness.compiler.lowering.route import Route
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import compile_module
from harness.core.case import Case
from harness.core.outcome import Verdict
from harness.core.settings import SEEDED
from harness.models.registry import models, subjects
from harness.parity.references import run_trace
from harness.parity.verdict import judge
from harness.runtime.executable import Executable


@dataclass(frozen=True)
class Fault:
    """A replacement for an occurrence of a pattern in generated source."""

    name: str
    pattern: str
    replacement: str
    occurrence: int = 0

    def applied(self, source: str) -> str:
        """Returns the broken source."""
        found = list(re.finditer(self.pattern, source))[self.occurrence]
        return source[: found.start()] + found.expand(self.replacement) + source[found.end() :]


HEALTHY = Fault("no fault", "", "")


def judged(
    request: tuple[Case, Sequence[Fault]], _on_stage: Callable[[str], None]
) -> tuple[DeviceModule, Mapping[str, tuple[Verdict, ...] | str]]:
    """Compiles a component of one program once, and runs it with each fault.

    Returns the healthy kernels, and for each fault the verdicts or what the emulation refused.
    """
    case, faults = request
    subject, target = subjects()[case.component], TARGETS[case.target]
    with models()[subject.model].context(), TemporaryDirectory() as folder:
        workload = subject.open(case, SEEDED)
        (program,) = workload.programs.values()
        route, library = Route.from_case(case), Path(folder) / "model.so"
        lowered = route.lower(
            route.export(program.module, tuple(program.example.values()), program.axes), program.module
        )
        compile_module(lowered.module, target, library, for_emulation=True)
        parameters = list(lowered.parameters().values())
        reference = workload.reference()
        device.install(case.target)
        healthy: list[DeviceModule] = []

        def run(
            _module: torch.nn.Module, inputs: Sequence[torch.Tensor], names: Sequence[str]
        ) -> Mapping[str, np.ndarray]:
            return dict(zip(names, executable.run([tensor.numpy() for tensor in inputs]), strict=True))

        results: dict[str, tuple[Verdict, ...] | str] = {}
        for number, fault in enumerate(faults):
            # A library that is loaded keeps the kernels that it has found, and one path is loaded once.
            own = shutil.copyfile(library, Path(folder) / f"model-{number}.so")

            def read(kind: str, data: bytes, fault: Fault = fault) -> DeviceModule:
                healthy.append(read_device_module(kind, data))
                return replace(healthy[-1], source=fault.applied(healthy[-1].source))

            device.read_device_module = read
            try:
                executable = Executable(own, target.device(), parameters)
                actual = run_trace(workload.programs, workload.trace, run)
                results[fault.name] = judge(actual, reference)
            except RuntimeError as error:
                results[fault.name] = str(error)
    return healthy[0], results
