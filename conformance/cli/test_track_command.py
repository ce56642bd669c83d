"""`sam3-tvm track` as a user meets it: without torch and sam3, real files, exit codes, one sentence for a mistake."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from conformance.support.bare import BARE
from conformance.support.commands import run_command
from conformance.support.folders import EncodesOnce
from conformance.support.sentences import sentence
from harness.app.results.journal import JOURNAL
from harness.models.sam3.tracker.scene import SCENE
from harness.runtime import Sam3

ROOT = Path(__file__).resolve().parents[2]


def track(*arguments: str | Path, out: Path, model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BARE, "track", *map(str, arguments), "--out", str(out), "--model", str(model)]
    env = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=out.parent, timeout=600, check=False)


@pytest.fixture(scope="module")
def tracker(tiny_artifact: Path) -> Sam3:
    return Sam3(EncodesOnce.load(tiny_artifact))


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A folder with two frames of the scene."""
    folder = tmp_path / "clip"
    folder.mkdir()
    for number in range(2):
        Image.fromarray(SCENE.picture(8 * number)).save(folder / f"{number}.png")
    return folder


def test_results_are_those_of_a_session(tiny_artifact: Path, tracker: Sam3, clip: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    texts = ["dog", "cup"]
    done = track(clip, "--text", "dog", "--text", "cup", out=out, model=tiny_artifact)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The weights are untrained" in done.stdout
    assert "in 2 frames" in done.stdout
    assert "frames/s" in done.stdout
    session = tracker.start_session(clip)
    session.add_prompt(0, texts)
    expected = list(session.propagate())
    names = [JOURNAL, "annotations.json", "masks", "masks/00000.png", "masks/00001.png", "overlay.mp4", "tracks.csv"]
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*")) == names
    data_set = COCO(str(out / "annotations.json"))
    with (out / "tracks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for frame in expected:
        entries = data_set.imgToAnns[frame.index + 1]
        assert [entry["track_id"] for entry in entries] == frame.ids.tolist()
        listed = [row for row in rows if int(row["frame"]) == frame.index]
        assert [int(row["track"]) for row in listed] == frame.ids.tolist()
        assert [row["category"] for row in listed] == list(frame.texts)
        names_of = {each["id"]: each["name"] for each in data_set.dataset["categories"]}
        assert [names_of[entry["category_id"]] for entry in entries] == list(frame.texts)
        numbered = np.asarray(Image.open(out / "masks" / f"{frame.index:05}.png"))
        assert set(np.unique(numbered)) <= {0, *(number + 1 for number in frame.ids)}
        for entry, mask in zip(entries, frame.masks, strict=True):
            np.testing.assert_array_equal(data_set.annToMask(entry).astype(bool), mask)


def test_clicks_are_one_object(tiny_artifact: Path, tracker: Sam3, clip: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    clicks = ("--click", "60,120", "--click-out", "150,60", "--no-overlay")
    for told in ("frames/s", "done by an earlier run"):
        done = track(clip, *clicks, out=out, model=tiny_artifact)
        assert done.returncode == 0, done.stderr
        assert "1 object in 2 frames" in done.stdout and told in done.stdout
    session = tracker.start_session(clip)
    session.add_prompt(0, object_id=0, points=[(60, 120), (150, 60)], labels=[1, 0])
    for frame in session.propagate():
        (mask,) = frame.masks
        numbered = np.asarray(Image.open(out / "masks" / f"{frame.index:05}.png"))
        np.testing.assert_array_equal(numbered == 1, mask)
    assert [each["name"] for each in COCO(str(out / "annotations.json")).dataset["categories"]] == ["example"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("CLIP",), sentence("nothing-asked")),
        (("CLIP", "--box", "1,2,3"), sentence("bad-numbers", option="--box", value="1,2,3", form="x0,y0,x1,y1")),
        (("CLIP", "--text", "dog", "--click", "1,2"), sentence("clicks-and-texts")),
        (("CLIP", "--text", "dog", "--text", "dog"), sentence("repeated-texts", texts="dog")),
        (("CLIP", "--click", "1,2,3"), sentence("bad-numbers", option="--click", value="1,2,3", form="x,y")),
        (("CLIP", "--text", "dog", "--frame", "5"), sentence("no-such-frame", length=1, frame=5)),
        (("nowhere.mp4", "--text", "dog"), sentence("no-such-file", name="nowhere.mp4")),
    ],
)
def test_mistakes(arguments: tuple[str, ...], expected: str, tiny_artifact: Path, clip: Path, tmp_path: Path) -> None:
    given = [str(clip) if each == "CLIP" else each for each in arguments]
    words = (*given, "--out", "out", "--model", str(tiny_artifact))
    done = run_command("track", *words, folder=tmp_path, bare=True)
    assert done.returncode == 2
    assert re.search(expected, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
