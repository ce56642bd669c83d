"""Processes that keep the memory they free, and give it back when they are told to."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from harness.core.processes.memory import keep_freed_memory

ARRAY_BYTES = 64 << 20
"""Above what glibc takes from its heap by itself: 32 MiB."""
ARRAYS = 20

FAULTS = f"""
import resource
import numpy
numpy.ones({ARRAY_BYTES}, numpy.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ARRAYS}):
    numpy.ones({ARRAY_BYTES}, numpy.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


RESIDENT = f"""
import numpy
import psutil
from harness.core.processes.memory import give_back_freed_memory
resident = lambda: psutil.Process().memory_info().rss
numpy.ones({ARRAYS * ARRAY_BYTES}, numpy.uint8)
kept = resident()
give_back_freed_memory()
print(kept - resident())
"""


def page_faults() -> int:
    """Of a process that makes one large array after the other."""
    return int(subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the tunables")
def test_freed_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    given_back = page_faults()
    monkeypatch.delenv("GLIBC_TUNABLES")
    keep_freed_memory()
    assert page_faults() * ARRAYS < given_back


def test_who_has_decided_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    keep_freed_memory()
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.check=0"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the tunables")
def test_freed_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    keep_freed_memory()
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0.9 * ARRAYS * ARRAY_BYTES
