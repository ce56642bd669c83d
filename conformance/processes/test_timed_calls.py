"""Timed calls: what a crash, a hang, an exception and the end of the parent do to the process that serves them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from harness.core.processes.timed_calls import CallError, TimedCalls

SECONDS = 120.0


@pytest.fixture(scope="module")
def calls() -> Iterator[TimedCalls]:
    made = TimedCalls()
    yield made
    made.close()


def test_the_process_stays_and_leaves_out_pytorch(calls: TimedCalls) -> None:
    here = calls.call(os.getpid, seconds=SECONDS)
    assert here != os.getpid() and calls.call(os.getpid, seconds=SECONDS) == here
    assert calls.call(eval, "__import__('sys').modules['torch']", seconds=SECONDS) is None


def test_what_a_function_raises_is_a_line_and_the_process_stays(calls: TimedCalls) -> None:
    here = calls.call(os.getpid, seconds=SECONDS)
    with pytest.raises(CallError, match=r"^ValueError: invalid literal for int\(\) with base 10: 'x'$"):
        calls.call(int, "x", seconds=SECONDS)
    with pytest.raises(CallError, match=r"^ModuleNotFoundError: .*torch"):
        calls.call(eval, "__import__('torch')", seconds=SECONDS)
    assert calls.call(os.getpid, seconds=SECONDS) == here


def test_after_a_crash_or_a_hang_there_is_a_new_process(calls: TimedCalls) -> None:
    first = calls.call(os.getpid, seconds=SECONDS)
    with pytest.raises(CallError, match=r"^it crashed$"):
        calls.call(os.abort, seconds=SECONDS)
    second = calls.call(os.getpid, seconds=SECONDS)
    with pytest.raises(CallError, match=r"^it was not done after 0\.5 s$"):
        calls.call(time.sleep, 600, seconds=0.5)
    assert not psutil.pid_exists(first) and not psutil.pid_exists(second)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_the_process_ends_with_its_parent_whatever_it_does() -> None:
    script = (
        "import os, time\n"
        "from harness.core.processes.timed_calls import TimedCalls\n"
        "calls = TimedCalls()\n"
        "print(calls.call(os.getpid, seconds=600), flush=True)\n"
        "calls.call(time.sleep, 600, seconds=600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(SECONDS)
