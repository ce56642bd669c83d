"""What many tests use and is slow to make: built once per session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shallow_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shallow model with seed 0, compiled for this machine's CPU; whoever changes it changes a copy."""
    from harness.deployment.compiling import Model, compile_model

    folder = tmp_path_factory.mktemp("artifact") / "shallow"
    compile_model(Model(scale="shallow"), "llvm", folder)
    return folder
