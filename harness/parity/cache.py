"""Disk cache of arrays that are slow to make: oracle, reference and captured inputs.

A cache can only be trusted if its key covers everything the content depends on: put `versions()`, `code_digest(...)`,
`arrays_digest(...)` of inputs and weights (or scale, seed and checkpoint) into it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from harness.core.errors import HarnessError
from harness.parity.arrays import CorruptFile, arrays_digest, read_arrays, write_arrays

__all__ = ["ArrayCache", "arrays_digest", "cache_root", "code_digest", "versions"]

Array = npt.NDArray[Any]

_log = logging.getLogger(__name__)

DEFAULT_LIMIT_BYTES = 20 << 30
"""Above this size the entries that were not used for longest are deleted."""


class ArrayCache:
    """Entries `<root>/<2 digits>/<sha256 of the key>.safetensors`, safe to share between processes."""

    def __init__(self, root: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        """Uses the folder `root`, which need not exist yet; nothing is touched before the first use."""
        self.root = root
        self.limit_bytes = limit_bytes

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file that belongs to the key, whether it exists or not."""
        name = hashlib.sha256(_canonical(key).encode()).hexdigest()
        return self.root / name[:2] / f"{name}.safetensors"

    def get_or_make(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
        """The arrays of the key, from the disk if they are there and unharmed, otherwise from `make`.

        While one process makes an entry, the others that want the same one wait for it.

        Args:
            key: JSON-able; canonicalised, so that the order of its items does not matter.
            make: Called without arguments; whatever it raises passes through and leaves no entry behind.

        Raises:
            HarnessError: If the folder cannot be written, or the disk is full.
            TypeError: If the key is not JSON-able or a value is no array of numbers.
        """
        from filelock import FileLock

        path, tag = self.path(key), _canonical(key)
        found = _read(path, tag)
        if found is not None:
            return found
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path.with_suffix(".lock"))
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            raise HarnessError(
                f"cannot use the cache {self.root}: {error}; set SAM3_TVM_CACHE to a folder that can be written"
            ) from error
        try:
            found = _read(path, tag)
            if found is not None:
                return found
            for leftover in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed while it wrote
                leftover.unlink(missing_ok=True)
            made = dict(make())
            write_arrays(path, made, tag)
        finally:
            lock.release()
        self._prune(keep=path)
        return made

    def _prune(self, keep: Path) -> None:
        """Deletes the entries that were not used for longest until the cache is within its limit."""
        entries = []
        for path in self.root.glob("??/*.safetensors"):
            with contextlib.suppress(OSError):
                status = path.stat()
                entries.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit_bytes:
                return
            if path != keep:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size


def cache_root() -> Path:
    """The folder of the cache: `SAM3_TVM_CACHE`, or the user's cache folder of this platform."""
    configured = os.environ.get("SAM3_TVM_CACHE")
    if configured:
        return Path(configured).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("sam3-tvm"))


def code_digest(*sources: Path | str) -> str:
    """SHA-256 over source files: names relative to their source and contents, in a fixed order.

    Args:
        sources: A file, a folder (all its `*.py`), or the dotted name of a module or package, which is not imported
            (its parents are, as finding it needs them).

    Raises:
        HarnessError: If a source does not exist.
    """
    digest = hashlib.sha256()
    for source in sources:
        root = source if isinstance(source, Path) else _module_path(source)
        files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        digest.update(f"{root.name}\n".encode())
        for file in files:
            try:
                content = file.read_bytes()
            except OSError as error:
                raise HarnessError(f"cannot read the source file {file}: {error}; reinstall the package") from error
            name = file.relative_to(root).as_posix() if root.is_dir() else file.name
            digest.update(f"{name}\n{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """What PyTorch's results depend on besides code and data: package versions, vector features, threads; for keys."""
    import torch

    found = {name: _version(name) for name in ("torch", "torchvision", "sam3", "numpy")}
    found["python"] = platform.python_version()
    found["machine"] = platform.machine()
    found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    found["threads"] = str(torch.get_num_threads())
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _module_path(name: str) -> Path:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise HarnessError(f"there is no module {name!r} to take a digest of; install the package that has it")
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    if spec.origin is None:
        raise HarnessError(f"the module {name!r} has no source file to take a digest of")
    return Path(spec.origin)


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _read(path: Path, tag: str) -> dict[str, Array] | None:
    """The entry, or None if there is none or it is corrupt: then it is thrown away, with a warning."""
    try:
        arrays = read_arrays(path, tag)
    except FileNotFoundError:
        return None
    except CorruptFile as problem:
        _log.warning("cache entry thrown away and made again: %s", problem)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the date of the last use, which pruning goes by
    return arrays
