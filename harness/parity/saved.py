"""Saved outputs: running and judging are separate, so what ran once can be judged again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.files import cache_root
from harness.parity.arrays import CorruptFile, read_arrays, write_arrays

_FILE = "outputs.safetensors"


def saved_folder(case: Case) -> Path:
    """Returns the folder of a case's outputs."""
    return cache_root() / "outputs" / f"{case.id}-{case.seed}"


def save_outputs(directory: Path, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Path:
    """Writes the outputs of one run into the folder, all or nothing, and returns the file.

    Raises:
        HarnessError: If it cannot be written.
    """
    path = directory / _FILE
    write_arrays(path, arrays)
    return path


def load_outputs(directory: Path) -> dict[str, npt.NDArray[Any]]:
    """Reads what `save_outputs` wrote, in the same order.

    Raises:
        HarnessError: If there is nothing or it was damaged.
    """
    path = directory / _FILE
    try:
        return read_arrays(path)
    except FileNotFoundError as error:
        raise HarnessError(f"there are no saved outputs in {directory}; run the case first") from error
    except CorruptFile as error:
        raise HarnessError(f"the saved outputs are damaged: {error}; run the case again") from error
