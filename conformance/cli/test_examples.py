"""Every example runs as its README shows, and so does every Python snippet of the guides, as it is pasted."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import av
import pytest

from conformance.support.commands import run_code
from harness.runtime.sam3.video.frames import open_frames

ROOT = Path(__file__).resolve().parents[2]
CLIP = ROOT / "fixtures/videos/bigbuckbunny.mp4"
PAGES = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/**/*.md") if "evidence" not in path.parts)]
SNIPPETS = {
    f"{page.relative_to(ROOT)}:{number}": code
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a shell in which the environment is active."""
    folder = tmp_path_factory.mktemp("bin")
    for name, arguments in {"python": "", "sam3-tvm": "-m harness "}.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def run(*command: str | Path, cwd: Path, environment: dict[str, str]) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_listed() -> None:
    folders = {path.parent.name for path in ROOT.glob("examples/*/README.md")}
    linked = set(re.findall(r"\((\w+)/README\.md\)", (ROOT / "examples/README.md").read_text(encoding="utf-8")))
    assert len(folders) >= 6
    assert linked == folders


# Every night: the data set's example calls the same command, with more options.
@pytest.mark.wide
def test_first_photo(tiny_artifact: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    out = tmp_path / "out"
    run(ROOT / "examples/01_first_photo/run.sh", tiny_artifact, out, cwd=tmp_path, environment=environment)
    assert (out / "annotations.json").exists()


def test_clicks(tiny_artifact: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    script, mask = ROOT / "examples/02_clicks/clicks.py", tmp_path / "mask.png"
    assert "pixels" in run("python", script, tiny_artifact, mask, cwd=tmp_path, environment=environment)
    assert mask.exists()


def test_video(tiny_artifact: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    script, session = ROOT / "examples/03_video/track.py", tmp_path / "session.safetensors"
    printed = run("python", script, tiny_artifact, session, cwd=tmp_path, environment=environment)
    assert "frame 2 object 1" in printed
    assert "corrected: frame 2" in printed


def test_data_set(tiny_artifact: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    script = ROOT / "examples/04_data_set/run.sh"
    printed = run(script, tiny_artifact, tmp_path / "out", cwd=tmp_path, environment=environment)
    assert re.search(r"^cat \d+\ncup \d+\n\Z", printed, re.M)


def test_component(tmp_path: Path, environment: dict[str, str]) -> None:
    script = ROOT / "examples/05_prove_a_component/run.sh"
    printed = run(script, tmp_path / "report", cwd=tmp_path, environment=environment)
    assert "box_head boxes strict" in printed


def test_kernels(tmp_path: Path, environment: dict[str, str]) -> None:
    run(ROOT / "examples/06_wrong_kernel/run.sh", tmp_path / "diagnosis.json", cwd=tmp_path, environment=environment)
    assert (tmp_path / "diagnosis.json").exists()


@pytest.fixture(scope="module")
def workplace(tiny_artifact: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, the photograph, the clip and the data set that the guides name."""
    folder = tmp_path_factory.mktemp("guides")
    (folder / "dist").mkdir()
    for name in ("sam3-llvm", "sam3-video"):
        (folder / "dist" / name).symlink_to(tiny_artifact)
    shutil.copy(ROOT / "fixtures/images/cat_large.jpg", folder / "photo.jpg")
    with av.open(folder / "clip.mp4", "w") as clip:
        stream = clip.add_stream("mpeg4", rate=25)
        stream.width, stream.height = 424, 240
        for pixels in itertools.islice(open_frames(CLIP), 3):
            clip.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        clip.mux(stream.encode())
    run("sam3-tvm", "segment", "photo.jpg", "--text", "cat", "--out", "out", cwd=folder, environment=environment)
    return folder


WITHIN = ("README.md:0", "docs/use/video.md:0")
"""Snippets whose every call is in the longer one of `docs/use/python.md` or `docs/use/video.md`, for every night."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] if name in WITHIN else []) for name in SNIPPETS]
)
def test_python_snippet(name: str, workplace: Path, environment: dict[str, str]) -> None:
    done = run_code(SNIPPETS[name], folder=workplace, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 8
    assert SNIPPETS.keys() > {*WITHIN}
