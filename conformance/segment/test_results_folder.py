"""What `segment` and `track` do with a folder that has results, or something else, or is being written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.support.known_answers import KnownSegmenter, KnownTracker, write_pictures
from conformance.support.sentences import sentence
from harness.app.results.journal import Journal, results_folder
from harness.app.segment import job as segmenting
from harness.app.track import job as tracking
from harness.app.track.video import frames_in
from harness.core.errors import HarnessError
from harness.runtime import Prompt

pytestmark = pytest.mark.smoke


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and times of all files."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def segment(pictures: list[Path], out: Path, text: str = "cat", **given: Any) -> int:
    """Does a job, and gives the number of pictures that were encoded for it."""
    model = KnownSegmenter()
    segmenting.run(model, segmenting.Job(pictures, [Prompt(text)], out, 0.5), **given)  # type: ignore[arg-type]
    return model.encoded


def track(clip: Path, out: Path, text: str = "cat", *, has_overlay: bool = True, stop_after: int = 99) -> int:
    """Does a job, and gives the number of frames that were processed for it."""
    left = [stop_after]

    def on_frame() -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    job = tracking.Job(clip, [text], None, None, 0, out, has_overlay)
    return tracking.run(KnownTracker(), job, lambda total: None, on_frame, save_every=0).processed  # type: ignore[arg-type]


def file_names(out: Path) -> list[str]:
    return [image["file_name"] for image in json.loads((out / "annotations.json").read_text())["images"]]


def stop(_result: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "name", ["masks/00000.png", "masks/00007.png", "annotations.json", "overlay.mp4", "tracks.csv"]
)
def test_track_neither_replaces_nor_deletes_what_it_did_not_write(tmp_path: Path, name: str) -> None:
    write_pictures(tmp_path / "clip", 3)
    theirs = tmp_path / "clip" / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_bytes(b"years of work")
    before = files(tmp_path)
    with pytest.raises(HarnessError, match=sentence("not-ours", path=name)):
        track(tmp_path / "clip", tmp_path / "clip")
    assert files(tmp_path) == before
    theirs.rename(tmp_path / "elsewhere")
    track(tmp_path / "clip", tmp_path / "clip")


@pytest.mark.parametrize("name", ["1_overlay.png", "1_masks/000.png", "1_masks/1007.png", "annotations.json"])
def test_segment_neither_replaces_nor_deletes_what_it_did_not_write(tmp_path: Path, name: str) -> None:
    pictures = write_pictures(tmp_path, 3)
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_bytes(b"years of work")
    before = files(tmp_path)
    with pytest.raises(HarnessError, match=sentence("not-ours", path=name)):
        segment(pictures, tmp_path)
    assert files(tmp_path) == before


def test_what_is_beside_the_results_stays(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path, 3)
    for name in (
        "0_masks/mine.png",
        "masks/mine.png",
        "masks/.mine.png.1.2.tmp",
        ".0_overlay.png.tmp",
        "3_overlay.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"years of work")
    before = files(tmp_path)
    for text in ("cat", "dog"):
        segment(pictures, tmp_path / ".", text)
        assert before.items() <= files(tmp_path).items()
    (tmp_path / "clip").mkdir()
    write_pictures(tmp_path / "clip", 3)
    for text in ("cat", "dog"):
        track(tmp_path / "clip", tmp_path, text)
        assert before.items() <= files(tmp_path).items()


def test_results_that_are_the_video_are_not_replaced(tmp_path: Path) -> None:
    write_pictures(tmp_path / "clip", 3)
    track(tmp_path / "clip", tmp_path / "out")
    before = files(tmp_path)
    for video in ("masks", "overlay.mp4"):
        with pytest.raises(HarnessError, match=sentence("replaces-input", path=video)):
            track(tmp_path / "out" / video, tmp_path / "out")
    assert files(tmp_path) == before


def test_a_finished_job_that_is_started_again_does_nothing(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "pictures", 4)
    assert segment(pictures, tmp_path / "segmented") == 4
    for overlay in (True, False):
        out = tmp_path / f"tracked {overlay}"
        assert track(tmp_path / "pictures", out, has_overlay=overlay) == 4
    before = {path: (content, time) for path, (content, time) in files(tmp_path).items() if "journal" not in path}
    with pytest.raises(KeyboardInterrupt):
        segment(pictures, tmp_path / "segmented", on_done=stop)
    assert segment(pictures, tmp_path / "segmented") == segment(pictures[:1], tmp_path / "segmented") == 0
    assert track(tmp_path / "pictures", tmp_path / "tracked True") == 0
    for out in ("tracked True", "tracked False"):
        assert track(tmp_path / "pictures", tmp_path / out, has_overlay=False) == 0
    after = files(tmp_path)
    assert {path: after[path] for path in before} == before
    assert after.keys() - before.keys() == {path for path in after if "journal" in path}


def test_what_is_missing_of_a_finished_job_is_made_again_and_the_rest_stays(tmp_path: Path) -> None:
    """Also where the run that makes it again is interrupted."""
    pictures = write_pictures(tmp_path / "pictures", 4)
    out, tracked = tmp_path / "segmented", tmp_path / "tracked"
    segment(pictures, out)
    track(tmp_path / "pictures", tracked)
    before = files(tmp_path)
    (out / "1_masks" / "000.png").unlink()
    for name in ("overlay.mp4", "masks/00001.png"):
        (tracked / name).unlink()
    with pytest.raises(KeyboardInterrupt):
        segment(pictures, out, on_done=stop)
    with pytest.raises(KeyboardInterrupt):
        track(tmp_path / "pictures", tracked, stop_after=2)
    for folder in ("segmented", "tracked"):
        assert (tmp_path / folder / "annotations.json").read_bytes() == before[f"{folder}/annotations.json"][0]
    assert segment(pictures, out) == 1
    track(tmp_path / "pictures", tracked)
    after = files(tmp_path)
    assert {path for path in before if after[path][0] != before[path][0]} <= {
        "segmented/.journal.jsonl",
        "tracked/.journal.jsonl",
        "tracked/overlay.mp4",  # encoded anew from where the run went on
    }
    assert frames_in(tracked / "overlay.mp4") == 4


def test_a_data_set_grows_with_the_jobs_of_one_question(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "pictures", 4)
    segment(pictures[:3], tmp_path / "out")
    assert file_names(tmp_path / "out") == ["0.png", "1.png", "2.png"]
    with pytest.raises(KeyboardInterrupt):
        segment(pictures[2:], tmp_path / "out", on_done=stop)
    assert file_names(tmp_path / "out") == ["0.png", "1.png", "2.png"]
    assert segment(pictures, tmp_path / "out") == 1
    assert file_names(tmp_path / "out") == ["0.png", "1.png", "2.png", "3.png"]
    assert segment(pictures[3:], tmp_path / "out", "dog") == 1
    assert file_names(tmp_path / "out") == ["3.png"]


def test_two_commands_do_not_write_one_folder(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "pictures", 2)
    with results_folder(tmp_path / "out"):
        for begin in (
            lambda: segment(pictures, tmp_path / "out"),
            lambda: track(tmp_path / "pictures", tmp_path / "out"),
        ):
            with pytest.raises(HarnessError, match=sentence("folder-in-use", folder="out")):
                begin()
    segment(pictures, tmp_path / "out")
    assert not (tmp_path / "out" / ".lock").exists()


def test_an_answer_belongs_to_the_question_that_it_was_given_to(tmp_path: Path) -> None:
    cat, dog = ({"prompts": [text]} for text in ("cat", "dog"))
    one, other = Journal(tmp_path, cat), Journal(tmp_path, dog)
    one.add({"key": "photo.jpg", "annotations": ["CAT"]})
    assert not list(other) and not list(Journal(tmp_path, dog))
