"""How processes that compute with large arrays get their memory from the C library."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os

_TUNABLES = ("hugetlb=1", f"mmap_threshold={8 << 30}", f"trim_threshold={64 << 30}")
"""See <https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html>; sizes in bytes."""


def keep_freed_memory() -> None:
    """Makes all processes that this one starts keep the memory that they free, in huge pages, unless already decided.

    By default glibc gets each large array from the system and gives it back, page by page, which takes a third of the
    time of an oracle in float64. What is kept in pieces that fit nothing is the price: a process that makes arrays of
    many sizes can take twice the memory. Other C libraries know nothing of the variable.
    """
    os.environ.setdefault("GLIBC_TUNABLES", ":".join(f"glibc.malloc.{tunable}" for tunable in _TUNABLES))


def give_back_freed_memory() -> None:
    """Gives the system what this process has freed and not used again; other C libraries than glibc keep it."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
