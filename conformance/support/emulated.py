"""What workers do on an emulated GPU, for the tests that have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from harness.compiler.execution.emulation import device
from harness.compiler.execution.emulation.device import install
from harness.compiler.targets import TARGETS
from harness.runtime.artifact import Artifact
from harness.runtime.executable import Executable


def run(request: tuple[str, str, list[np.ndarray], list[np.ndarray]], _on_stage: object) -> list[np.ndarray]:
    """Loads a library onto an emulated device, `cuda` or `metal`, with its parameters, and runs it on the inputs."""
    kind, library, parameters, inputs = request
    install(kind)
    return Executable(Path(library), TARGETS[kind].device(), parameters).run(inputs)


def run_descending(request: tuple[str, str, list[np.ndarray], list[np.ndarray]], on_stage: object) -> list[np.ndarray]:
    """The same with the threads of a block in the other order, in which a missing barrier shows."""
    device.OPTIONS = (*device.OPTIONS, "-DEMULATED_DESCENDING")
    return run(request, on_stage)


def run_each(request: tuple[str, str, list[list[np.ndarray]]], _on_stage: object) -> list[list[np.ndarray]]:
    """Loads a library without parameters and runs it on several inputs, one after the other."""
    kind, library, inputs = request
    install(kind)
    executable = Executable(Path(library), TARGETS[kind].device(), [])
    return [executable.run(each) for each in inputs]


def run_as_cpp(request: tuple[str, str, list[np.ndarray], list[np.ndarray]], on_stage: object) -> list[np.ndarray]:
    """The same where a value that is not there may not be passed on, as C++ and Metal have it."""
    device.OPTIONS = (*device.OPTIONS, "-Xclang", "-enable-noundef-analysis")
    return run(request, on_stage)


Calls = list[tuple[str, dict[str, np.ndarray | str]]]
"""Entry points with their inputs: arrays, or the name of what a call before gave."""


def call(request: tuple[str, Path, Calls], _on_stage: object) -> tuple[dict[str, np.ndarray], set[str]]:
    """Loads an artifact onto an emulated device and calls its entry points; returns results, and where they were."""
    kind, folder, calls = request
    install(kind)
    artifact = Artifact.load(folder)
    results: dict[str, Any] = {}
    for entry, inputs in calls:
        given = {name: results[value] if isinstance(value, str) else value for name, value in inputs.items()}
        with artifact.reading_once(entry):
            results |= artifact.call(entry, **given)
    where = {tensor.device.type for tensor in results.values()}
    return {name: artifact.fetch(tensor) for name, tensor in results.items()}, where
