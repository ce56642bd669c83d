"""Replaces folders of compiled models as a whole, with the work in a worker, whose crash leaves the old folder."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from harness.compiler.deployment.imported import OnStage
from harness.core.errors import HarnessError
from harness.core.files import replace_folder
from harness.runtime.manifest import MANIFEST, VARIANTS


def replace_artifact(artifact: Path) -> AbstractContextManager[Path]:
    """Yields an empty folder that takes the place of a compiled model or of nothing; see `replace_folder`."""

    def is_compiled(folder: Path) -> bool:
        return any((folder / name).is_file() for name in (MANIFEST, VARIANTS))

    return replace_folder(artifact, is_compiled, "a compiled model")


def run_in_worker(function: str, request: tuple[Any, ...], on_stage: OnStage) -> None:
    """Calls a function in a worker, so that even a crash of the compiler ends in a sentence.

    Args:
        function: `module:name`; takes the request and `on_stage`.
        request: Its first argument, which must be picklable.
        on_stage: Called with the name of each stage as it begins.

    Raises:
        HarnessError: The function fails.
    """
    from harness.core.processes import WorkerEnd, run_isolated

    end = run_isolated(function, request, on_stage=on_stage)
    if end.kind is not WorkerEnd.OK:
        error = end.error
        reason = f"{error.type}: {error.message}" if error else end.kind.value
        raise HarnessError(f"failed at the stage {end.stage!r}: {reason}; `sam3-tvm verify` tells more")
