"""Provides the session's fixtures, which many tests use and which are slow to make."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from conformance.aarch64.environment import CPU, machine_for
from conformance.layers import layer_of
from conformance.support.commands import start_python
from conformance.support.folders import CompiledCheckpoint, compile_into, write_sam31_checkpoint
from conformance.support.sentences import Sentence
from harness.compiler.targets import TARGETS
from harness.compiler.tuned.database import current_conditions
from harness.core.case import TINY
from harness.core.errors import HarnessError
from harness.core.processes import call
from harness.core.processes.call import Template
from harness.core.processes.memory import give_back_freed_memory
from harness.core.processes.threads import OPTION_VARIABLE
from harness.core.processors import Processors, chosen_processors
from harness.verify.runner import library_template

# Ignored where the suite runs in the background of a script or under nohup: what a test interrupts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


PLACE = pytest.StashKey["EmulatedPlace"]()
EXECUTED = pytest.StashKey[list[str]]()
ON_AARCH64 = "on_aarch64"
"""What a process of pytest-xdist tells by that name: the tests that called code there, and the number of calls."""


def pytest_configure(config: pytest.Config) -> None:
    """Lets the CPU kernels run on an emulated AArch64 machine, where that is asked for and this is none."""
    if not config.getoption("aarch64"):
        return
    try:
        machine = machine_for(config.getoption("cpu"))
    except HarnessError as error:
        raise pytest.UsageError(str(error)) from error
    if machine.emulated:
        # TVM takes seconds to import.
        from conformance.aarch64.place import EmulatedPlace
        from conformance.support.place import choose

        config.stash[PLACE] = EmulatedPlace(Processors(config.getoption("cpu") or CPU))
        config.stash[EXECUTED] = []
        choose(config.stash[PLACE])


def pytest_unconfigure(config: pytest.Config) -> None:
    if PLACE in config.stash:
        from conformance.support.place import choose

        choose(None)
        config.stash[PLACE].close()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names a case after its sentence's code; the regular expression would be long."""
    return val.code if isinstance(val, Sentence) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    place = item.config.stash.get(PLACE, None)
    before = 0 if place is None else place.calls
    yield
    if place is not None and place.calls > before:
        item.config.stash[EXECUTED].append(item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if PLACE in config.stash:
        terminalreporter.write_line(
            f"AArch64, emulated: {len(config.stash[EXECUTED])} tests of the CPU kernels called code there, "
            f"{config.stash[PLACE].calls} times; the others compile only, or run on this machine"
        )


gc.disable()  # while test modules and their libraries are imported: collections would take a quarter of that time


def pytest_collection_finish() -> None:
    """Freezes the imported objects, so that garbage collections after each module skip them."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Libraries complain at the end of the process of what was not collected."""
    gc.unfreeze()
    config = session.config
    if PLACE in config.stash and (output := getattr(config, "workeroutput", None)) is not None:
        output[ON_AARCH64] = (config.stash[EXECUTED], config.stash[PLACE].calls)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds what a process of pytest-xdist did on its emulated machine."""
    executed, calls = getattr(node, "workeroutput", {}).get(ON_AARCH64, ((), 0))
    if PLACE in node.config.stash:
        node.config.stash[EXECUTED] += executed
        node.config.stash[PLACE].calls += calls


@pytest.fixture(scope="module", autouse=True)
def nothing_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drops the caches of a test module, whole models among them, after the last of its tests.

    The shallow models go when a module comes that does not use them: both processes' take half of a small machine.
    """
    shallow = sys.modules.get("conformance.support.shallow")
    if shallow is not None and not any(
        getattr(value, "__module__", "") == shallow.__name__ for value in vars(request.module).values()
    ):
        shallow.forget()
    yield
    for value in vars(request.module).values():
        if callable(getattr(value, "cache_clear", None)) and value.__module__ == request.module.__name__:
            value.cache_clear()
    if layer_of(request.node) != "law":  # laws hold little, and looking for it takes a fifth of a second
        give_back_freed_memory()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads of several processes that wait for each other on the same CPUs take seconds for microseconds of work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OPTION_VARIABLE, "1")  # of commands
        patch.setattr(
            "harness.core.processes.threads._thread_count", 1
        )  # of this process, and so of those that it starts
        yield


@pytest.fixture(scope="module")
def forked_processes() -> Iterator[None]:
    """Forks the processes that this one starts off a program that has loaded PyTorch and TVM, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if call.CAN_FORK:
            patch.setattr(call, "start_python", start_python)
        yield


@pytest.fixture(scope="module")
def verifying_process(forked_processes: None) -> Iterator[Template]:
    """What the processes that verify a case are forked off; for as long as it is needed, because of its memory."""
    with closing(library_template()) as template:
        yield template


@pytest.fixture
def nvcc() -> None:
    """Skips a test where CUDA kernels cannot be compiled."""
    if problem := TARGETS["cuda"].compile_problem():
        pytest.skip(problem)


@pytest.fixture(scope="session")
def shallow_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles the shallow model with seed 0 for this machine's CPU, with one tuned schedule.

    Whoever changes it changes a copy.
    """
    return compiled_once("shallow", shared_folder(tmp_path_factory))


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles the tiny model as `shallow_artifact`, for tests that judge no number of SAM 3."""
    return compiled_once(TINY, shared_folder(tmp_path_factory))


def compiled_once(scale: str, shared: Path) -> Path:
    """Returns the folder of a model that the first process that asks for it compiles."""
    folder, tuned = shared / scale / "artifact" / scale, shared / scale / "tuned"
    with FileLock(shared / f"{scale}.lock"):
        if not folder.exists():
            from conformance.support.tuning import database_of, record  # they import PyTorch and TVM

            conditions = current_conditions("llvm", chosen_processors())
            schedule = {"rows": 3, "vectors": 1}
            database_of(tuned, record("product 1x400x256x256 left", schedule, conditions=conditions))
            compile_into(folder, "--scale", scale, "--db", str(tuned))
    return folder


@pytest.fixture(scope="session")
def sam31_artifact(tmp_path_factory: pytest.TempPathFactory) -> CompiledCheckpoint:
    """Compiles the tiny SAM 3.1 from a file as the published one, with the numbers of seed 0."""
    shared = shared_folder(tmp_path_factory) / "sam3.1"
    folder, checkpoint, printed = shared / "artifact" / "sam31", shared / "sam3.1_multiplex.pt", shared / "printed"
    with FileLock(shared.parent / "sam3.1.lock"):
        if not printed.exists():
            shared.mkdir(exist_ok=True)
            write_sam31_checkpoint(checkpoint)
            printed.write_text(compile_into(folder, "--scale", TINY, "--checkpoint", str(checkpoint)))
    return CompiledCheckpoint(folder, checkpoint, printed.read_text())


@pytest.fixture
def copy(shallow_artifact: Path, tmp_path: Path) -> Path:
    """Copies `shallow_artifact`; changed files must be written anew, because they are hard links."""
    return Path(shutil.copytree(shallow_artifact, tmp_path / "copy", copy_function=os.link))


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of this run that all processes of pytest-xdist share."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
