"""Commands that work for long leave nothing half-written when a signal ends them, and complete when repeated."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from conformance.cli.test_interrupted import MODELS, SEED, Commands, Files
from conformance.cli.test_interrupted import commands as commands
from conformance.support import recurrent_segmenter
from conformance.support.recurrent_segmenter import CLIP
from conformance.support.small_network import PERCEPTRON
from harness.compiler.tuned.database import FILE as RECORDS
from harness.compiler.tuned.database import open_database
from harness.core.processes.call import CAN_FORK
from harness.core.settings import REPOSITORY
from harness.models.registry import MODELS_VARIABLE

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs signals"),
    pytest.mark.usefixtures("one_thread", "forked_processes"),
]

SIGNALS = ("SIGTERM", "SIGHUP", "SIGKILL")
MOMENTS, MOMENTS_OF_A_NIGHT = 3, 66
"""How many are drawn for each command."""
COMPILE = ("compile", "--model", recurrent_segmenter.NAME, "--strategy", "lowering", "--scale", "shallow")
COMMANDS = {
    "compile": (*COMPILE, "--out", "out"),
    "pack": ("pack", "--into", "out", "--seed", "3"),
    "verify": ("verify", "--component", CLIP.name, "--strategy", "lowering", "--report", "out"),
    "tune": ("tune", "--component", PERCEPTRON.name, "--trials", "3", "--db", "out"),
}
REPLACED = ("compile", "pack")
"""Those whose folder is there as a whole, the one that was or the new one."""
OTHERS = ("notes.txt", ".out.txt", "temporary/mine.txt")
"""Files of the user."""
CHANGING = ("made", "created", "machine", "seconds", "peak_rss_bytes", "verification_report.html")


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts a command in a folder, which has its own cache and temporary files."""
    variables = {"TMPDIR": str(folder / "temporary"), "SAM3_TVM_CACHE": str(folder / "cache"), "COLUMNS": "200"}
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")  # PyTorch makes it among temporary files otherwise
    variables |= {MODELS_VARIABLE: MODELS, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-m", "harness", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | variables,
    )


def completed(folder: Path, *arguments: str) -> None:
    with started(folder, *arguments) as process:
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors


