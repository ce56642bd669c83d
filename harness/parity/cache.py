"""Keeps arrays on disk: a cache of those that are slow to compute, and the outputs of runs, to judge them again.

The cache has oracles, references and captured inputs. It can only be trusted if its key covers everything that the
content depends on: `versions()`, the digest of `harness.parity.closure`, and `arrays_digest(...)` of inputs and weights
(or scale, seed and checkpoint).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.core import machine
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.files import cache_root, prune_files, remove_temporary_files
from harness.core.program import Array
from harness.parity.arrays import CorruptFile, read_arrays, write_arrays

_log = logging.getLogger(__name__)

DEFAULT_LIMIT_BYTES = 20 << 30
"""Size above which the least recently used entries, or saved outputs, are deleted."""
_OUTPUTS = "outputs.safetensors"


class ArrayCache:
    """A folder of entries `<2 digits>/<sha256 of the key>.safetensors`, safe to share between processes."""

    def __init__(self, root: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        """Uses the folder `root`, which need not exist; the first use creates it."""
        self.root = root
        self.limit_bytes = limit_bytes

    def path(self, key: Mapping[str, Any]) -> Path:
        """Returns the file of a key, whether it exists or not."""
        name = hashlib.sha256(_canonical(key).encode()).hexdigest()
        return self.root / name[:2] / f"{name}.safetensors"

    def get_or_make(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
        """Returns the arrays of the key, from an intact entry on disk or from `make`.

        While one process makes an entry, other processes that need it wait.

        Args:
            key: JSON-able; the order of its items does not matter.
            make: Called without arguments; its exceptions pass through and leave no entry behind.

        Raises:
            HarnessError: The folder cannot be written, or the disk is full.
            TypeError: The key is not JSON-able, or a value is not an array of numbers.
        """
        from filelock import FileLock

        path, tag = self.path(key), _canonical(key)
        if (entry := _read(path, tag)) is not None:
            return entry
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path.with_suffix(".lock"))
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            raise HarnessError(
                f"cannot use the cache {self.root}: {error}; set SAM3_TVM_CACHE to a folder that can be written"
            ) from error
        try:
            if (entry := _read(path, tag)) is not None:
                return entry
            remove_temporary_files([path])
            arrays = dict(make())
            write_arrays(path, arrays, tag)
        finally:
            lock.release()
        prune_files(self.limit_bytes, self.root.glob("??/*.safetensors"), path)
        return arrays


def versions() -> dict[str, str]:
    """Returns what else PyTorch's results depend on, for keys: package versions, vector features, threads."""
    import torch

    packages = machine.versions(("torch", "torchvision", "sam3", "numpy"))
    return {
        **{name: version or "" for name, version in packages.items()},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _read(path: Path, tag: str) -> dict[str, Array] | None:
    """Reads the entry; None if it is missing or corrupt. A corrupt entry is deleted with a warning."""
    try:
        return _read_used(path, tag)
    except FileNotFoundError:
        return None
    except CorruptFile as problem:
        _log.warning("cache entry thrown away and made again: %s", problem)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _read_used(path: Path, tag: str = "") -> dict[str, Array]:
    arrays = read_arrays(path, tag)
    with contextlib.suppress(OSError):
        os.utime(path)  # the time of the last use, by which files are deleted
    return arrays


def saved_root() -> Path:
    """Returns the folder of all saved outputs."""
    return cache_root() / "outputs"


def saved_folder(case: Case) -> Path:
    """Returns the folder of a case's saved outputs."""
    return saved_root() / f"{case.id}-{case.seed}"


def save_outputs(directory: Path, arrays: Mapping[str, Array], limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Path:
    """Writes the outputs of one run into the folder, completely or not at all, and returns the file.

    Args:
        directory: The folder.
        arrays: The outputs.
        limit_bytes: Limit on the size of all saved outputs, beyond which the least recently used are deleted.

    Raises:
        HarnessError: The file cannot be written.
    """
    path = directory / _OUTPUTS
    write_arrays(path, arrays)
    prune_files(limit_bytes, saved_root().rglob(_OUTPUTS), path)
    return path


def load_outputs(directory: Path) -> dict[str, Array]:
    """Reads a file that `save_outputs` wrote, in the same order.

    Raises:
        HarnessError: There is no file, or it is damaged.
    """
    path = directory / _OUTPUTS
    try:
        return _read_used(path)
    except FileNotFoundError as error:
        raise HarnessError(f"there are no saved outputs in {directory}; run the case first") from error
    except CorruptFile as error:
        raise HarnessError(f"the saved outputs are damaged: {error}; run the case again") from error
