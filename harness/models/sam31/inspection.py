"""Tells everything about a checkpoint of SAM 3.1, as `harness.models.sam3.inspection` does about one of SAM 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.models.sam3.inspection import describe_opened
from harness.models.sam31.build import build_architecture
from harness.models.sam31.checkpoint import Sam31Checkpoint


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """Returns everything that is known about a checkpoint, as JSON has it.

    Errors are those of `Sam31Checkpoint.open`.
    """
    return describe_opened(Sam31Checkpoint.open(path), build_architecture)
