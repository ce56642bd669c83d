"""What a worker does for `conformance/test_emulation.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.runtime.executable import Executable
from harness.targets import TARGETS
from harness.targets.emulation.device import install


def run(request: tuple[str, str, list[np.ndarray], list[np.ndarray]], _announce: object) -> list[np.ndarray]:
    """Loads a library onto an emulated device, `cuda` or `metal`, with its parameters, and runs it on the inputs."""
    kind, library, parameters, inputs = request
    install(kind)
    return Executable(Path(library), TARGETS[kind].device(), parameters).run(inputs)
