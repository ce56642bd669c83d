"""Saves and loads the outputs of runs, so that a run can be judged again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.files import cache_root, prune_files
from harness.parity.arrays import CorruptFile, read_arrays, write_arrays
from harness.parity.cache import DEFAULT_LIMIT_BYTES

_FILE = "outputs.safetensors"


def saved_root() -> Path:
    """Returns the folder of all saved outputs."""
    return cache_root() / "outputs"


def saved_folder(case: Case) -> Path:
    """Returns the folder of a case's saved outputs."""
    return saved_root() / f"{case.id}-{case.seed}"


def save_outputs(
    directory: Path, arrays: Mapping[str, npt.NDArray[np.generic]], limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> Path:
    """Writes the outputs of one run into the folder, completely or not at all, and returns the file.

    Args:
        directory: The folder.
        arrays: The outputs.
        limit_bytes: Limit on the size of all saved outputs, beyond which the least recently used are deleted.

    Raises:
        HarnessError: The file cannot be written.
    """
    path = directory / _FILE
    write_arrays(path, arrays)
    prune_files(limit_bytes, saved_root().rglob(_FILE), path)
    return path


def load_outputs(directory: Path) -> dict[str, npt.NDArray[Any]]:
    """Reads a file that `save_outputs` wrote, in the same order.

    Raises:
        HarnessError: There is no file, or it is damaged.
    """
    path = directory / _FILE
    try:
        arrays = read_arrays(path)
    except FileNotFoundError as error:
        raise HarnessError(f"there are no saved outputs in {directory}; run the case first") from error
    except CorruptFile as error:
        raise HarnessError(f"the saved outputs are damaged: {error}; run the case again") from error
    with contextlib.suppress(OSError):
        os.utime(path)  # the time of the last use, by which files are deleted
    return arrays
