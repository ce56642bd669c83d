"""One option for the number of threads, with a variable for its default; mistakes are one sentence."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from conformance.support.sentences import sentence
from harness.cli.main import app
from harness.core.errors import HarnessError
from harness.core.processes.threads import OPTION_VARIABLE, choose_threads, tvm_threads
from harness.runtime.threads import VARIABLE, default_threads, usable_cpus

COUNT = """
import sys
from harness.core.processes.threads import configure_threads, thread_count_reason, thread_count, tvm_threads
configure_threads(int(sys.argv[1]) if sys.argv[1:] else None)
import torch
print(thread_count(), tvm_threads(), torch.get_num_threads(), thread_count_reason(), sep="|")
"""
TOO_MANY = str(usable_cpus() + 1)
one_cpu = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="macOS has no affinity masks")


def on_one_cpu() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def run(
    *arguments: str, before: Callable[[], None] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != OPTION_VARIABLE} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, preexec_fn=before, timeout=300, check=False)


def counted(*count: str, before: Callable[[], None] | None = None, **environment: str) -> list[str]:
    """Threads asked for, threads of a parallel loop in TVM, threads of PyTorch, and why, in a process of its own."""
    done = run("-c", COUNT, *count, before=before, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def test_the_machine_decides_whatever_the_environment_says() -> None:
    choice = default_threads()
    assert counted(TVM_NUM_THREADS="1", OMP_NUM_THREADS="1") == [str(choice.count)] * 3 + [choice.reason]


@one_cpu
def test_an_affinity_mask_is_respected_and_told() -> None:
    *counts, why = counted(before=on_one_cpu)
    assert counts == ["1"] * 3
    assert why == (
        f"the affinity mask allows 1 of {os.cpu_count()} CPUs" if os.cpu_count() != 1 else "one for each CPU"
    )


def test_a_number_is_obeyed() -> None:
    assert counted("1") == ["1", "1", "1", "--threads or SAM3_TVM_THREADS says so"]


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(("--threads", "1"), {}), ((), {OPTION_VARIABLE: "1"}), (("--threads", "1"), {OPTION_VARIABLE: TOO_MANY})],
    ids=["option", "variable", "the option wins"],
)
def test_the_command_hands_the_number_to_the_process_of_each_case(
    arguments: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    options = ("--component", "box_head", "--report", str(tmp_path), *arguments)
    command = [sys.executable, "-m", "harness", "verify", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | environment
    )
    try:
        assert worker_environment(process.pid)[VARIABLE] == "1"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def worker_environment(parent: int) -> dict[str, str]:
    """What the first worker of a process, or the template of its workers, was started with."""
    for _ in range(600):
        for child in psutil.Process(parent).children():
            with contextlib.suppress(psutil.Error):
                if any(argument.startswith("harness.core.processes.") for argument in child.cmdline()):
                    return child.environ()
        time.sleep(0.1)
    raise AssertionError("no case was started")


def test_pytest_takes_the_option(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> None:
    """Without the option, runs itself with it."""
    threads = pytestconfig.getoption("threads")
    if threads is None:
        done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--threads", "1", request.node.nodeid)
        assert done.returncode == 0, done.stdout
    else:
        import torch

        assert threads == tvm_threads() == torch.get_num_threads()
        assert os.environ[VARIABLE] == os.environ["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize("count", ["0", "-1", TOO_MANY])
def test_a_number_that_cannot_be_is_one_sentence(count: str) -> None:
    with pytest.raises(HarnessError, match=sentence("thread-count", count=count, usable=usable_cpus())):
        choose_threads(int(count))


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("-m", "harness", "verify", "--threads", TOO_MANY), {}),
        (("-m", "harness", "verify", "--threads", "0"), {}),
        (("-m", "harness", "verify"), {OPTION_VARIABLE: TOO_MANY}),
        (("-m", "pytest", "--collect-only", "--threads", TOO_MANY, "conformance/core/test_selection.py"), {}),
    ],
    ids=["many", "none", "environment", "pytest"],
)
def test_mistakes_end_at_once(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    done = run(*arguments, **environment)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == (4 if "pytest" in arguments else 2)
    assert re.search(sentence("thread-count", usable=usable_cpus()), line)
    assert "Traceback" not in done.stdout


@pytest.mark.law
@pytest.mark.parametrize(
    "command",
    [
        ("budget", "--component", "nothing", "--limit", "1"),
        ("compile", "--out", "nothing", "--target", "nothing"),
        ("diagnose", "--component", "nothing"),
        ("explain", "--component", "nothing"),
        ("pack", "--into", "nothing"),
        ("tune", "--component", "nothing"),
        ("verify", "--component", "nothing"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_that_compiles_takes_the_option_first(command: tuple[str, ...]) -> None:
    with pytest.raises(HarnessError, match=sentence("thread-count", count=TOO_MANY)):
        app([*command, "--threads", TOO_MANY], standalone_mode=False)


def test_a_variable_that_is_no_number_is_named() -> None:
    done = run("-m", "harness", "verify", **{OPTION_VARIABLE: "all"})
    (sentence,) = done.stderr.strip().splitlines()
    assert done.returncode == 2
    assert "--threads" in sentence and OPTION_VARIABLE in sentence
