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
def whole(shallow_artifact: Path, clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    summary = track_click(shallow_artifact, clip, out)
    assert (summary.frames, summary.processed) == (FRAMES, FRAMES)
    return out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_was_stopped_goes_on(
    how: signal.Signals, whole: Path, shallow_artifact: Path, clip: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "conformance.support.tracked_clip", shallow_artifact, clip, tmp_path]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, cwd=ROOT) as process:
        assert process.stdout is not None
        for _ in range(FRAMES):
            assert process.stdout.readline()
        process.send_signal(how)
    summary = track_click(shallow_artifact, clip, tmp_path)
    assert (summary.frames, summary.processed) == (FRAMES, 1), "two frames are not computed again"
    names = sorted(path.relative_to(whole) for path in whole.rglob("*"))
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == names
    for name in names:
        if (whole / name).is_file() and name.suffix != ".mp4":
            assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name
