"""Folders of compiled models that are replaced as a whole, by work that a crash of the compiler cannot take along."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from harness.compiler.deployment.imported import OnStage
from harness.core.errors import HarnessError
from harness.core.files import replace_folder
from harness.runtime.manifest import MANIFEST, VARIANTS


def replaced(artifact: Path) -> AbstractContextManager[Path]:
    """Gives a folder to fill, which takes the place of a compiled model or of nothing; see `replace_folder`."""

    def is_compiled(folder: Path) -> bool:
        return any((folder / name).is_file() for name in (MANIFEST, VARIANTS))

    return replace_folder(artifact, is_compiled, "a compiled model")


def isolated(function: str, request: tuple[Any, ...], on_stage: OnStage) -> None:
    """Calls a function in a worker, so that a crash in the compiler is a sentence too.

    Args:
        function: `module:name`; takes the request and `on_stage`.
        request: What can be pickled.
        on_stage: Called with the name of each stage as it begins.

    Raises:
        HarnessError: It fails.
    """
    from harness.core.processes import WorkerEnd, run_isolated

    ended = run_isolated(function, request, on_stage=on_stage)
    if ended.kind is not WorkerEnd.OK:
        error = ended.error
        reason = f"{error.type}: {error.message}" if error else ended.kind.value
        raise HarnessError(f"failed at the stage {ended.stage!r}: {reason}; `sam3-tvm verify` tells more")
