"""Results of a tracked video: what is in the files, and that they survive whatever ends the run."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from conformance.support.sentences import sentence
from conformance.support.tracked import DESCRIPTION, QUESTION, tracked, write_scene
from harness.app.results.objects import Objects, run_lengths
from harness.app.results.overlay import color_of, numbered_pixels, numbered_png
from harness.app.track.results import Results, VideoDescription
from harness.app.track.video import VideoWriter, finish_video, frames_in
from harness.core.errors import HarnessError
from harness.models.sam3.tracker.scene import SCENE
from harness.runtime.sam3.video.frames import open_frames


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert list(write_scene(out)) == list(range(1, SCENE.length + 1))
    return out


def started(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "conformance.support.tracked", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stopped_after(process: subprocess.Popen[str], frames: int, how: signal.Signals) -> None:
    """Sends a signal when so many frames are done, and waits for the end."""
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == frames:
            process.send_signal(how)
            break
    process.communicate(timeout=60)


def assert_same_results(out: Path, whole: Path) -> None:
    """All files are those of `whole`, but for the overlay, which is encoded anew from where the run went on."""
    for name in ("annotations.json", "tracks.csv"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    names = sorted(path.name for path in (whole / "masks").iterdir())
    assert sorted(path.name for path in (out / "masks").iterdir()) == names
    for name in names:
        assert (out / "masks" / name).read_bytes() == (whole / "masks" / name).read_bytes()
    overlays = [list(open_frames(folder / "overlay.mp4")) for folder in (out, whole)]
    assert len(overlays[0]) == len(overlays[1]) == SCENE.length
    for got, expected in zip(*overlays, strict=True):
        assert np.abs(got.astype(int) - expected).mean() < 4
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())


def test_the_data_set_is_cocos_with_tracks(whole: Path) -> None:
    coco = COCO(str(whole / "annotations.json"))
    assert coco.dataset["videos"] == [{"id": 1, "name": "scene", "width": 424, "height": 240, "length": 40}]
    assert [image["frame_index"] for image in coco.loadImgs(coco.getImgIds())] == list(range(40))
    assert coco.dataset["images"][7]["file_name"] == "scene/00007"
    assert [track["id"] for track in coco.dataset["tracks"]] == [0, 1, 2]
    assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == [part.name for part in SCENE.parts]
    for frame in range(SCENE.length):
        (image,) = (image for image in coco.dataset["images"] if image["frame_index"] == frame)
        annotations = coco.loadAnns(coco.getAnnIds(imgIds=[image["id"]]))
        seen, masks = tracked(frame), SCENE.masks(frame)
        assert tuple(entry["track_id"] for entry in annotations) == seen.ids
        for entry in annotations:
            np.testing.assert_array_equal(coco.annToMask(entry).astype(bool), masks[entry["track_id"]])
            assert entry["category_id"] == entry["track_id"] + 1
            assert entry["video_id"] == 1
    assert not coco.getAnnIds(catIds=[3], imgIds=[1]), "the coffee enters later"


def test_the_masks_have_the_objects_numbers(whole: Path) -> None:
    for frame in (0, 15, 20, 39):
        with Image.open(whole / "masks" / f"{frame:05}.png") as image:
            assert image.mode == "P"
            pixels, shown = np.asarray(image), np.asarray(image.convert("RGB"))
        for index, mask in enumerate(SCENE.masks(frame)):
            np.testing.assert_array_equal(pixels == index + 1, mask)
            assert (shown[mask] == color_of(index)).all()
        assert not shown[pixels == 0].any()


def test_the_table_has_a_row_for_each_object_of_each_frame(whole: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((whole / "tracks.csv").read_text())))
    assert [(int(row["frame"]), int(row["track"])) for row in rows] == [
        (frame, number) for frame in range(SCENE.length) for number in tracked(frame).ids
    ]
    for row in rows:
        mask = SCENE.masks(int(row["frame"]))[int(row["track"])]
        x, y, width, height = (int(float(row[name])) for name in ("x", "y", "width", "height"))
        assert int(row["area"]) == mask.sum() == mask[y : y + height, x : x + width].sum()
        assert row["category"] == SCENE.parts[int(row["track"])].name


def test_the_overlay_shows_masks_in_colours_that_stay(whole: Path) -> None:
    frames = open_frames(whole / "overlay.mp4")
    assert (frames.length, frames.rate) == (SCENE.length, Fraction(12))
    for index, drawn in enumerate(frames):
        masks, plain = SCENE.masks(index), SCENE.picture(index).astype(int)
        assert drawn.shape == plain.shape
        nothing = ~masks.any(axis=0)
        nothing[:40] = nothing[:, :4] = False  # labels
        assert np.abs(drawn[nothing].astype(int) - plain[nothing]).mean() < 12
        inside = masks[1] & np.roll(masks[1], 12, 0) & np.roll(masks[1], -12, 0)
        tinted = plain[inside] * 0.58 + np.array(color_of(1)) * 0.42
        # The median, because lines and labels of other objects may cross it.
        assert np.median(np.abs(drawn[inside] - tinted)) < 8, f"frame {index}"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_goes_on_where_it_was(tmp_path: Path, whole: Path, how: signal.Signals) -> None:
    stopped_after(started(tmp_path, "--slowly"), 12, how)
    count = sum(1 for _ in open_frames(tmp_path / "overlay.mp4"))
    assert 11 <= count < SCENE.length
    for name in (".overlay.mp4", ".annotations.json", "masks/.00003.png"):
        (tmp_path / f"{name}.1.2.tmp").write_bytes(b"what a process that was killed was writing")
    kept = sorted((tmp_path / "masks").glob("[0-9]*.png"))
    assert 12 <= len(kept) < SCENE.length
    for path in kept:
        assert path.read_bytes() == (whole / "masks" / path.name).read_bytes()
    rows = (tmp_path / "tracks.csv").read_bytes()
    assert (whole / "tracks.csv").read_bytes().startswith(rows)
    if how == signal.SIGINT:
        assert len(COCO(str(tmp_path / "annotations.json")).getImgIds()) >= 12
    with Results(tmp_path, DESCRIPTION, QUESTION) as results:
        done = results.done
        assert 11 <= done <= len(kept)
        for frame in range(done, SCENE.length):
            results.write(frame, SCENE.picture(frame), tracked(frame))
    assert_same_results(tmp_path, whole)


def test_a_full_disk_leaves_valid_files(tmp_path: Path, whole: Path) -> None:
    """The largest file may have 60,000 bytes; the run says which one it was, and goes on where there is room."""
    process = started(tmp_path, "60000")
    out, error = process.communicate(timeout=60)
    assert process.returncode == 1
    done = len(out.splitlines())
    assert 3 <= done < SCENE.length
    assert re.fullmatch("error: " + sentence("cannot-write", path=tmp_path), error.strip())
    assert sum(1 for _ in open_frames(tmp_path / "overlay.mp4")) >= done - 1
    lines = (tmp_path / "tracks.csv").read_bytes()
    assert (whole / "tracks.csv").read_bytes().startswith(lines)
    assert not list(tmp_path.glob(".*.tmp"))
    for _ in write_scene(tmp_path):
        pass
    assert_same_results(tmp_path, whole)


def test_another_question_begins_anew(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Results(tmp_path, DESCRIPTION, QUESTION) as results:
        for frame in range(6):
            results.write(frame, SCENE.picture(frame), tracked(frame))
        raise RuntimeError
    assert len(json.loads((tmp_path / "annotations.json").read_text())["images"]) == 6
    with Results(tmp_path, DESCRIPTION, QUESTION | {"scene": 2}) as results:
        assert results.done == 0
        for frame in range(2):
            results.write(frame, SCENE.picture(frame), tracked(frame))
    assert [path.name for path in sorted((tmp_path / "masks").iterdir())] == ["00000.png", "00001.png"]
    assert len(list(open_frames(tmp_path / "overlay.mp4"))) == 2


def test_frames_that_are_done_are_left_and_a_gap_is_an_error(tmp_path: Path) -> None:
    with Results(tmp_path, DESCRIPTION, QUESTION, has_overlay=False) as results:
        for frame in (0, 0, 1, 0, 2):
            results.write(frame, SCENE.picture(frame), tracked(frame))
        with pytest.raises(ValueError, match="frame 4 comes before frame 3"):
            results.write(4, SCENE.picture(4), tracked(4))
    assert not (tmp_path / "overlay.mp4").exists()
    assert len(json.loads((tmp_path / "annotations.json").read_text())["images"]) == 3


@pytest.mark.law
def test_a_mask_that_is_missing_is_written_again_and_later_ones_stay(tmp_path: Path) -> None:
    def write(first: int) -> None:
        with Results(tmp_path, DESCRIPTION, QUESTION, has_overlay=False) as results:
            assert results.done == first
            for frame in range(first, 5):
                results.write(frame, SCENE.picture(frame), tracked(frame))

    write(0)
    masks = sorted((tmp_path / "masks").iterdir())
    before = [(mask.read_bytes(), mask.stat().st_ino) for mask in masks]
    masks[2].unlink()
    write(2)
    after = [(mask.read_bytes(), mask.stat().st_ino) for mask in masks]
    assert after[2][0] == before[2][0] and after[:2] + after[3:] == before[:2] + before[3:]
    with Results(tmp_path, DESCRIPTION, QUESTION, has_overlay=False) as results:
        assert results.done == 5 and results.is_whole


def test_memory_does_not_grow_with_the_video(tmp_path: Path) -> None:
    picture, seen = SCENE.picture(0), tracked(0)
    peaks = []
    with Results(tmp_path, DESCRIPTION, QUESTION, has_overlay=False) as results:
        tracemalloc.start()
        for frame in range(120):
            results.write(frame, picture, seen)
            if frame in (20, 119):
                peaks.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert peaks[1] - peaks[0] < 20_000, "100 frames leave less than one of them in memory"


def test_names_of_files_and_texts_of_any_kind(tmp_path: Path) -> None:
    description = VideoDescription("кот, кофе", ['a "cat",\n'], file_names=["b/1.jpg"])
    runs, box = (run_lengths(np.ones((3, 5), bool)),), np.array([[0, 0, 5, 3]], np.float32)
    objects = Objects(runs, box, np.ones(1, np.float32), ('a "cat",\n',), (5, 3), ids=(7,))
    with Results(tmp_path, description, {}) as results:
        results.write(0, np.zeros((3, 5, 3), np.uint8), objects)
    coco = COCO(str(tmp_path / "annotations.json"))
    assert coco.dataset["videos"][0]["name"] == "кот, кофе"
    assert coco.dataset["images"][0]["file_name"] == "b/1.jpg"
    (row,) = csv.DictReader((tmp_path / "tracks.csv").open(newline=""))
    assert row["category"] == 'a "cat",\n'
    assert next(iter(open_frames(tmp_path / "overlay.mp4"))).shape == (4, 6, 3), "odd sizes become even"


def numbered(ids: tuple[int, ...], size: tuple[int, int] = (4, 2)) -> Objects:
    """Objects one column wide each, all of which have the last column too, the later ones with a higher score."""
    masks = np.zeros((len(ids), size[1], size[0]), bool)
    for index, mask in enumerate(masks):
        mask[:, [index, -1]] = True
    scores = np.linspace(0.1, 0.9, len(ids), dtype=np.float32)
    runs, boxes = tuple(map(run_lengths, masks)), np.zeros((len(ids), 4), np.float32)
    return Objects(runs, boxes, scores, ("x",) * len(ids), size, ids=ids)


@pytest.mark.parametrize(
    ("ids", "mode", "row"),
    [
        ((254, 3), "P", [255, 4, 0, 4]),
        ((255, 3), "I;16", [256, 4, 0, 4]),
        ((0, 65_534), "I;16", [1, 65_535, 0, 65_535]),
    ],
)
def test_any_number_has_a_pixel(ids: tuple[int, ...], mode: str, row: list[int]) -> None:
    seen = numbered(ids)
    assert numbered_pixels(seen)[0].tolist() == row
    with Image.open(io.BytesIO(numbered_png(seen))) as image:
        assert image.mode == mode
        assert np.asarray(image)[0].tolist() == row


@pytest.mark.parametrize("ids", [(1, 1), (-1, 2), (65_535, 1), (1,)])
def test_numbers_of_objects_differ_and_fit(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="objects"):
        replace(numbered((1, 2)), ids=ids)


# The video alone


@pytest.mark.parametrize("encoder", ["libx264", "mpeg4"])
def test_a_video_is_continued(tmp_path: Path, encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.app.track.video.encoder", lambda: encoder)
    path = tmp_path / "video.mp4"
    pictures = [SCENE.picture(frame) for frame in range(9)]
    rate = Fraction(30000, 1001)
    writer = VideoWriter(path, SCENE.size, rate)
    for pixels in pictures[:6]:
        writer.write(pixels)
    assert frames_in(path) >= 5, "it can be played while it is written"
    writer.close()
    assert frames_in(path) == 6
    writer = VideoWriter(path, SCENE.size, rate, frame_count=4)
    assert frames_in(path) >= 3, "what is kept is there at once"
    for pixels in pictures[4:]:
        writer.write(pixels)
    writer.close()
    assert frames_in(path) == 9
    for finish in (lambda: None, lambda: finish_video(path)):
        finish()
        frames = open_frames(path)
        assert frames.rate == rate
        got = list(frames)
        assert len(got) == 9
        for pixels, expected in zip(got, pictures, strict=True):
            assert np.abs(pixels.astype(int) - expected).mean() < 8
    assert frames.length == 9


def test_colours_of_the_video_are_those_that_were_written(tmp_path: Path) -> None:
    """The matrix of BT.709 is written and stated, and read again."""
    for color in ((200, 30, 30), (20, 180, 60), (40, 60, 210)):
        pixels = np.full((32, 64, 3), color, np.uint8)
        writer = VideoWriter(tmp_path / "video.mp4", (64, 32), Fraction(5))
        writer.write(pixels)
        writer.close()
        (got,) = open_frames(tmp_path / "video.mp4")
        assert np.abs(got.astype(int) - pixels).max() <= 4


def test_no_video_has_no_frames(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    assert frames_in(tmp_path / "text.mp4") == frames_in(tmp_path / "absent.mp4") == 0


def test_a_video_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=sentence("cannot-write")) as raised:
        VideoWriter(tmp_path / "absent" / "video.mp4", (8, 8), Fraction(5))
    assert "\n" not in str(raised.value)


def test_frames_too_wide_for_the_encoder_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=sentence("video-size", path="video.mp4", width=16400, height=16)) as raised:
        VideoWriter(tmp_path / "video.mp4", (16400, 16), Fraction(5))
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_frames(tmp_path: Path) -> None:
    with Results(tmp_path, DESCRIPTION, QUESTION):
        pass
    assert json.loads((tmp_path / "annotations.json").read_text())["images"] == []
    assert (tmp_path / "tracks.csv").read_text() == "frame,track,category,score,x,y,width,height,area\n"
