"""Which variant of a folder is the fastest on this machine: each has a library with one linear layer, which is timed.

What a processor has does not tell whether its matrix unit is faster at fp32 than its vectors, because hosts throttle
it. The answer is kept in the folder, so that a machine gets the same variant, and so the same numbers, at each load.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from harness.runtime.cpu import cpu_model
from harness.runtime.devices import to_device
from harness.runtime.loading import load_library
from harness.runtime.manifest import PROBE_LIBRARY, PROBED
from harness.runtime.packing import pack, packs
from harness.runtime.threads import default_threads

ENTRY = "probed"
"""Name of the layer's function."""
ROWS, DEPTH, COLUMNS = 576, 1024, 1024
"""Extents of the layer: a window of SAM 3's image encoder by one of its projections, 1.2 GFLOP."""
WORTH_IT = 0.9
"""A unit that hosts throttle for seconds at a time is not taken for less than a tenth of the time."""
_ROUNDS = 9
_LOCK = ".probing.lock"


def fastest(folder: Path, names: Sequence[str]) -> str:
    """Returns the variant whose layer takes the least time, as it was found at the first load.

    Args:
        folder: The folder for several CPUs. `probed.json` in it is read and, where it can be, written; without that
            file the next load times the layers again.
        names: Variants that run on this machine and have a library to be timed; a later one has to take at most
            `WORTH_IT` of the time of those before it.

    Raises:
        LoadError: One of the libraries cannot be loaded.
    """
    here = {"cpu": cpu_model(), "threads": default_threads().count, "variants": list(names)}
    if (kept := _kept(folder / PROBED, here)) in names:
        return kept
    with _alone(folder):
        if (kept := _kept(folder / PROBED, here)) in names:
            return kept  # another process has timed them
        seconds = layer_seconds({name: folder / name / PROBE_LIBRARY for name in names})
        found = names[0]
        for name in names[1:]:
            if seconds[name] <= WORTH_IT * seconds[found]:
                found = name
        _keep(folder / PROBED, {"here": here, "fastest": found, "seconds": seconds})
        return found


def layer_seconds(libraries: Mapping[str, Path]) -> dict[str, float]:
    """Returns the median time of one call of the layer of each library, in seconds; their calls alternate.

    Raises:
        LoadError: One of the libraries cannot be loaded.
    """
    calls = {name: _Layer(library) for name, library in libraries.items()}
    rounds = [{name: call.seconds() for name, call in calls.items()} for _ in range(1 + _ROUNDS)]
    # The first call of a library makes its memory and wakes the threads.
    return {name: statistics.median(round_[name] for round_ in rounds[1:]) for name in calls}


class _Layer:
    """The layer of a library, with packed weights."""

    def __init__(self, library: Path) -> None:
        import tvm_ffi

        device = tvm_ffi.device("cpu", 0)
        self._machine = load_library(library, device)
        rng = np.random.default_rng(0)
        x, weight = (rng.standard_normal((extent, DEPTH), np.float32) for extent in (ROWS, COLUMNS))
        weights: dict[str, Any] = {"weight": weight}
        if packs(self._machine, ENTRY):
            weights = pack(self._machine, ENTRY, [(weight, "float32")])
        self._arguments = [to_device(value, device, value.dtype.name) for value in (x, *weights.values())]

    def seconds(self) -> float:
        """Returns how long a call takes."""
        start = time.perf_counter()
        self._machine.call(ENTRY, *self._arguments)
        return time.perf_counter() - start


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time go on, as far as the folder can be written: what others compute disturbs the times."""
    from filelock import FileLock

    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(FileLock(folder / _LOCK))
        yield


def _kept(path: Path, here: Mapping[str, Any]) -> str:
    """Returns what was found in these circumstances; nothing if it was not, or cannot be read."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(kept.get("fastest")) if isinstance(kept, dict) and kept.get("here") == here else ""


def _keep(path: Path, found: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a folder that cannot be written is asked again at the next load
