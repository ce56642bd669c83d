"""`sam3-tvm tune` as it is called, here and on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.schedules.cpu.test_cpu_bf16 import target_for
from conformance.support.place import executes
from conformance.support.remotes import device
from harness.core.processors import chosen_processors
from harness.core.remote import Remote
from harness.tuned.database import current_conditions
from harness.tuned.trials import Kind, read_trials

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def remote(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A device."""
    with device(tmp_path_factory.mktemp("device") / "store") as served:
        yield served.remote


def tune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command for the smallest component."""
    return subprocess.run(
        [sys.executable, "-m", "harness", "tune", "--component", "box_head", "--db", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def tuned(folder: Path, *arguments: str) -> str:
    """What it prints."""
    done = tune(folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.wide
def test_a_device_measures_schedules(remote: Remote, tmp_path: Path) -> None:
    printed = tuned(tmp_path, *remote.flags, "--trials", "4")
    trials, notices = read_trials(tmp_path)
    conditions = current_conditions("llvm", chosen_processors())
    assert notices == [] and len([trial for trial in trials if not trial.confirmed]) >= 4
    assert all(trial.kind is Kind.MEASURED and trial.conditions == conditions for trial in trials)
    # PyTorch runs here, which says nothing about the device.
    assert all(trial.torch_seconds is None for trial in trials) and "x PyTorch" not in printed
    assert "of 2 tasks have a schedule better than the default" in printed


def tasks(folder: Path, cpu: str) -> set[str]:
    """Those that the box head in bf16 has on a CPU."""
    tuned(folder, "--precision", "bf16", "--trials", "2", "--cpu", cpu)
    trials, _ = read_trials(folder)
    assert trials and all(trial.kind is Kind.MEASURED for trial in trials)
    return {trial.task for trial in trials}


@pytest.mark.skipif(not executes(target_for("cooperlake")), reason="this machine does not execute code for cooperlake")
def test_half_precision_has_tasks_of_its_own_where_an_instruction_multiplies_it(tmp_path: Path) -> None:
    names = tasks(tmp_path, "cooperlake")
    assert any(name.endswith(" bfloat16") for name in names)
    # The last layer, of four columns, stays float32.
    assert all(name.endswith(" bfloat16") or "x256x4 " in name for name in names)


@pytest.mark.wide
def test_where_none_does_the_layer_that_stays_float32_is_the_only_task(tmp_path: Path) -> None:
    (name,) = tasks(tmp_path, "x86-64-v3")
    assert "x256x4 " in name and not name.endswith(" bfloat16")
