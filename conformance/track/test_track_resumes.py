"""A run of `track` that was stopped goes on where it was; the results are those of a run that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from conformance.support.tracked_clip import track_click
from harness.app.results.journal import JOURNAL
from harness.app.track.job import SavedSession, session_file
from harness.models.sam3.tracker.scene import SCENE

FRAMES = 3
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    for number in range(FRAMES):
        Image.fromarray(SCENE.picture(8 * number)).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def whole(tiny_artifact: Path, clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    summary = track_click(tiny_artifact, clip, out)
    assert (summary.frames, summary.processed) == (FRAMES, FRAMES)
    return out


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.wide)])
def test_what_was_stopped_goes_on(how: signal.Signals, whole: Path, tiny_artifact: Path, clip: Path) -> None:
    """The results lie in the folder of the frames, where other files may come and go."""
    out = clip / how.name
    command = [sys.executable, "-m", "conformance.support.tracked_clip", tiny_artifact, clip, out]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(FRAMES - 1):
            assert process.stdout.readline()
            process.stdin.write(b"\n")
            process.stdin.flush()
        assert process.stdout.readline()
        process.send_signal(how)
        process.wait(timeout=60)
    (clip / f"{how.name} goes nowhere").symlink_to(clip / "nowhere")
    begun: list[int | None] = []
    summary = track_click(tiny_artifact, clip, out, begun.append)
    assert (summary.frames, summary.processed) == (FRAMES, 1), "two frames are not computed again"
    assert begun == [1]
    names = sorted(path.relative_to(whole) for path in whole.rglob("*"))
    assert sorted(path.relative_to(out) for path in out.rglob("*")) == names
    for name in names:
        if (whole / name).is_file() and name.suffix != ".mp4" and name.name != JOURNAL:
            assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_what_killed_runs_have_left_is_removed(tmp_path: Path) -> None:
    path, other = (session_file(tmp_path, {"asked": text}) for text in ("dog", "cat"))
    assert path != other
    for saved in (path, other):
        for name in (saved.name, f"{saved.name}.new", f".{saved.name}.1.2.tmp", f".{saved.name}.new.1.2.tmp"):
            (tmp_path / name).touch()
    saves = SavedSession(path)
    assert list(tmp_path.iterdir()) == [path]
    saves.remove()
    assert not list(tmp_path.iterdir())
