"""What is started in a folder of somebody else's files runs none of them, though they be named like modules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.compiler.targets.linking import clang, linker
from harness.core.processes.call import Template, WorkerEnd, run_isolated

ROOT = Path(__file__).resolve().parents[2]

POISON = "open({ran!r}, 'w').close()\nraise SystemExit('poisoned')\n"


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder has files that are named like modules; none of them may be run, whatever starts there."""
    folder, ran = tmp_path / "poisoned", tmp_path / "ran"
    for name in ("random.py", "queue.py", "torch/__init__.py", "tvm/__init__.py", "ziglang/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(POISON.format(ran=str(ran)))
    monkeypatch.chdir(folder)
    yield folder
    assert not ran.exists()


def test_a_worker_runs_nothing_of_a_poisoned_folder(poisoned):
    with closing(Template("conformance.support.misbehaviour:load")) as template:
        for used in (None, template):
            result = run_isolated("conformance.support.misbehaviour:echo", 42, timeout=60, template=used)
            assert (result.kind, result.value) == (WorkerEnd.OK, 42)


@pytest.mark.skipif(find_spec("ziglang") is None, reason="ziglang is not installed")
def test_compilers_run_nothing_of_a_poisoned_folder(poisoned, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    command = linker()
    assert command is not None
    for compiler in (command, clang()):
        subprocess.run([*compiler, "--version"], check=True)


def test_doctor_runs_nothing_of_a_poisoned_folder(poisoned):
    command = [sys.executable, "-P", "-m", "harness", "doctor"]  # as the installed script does, without `-m`'s folder
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch and torchvision load and run together" in done.stdout
