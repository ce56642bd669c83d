"""Tuning's worker processes: what a crash, a hang, an exception and the end of the parent do to them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from harness.tuning.measuring import RunError
from harness.tuning.worker import Worker

SECONDS = 120.0


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def test_a_worker_stays_and_leaves_out_pytorch(worker: Worker) -> None:
    here = worker.run(os.getpid, seconds=SECONDS)
    assert here != os.getpid() and worker.run(os.getpid, seconds=SECONDS) == here
    assert worker.run(eval, "__import__('sys').modules['torch']", seconds=SECONDS) is None


def test_what_a_function_raises_is_a_line_and_the_worker_stays(worker: Worker) -> None:
    here = worker.run(os.getpid, seconds=SECONDS)
    with pytest.raises(RunError, match=r"^ValueError: invalid literal for int\(\) with base 10: 'x'$"):
        worker.run(int, "x", seconds=SECONDS)
    with pytest.raises(RunError, match=r"^ModuleNotFoundError: .*torch"):
        worker.run(eval, "__import__('torch')", seconds=SECONDS)
    assert worker.run(os.getpid, seconds=SECONDS) == here


def test_after_a_crash_or_a_hang_there_is_a_new_process(worker: Worker) -> None:
    first = worker.run(os.getpid, seconds=SECONDS)
    with pytest.raises(RunError, match=r"^it crashed$"):
        worker.run(os.abort, seconds=SECONDS)
    second = worker.run(os.getpid, seconds=SECONDS)
    with pytest.raises(RunError, match=r"^it was not done after 0\.5 s$"):
        worker.run(time.sleep, 600, seconds=0.5)
    assert not psutil.pid_exists(first) and not psutil.pid_exists(second)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_worker_ends_with_its_parent_whatever_it_does() -> None:
    script = (
        "import os, time\n"
        "from harness.tuning.worker import Worker\n"
        "worker = Worker()\n"
        "print(worker.run(os.getpid, seconds=600), flush=True)\n"
        "worker.run(time.sleep, 600, seconds=600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(SECONDS)
