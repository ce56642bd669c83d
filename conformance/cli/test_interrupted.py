"""Whatever ends a command, whenever: the same command completes what it began, and nothing of the user's is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.support import recurrent_segmenter, small_network
from conformance.support.known_answers import write_pictures
from harness.app.results.journal import JOURNAL
from harness.core.processes import call
from harness.core.processes.threads import OPTION_VARIABLE
from harness.models.registry import MODELS_VARIABLE
from harness.runtime.sam3.video.frames import open_frames

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals and limits")

ROOT = Path(__file__).resolve().parents[2]
FULL_DISK = "full disk"
CODES = {"SIGKILL": -9, "SIGTERM": 143, "SIGHUP": 129, "SIGINT": 130, FULL_DISK: 2}
"""How a command is ended, and its exit code."""
MOMENTS = int(os.environ.get("SAM3_TVM_INTERRUPTIONS", "30"))
"""How many moments are drawn, over works and ways to end them."""
SEED = int(os.environ.get("SAM3_TVM_INTERRUPTION_SEED", "51"))
OTHERS = {
    "segment": ("out/notes.txt", "out/0_masks/mine.png", "out/3_overlay.png"),
    "track": ("out/notes.txt", "out/masks/mine.png", "out/masks/.mine.png.1.2.tmp"),
    "replace": ("notes.txt", ".out.txt", "temporary/0.png"),
}
"""Files of the user where results go."""
Files = dict[str, bytes]


SERVING = """
import sys
from fastapi import FastAPI
from harness.cli.main import exit_code
from harness.core.files import temporary_folder
from harness.app.ui.app import listen, serve, url_of

def command():
    with temporary_folder("ui") as folder, listen("127.0.0.1", 0) as listener:
        (folder / "photo.jpg").write_text("a photograph")
        print(url_of(listener), flush=True)
        serve(FastAPI(), listener)

sys.exit(exit_code(command))
"""
"""What `ui` does, without a model."""


Work = str | tuple[str, ...]
"""A work of `conformance.support.interrupted`, or the arguments of a command."""
MODELS = f"{recurrent_segmenter.__name__},{small_network.__name__}"


class Commands:
    """Runs works and whole commands in `conformance.support.interrupted`."""

    def __init__(self, temporary: Path) -> None:
        variables = {"TMPDIR": str(temporary), MODELS_VARIABLE: MODELS, OPTION_VARIABLE: "1"}
        self.temporary = temporary
        self.process = call.start_python("conformance.support.interrupted", stdout=subprocess.PIPE, variables=variables)

    def run(self, work: Work, folder: Path, how: str = "", moment: int = 0) -> int:
        """Returns how many moments the work had; it must end as it was told to, or well."""
        code, moments, told = self.ended(work, folder, how, moment)
        assert code in ((CODES[how], 0) if how else (0,)), told
        return moments

    def ended(self, work: Work, folder: Path, how: str = "", moment: int = 0) -> tuple[int, int, str]:
        """Returns the exit code, how many moments the work had, and what it told."""
        assert self.process.stdin is not None and self.process.stdout is not None
        given: dict[str, Any] = {"work": work} if isinstance(work, str) else {"command": work}
        given |= {"pictures": str(folder / "pictures"), "out": str(folder / "out")}
        given |= {"how": how, "moment": moment}
        self.process.stdin.write(f"{json.dumps(given)}\n".encode())
        code, moments, told = json.loads(self.process.stdout.readline())
        return code, moments, told


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    started = Commands(tmp_path_factory.mktemp("temporary"))
    yield started
    assert started.process.stdin is not None
    started.process.stdin.close()
    started.process.wait()


def files(folder: Path) -> Files:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != JOURNAL]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def begun(folder: Path, work: str) -> Path:
    """A folder with pictures, files of the user, and for `replace` a folder that is replaced."""
    write_pictures(folder / "pictures", 3)
    for name in OTHERS[work]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("years of work")
    if work == "replace":
        write_pictures(folder / "out", 2)
    return folder


def results(folder: Path) -> tuple[Files, list[Any]]:
    """What must be the same byte for byte, and frames of videos, which are encoded anew from where a run went on."""
    found = files(folder)
    video = folder / "out" / "overlay.mp4"
    frames = [frame.astype(int) for frame in open_frames(video)] if found.pop("out/overlay.mp4", None) else []
    return found, frames


@pytest.fixture(scope="module")
def undisturbed(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each work: its results, and how many moments it has."""
    known = {}
    for work in ("segment", "track", "replace"):
        folder = begun(tmp_path_factory.mktemp(work), work)
        moments = commands.run(work, folder)
        assert moments > 10
        known[work] = results(folder), moments
    return known


@pytest.mark.parametrize("work", ["segment", "track", "replace"])
def test_what_was_interrupted_is_completed_by_the_same_command_and_nothing_is_lost(
    work: str, commands: Commands, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    (expected, frames), moments = undisturbed[work]
    draw = random.Random(f"{SEED} {work}")
    for number in range(-(-MOMENTS // 3)):
        how = [*CODES][number % len(CODES)]
        # Interrupted up to three times, at moments that may come after its end.
        drawn = [draw.randint(1, moments + 2) for _ in range(draw.randint(1, 3))]
        print(f"{work} {number}: {how} at {drawn} of {moments}, seed {SEED}")
        folder = begun(tmp_path / str(number), work)
        theirs = files(folder)
        for moment in drawn:
            commands.run(work, folder, how, moment)
            now = files(folder)
            assert all(now[name] == theirs[name] for name in (*OTHERS[work], "pictures/0.png"))
            if how != "SIGKILL":
                assert not [name for name in now if name.endswith(".tmp") and name not in theirs]
                assert not list(commands.temporary.iterdir())
        commands.run(work, folder)
        got, shown = results(folder)
        assert got == expected
        assert len(shown) == len(frames)
        assert all(np.abs(one - other).mean() < 12 for one, other in zip(shown, frames, strict=True))
        after = files(folder)
        commands.run(work, folder)
        assert files(folder) == after, "the finished command has nothing to do"
        assert not list(commands.temporary.iterdir())


def test_a_signal_at_any_moment_of_replacing_a_folder_leaves_nothing(
    commands: Commands, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    (expected, _), moments = undisturbed["replace"]
    for moment in range(1, moments + 1):
        folder = begun(tmp_path / str(moment), "replace")
        theirs = files(folder)
        commands.run("replace", folder, "SIGTERM", moment)
        assert files(folder) in (theirs, expected), moment
        assert not list(commands.temporary.iterdir()), moment


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_page_whose_server_is_interrupted_leaves_no_photographs(how: signal.Signals, tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", SERVING], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with pytest.raises(urllib.error.HTTPError) as absent:  # it serves; there is no such page
            urllib.request.urlopen(f"{url}nowhere", timeout=30)
        assert not absent.value.closed, "a browser keeps its connection"
        assert len(list(tmp_path.glob("sam3-tvm-ui-*/photo.jpg"))) == 1
        process.send_signal(how)
        try:
            assert process.wait(timeout=60) == 128 + how
        finally:
            process.kill()  # leaving the block waits for it
    assert not list(tmp_path.iterdir())


def test_a_hangup_under_nohup_does_not_interrupt() -> None:
    script = "import os, signal, sys; from harness.cli.main import exit_code\n"
    script += "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    script += "sys.exit(exit_code(lambda: os.kill(os.getpid(), signal.SIGHUP)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0
