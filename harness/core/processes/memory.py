"""Tunes the memory of processes that compute with large arrays, and of processes that only run compiled models."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys

_TUNABLES = ("hugetlb=1", f"mmap_threshold={8 << 30}", f"trim_threshold={64 << 30}")
"""See <https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html>; sizes in bytes."""


def keep_freed_memory() -> None:
    """Makes child processes keep the memory that they free, in huge pages, unless the environment decides.

    By default glibc gets each large array from the system and gives it back page by page, which takes a third of the
    time of an oracle in float64. The price is fragmentation: a process that makes arrays of many sizes can take twice
    the memory. Other C libraries ignore the variable.
    """
    os.environ.setdefault("GLIBC_TUNABLES", ":".join(f"glibc.malloc.{tunable}" for tunable in _TUNABLES))


def give_back_freed_memory() -> None:
    """Returns freed memory that was not reused to the system; only glibc supports that."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def hide_torch() -> None:
    """Makes imports of PyTorch fail in this process as if it were not installed, unless it is imported already.

    `tvm_ffi` imports it wherever it is installed, which takes 1.5 s and 0.6 GB of memory on a Zen 5.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