def files(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def results(folder: Path) -> dict[str, Any]:
    """What a command wrote, without dates and durations; of what tuning measured, that all of it can be read."""
    found: dict[str, Any] = {}
    for name, content in files(folder / "out").items():
        if name == RECORDS:
            found[name] = open_database(folder / "out").target
        elif name.endswith(".json"):
            found[name] = without(json.loads(content), CHANGING)
        elif not name.startswith(("verification_report", "VERIFICATION_REPORT")):
            found[name] = content
    return found


def tuned(folder: Path) -> set[str]:
    """Kernels of which tuning knows something."""
    return {one.task for one in open_database(folder / "out").records} if (folder / "out" / RECORDS).exists() else set()


def without(value: Any, names: Iterable[str]) -> Any:
    """Returns a value of JSON without the fields of these names, at any depth."""
    if isinstance(value, dict):
        return {name: without(inner, names) for name, inner in value.items() if name not in names}
    return [without(inner, names) for inner in value] if isinstance(value, list) else value


def begun(folder: Path, existing: Path | None) -> Path:
    """A folder with files of the user, and what is replaced."""
    for name in OTHERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("years of work")
    if existing is not None:
        shutil.copytree(existing, folder / "out")
    return folder


@pytest.fixture(scope="module")
def compiled(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled model with other weights."""
    folder = begun(tmp_path_factory.mktemp("compiled"), None)
    commands.run((*COMPILE, "--seed", "7", "--out", "out"), folder)
    return folder / "out"


@pytest.mark.skipif(not CAN_FORK, reason="processes are forked on Linux alone")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("moments", [MOMENTS, pytest.param(MOMENTS_OF_A_NIGHT, marks=pytest.mark.wide)])
def test_a_command_that_a_signal_ended_leaves_what_was_there_and_completes_when_repeated(
    command: str, moments: int, compiled: Path, commands: Commands, tmp_path: Path
) -> None:
    existing = compiled if command in REPLACED else None
    whole = begun(tmp_path / "undisturbed", existing)
    before = results(whole)
    count = commands.run(COMMANDS[command], whole)
    after = results(whole)
    assert after and after != before
    draw = random.Random(f"{SEED} {command} {moments}")
    for number in range(moments // len(SIGNALS)):
        folder = begun(tmp_path / str(number), existing)
        # What a kill leaves is for the command that completes, so that it comes last.
        for how in (*draw.sample(SIGNALS[:2], 2), SIGNALS[2]):
            moment = draw.randint(1, count + 2)
            print(f"{command} {number}: {how} at {moment} of {count}, seed {SEED}")
            kernels = tuned(folder)
            commands.run(COMMANDS[command], folder, how, moment)
            assert kernels <= tuned(folder)
            if how != "SIGKILL":
                assert results(folder) in (before, after)
                assert_nothing_is_left(folder)
        kernels = tuned(folder)
        commands.run(COMMANDS[command], folder)
        assert results(folder) == after and kernels <= tuned(folder)
        assert_nothing_is_left(folder)
        assert not list(folder.rglob("*.tmp"))
        shutil.rmtree(folder)


# By day `test_cli.py` sends signals to commands that load libraries and work, as a user runs them.
@pytest.mark.wide
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_a_signal_ended_completes_whatever_it_was_loading(
    command: str, compiled: Path, tmp_path: Path
) -> None:
    """Runs a command as a user does, with the whole of its start and its workers, and an empty cache."""
    existing = compiled if command in REPLACED else None
    whole = begun(tmp_path / "undisturbed", existing)
    before = results(whole)
    clock = time.monotonic()
    completed(whole, *COMMANDS[command])
    seconds, after = time.monotonic() - clock, results(whole)
    folder = begun(tmp_path / "ended", existing)
    draw = random.Random(f"{SEED} {command}")
    for how in map(signal.Signals.__getitem__, SIGNALS):
        moment = draw.uniform(0, 1.1 * seconds)
        print(f"{command}: {how.name} after {moment:.2f} of {seconds:.2f} s, seed {SEED}")
        with started(folder, *COMMANDS[command]) as process:
            try:
                process.communicate(timeout=moment)
            except subprocess.TimeoutExpired:
                process.send_signal(how)
            _, errors = process.communicate(timeout=120)
        # A signal may come before Python has begun the command, or after its end.
        assert process.returncode in (0, -how, 128 + how), errors
        assert "Traceback" not in errors
        if how is not signal.SIGKILL:
            assert results(folder) in (before, after)
            assert_nothing_is_left(folder)
    completed(folder, *COMMANDS[command])
    assert results(folder) == after
    assert_nothing_is_left(folder)
    assert not list(folder.rglob("*.tmp"))
    assert not workers(folder)


def assert_nothing_is_left(folder: Path) -> None:
    """Asserts that a folder has what the user put there, unchanged, and what commands write there."""
    assert all((folder / name).read_text() == "years of work" for name in OTHERS)
    assert {path.name for path in folder.iterdir()} <= {"notes.txt", ".out.txt", "temporary", "out", "cache"}
    assert [path.name for path in (folder / "temporary").iterdir()] == ["mine.txt"]
    # A worker that was killed leaves the kernel that it was writing to the next command.
    assert not [path for path in folder.rglob("*.tmp") if not path.is_relative_to(folder / "cache")]


def workers(folder: Path) -> list[str]:
    """Processes that a command has left in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_left = any(str(folder) in word for word in (*words, *process.environ().values()))
        except psutil.Error:
            continue
        found += [" ".join(words)] if is_left else []
    return found
