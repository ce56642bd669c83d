"""Defines sides for the tests of `perf.processes`, which run in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from perf.processes import Calls, Load


@contextmanager
def holding_bytes(size: int) -> Iterator[Load]:
    """Loads `size` bytes of weights and needs twice as many more in a run."""

    def load() -> Calls:
        weights = np.ones(size, np.uint8)
        return {"run": lambda: int(weights[0]) + int(np.ones(2 * size, np.uint8)[0]), "weights": lambda: weights}

    yield load


@contextmanager
def misbehaving(how: str) -> Iterator[Load]:
    """Goes wrong when it is loaded, or when it runs."""
    if how == "import":
        raise ImportError("no such package\nand more")

    def load() -> Calls:
        if how == "load":
            raise RuntimeError("cannot be loaded")
        return {
            "raise": lambda: 1 / 0,
            "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "hang": lambda: time.sleep(60),
            "sleep": lambda: time.sleep(0.02),
        }

    yield load
