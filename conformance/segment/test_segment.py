"""Results for people and programs: overlays, masks, COCO annotations, names of files, what a command line means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from pycocotools import mask as coco
from rich.console import Console

from harness.cli.segment import DEFAULT_MODEL, choose_model, images_table, make_prompt, objects_table
from harness.core.errors import HarnessError
from harness.runtime import Found, Outputs, Prompt
from harness.segment import Segmented, find_images, unique_names
from harness.segment.coco import coco_annotations, run_lengths
from harness.segment.files import make_folder, write_bytes, write_json, write_png
from harness.segment.overlay import NEGATIVE, POSITIVE, colors, draw, outline

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "images"
NOTHING = np.zeros((0,), np.float32)


def found_in(masks: Any, boxes: Any, scores: Any) -> Found:
    """A result with these objects; overlays and annotations do not read the model's raw outputs."""
    masks = np.asarray(masks, bool)
    height, width = masks.shape[1:]
    return Found(
        masks,
        np.asarray(boxes, np.float32).reshape(-1, 4),
        np.asarray(scores, np.float32),
        np.arange(len(masks)),
        Outputs(*[NOTHING] * 7),
        (width, height),
    )


def two_squares() -> tuple[np.ndarray, Found]:
    pixels = np.full((300, 400, 3), 100, np.uint8)
    masks = np.zeros((2, 300, 400), bool)
    masks[0, 100:200, 50:150] = True
    masks[1, 150:250, 120:320] = True
    return pixels, found_in(masks, [(50, 100, 150, 200), (120, 150, 320, 250)], [0.9, 0.6])


def test_overlay_tints_masks_and_leaves_the_rest() -> None:
    pixels, found = two_squares()
    drawn = np.asarray(draw(pixels, found, "cat"))
    assert drawn.shape == pixels.shape
    first, second = (np.array(color) for color in colors(2))
    np.testing.assert_allclose(drawn[120, 80], 100 * 0.58 + first * 0.42, atol=1)
    np.testing.assert_allclose(drawn[230, 250], 100 * 0.58 + second * 0.42, atol=1)
    np.testing.assert_array_equal(drawn[250:][:, 330:], pixels[250:][:, 330:])
    np.testing.assert_array_equal(drawn[199, 100], first, "the edge of a mask is opaque")
    assert (pixels == 100).all(), "the photograph itself stays"


def test_the_best_is_on_top() -> None:
    pixels, found = two_squares()
    drawn = np.asarray(draw(pixels, found, "cat"))
    np.testing.assert_array_equal(drawn[190:198, 149], np.tile(colors(2)[0], (8, 1)))


def test_labels_are_written_near_their_boxes() -> None:
    pixels, found = two_squares()
    drawn = np.asarray(draw(pixels, found, "cat")).astype(int)
    color = np.array(colors(2)[0])
    chip = drawn[84:99, 52:110].reshape(-1, 3)
    assert (chip == color).all(axis=1).mean() > 0.3
    dark_or_light = (np.abs(chip - 0).max(axis=1) < 40) | (np.abs(chip - 255).max(axis=1) < 40)
    assert dark_or_light.mean() > 0.03, "letters on the chip"


def test_marks_of_the_prompt() -> None:
    pixels, found = two_squares()
    prompt = Prompt(
        boxes=[(350, 20, 390, 60)], box_labels=[False], points=[(370, 250), (30, 250)], point_labels=[True, False]
    )
    plain, marked = (np.asarray(draw(pixels, found, "x", asked)) for asked in (None, prompt))
    assert (plain[20:60, 350:390] == 100).all()
    assert (marked[20:60, 350:390] == NEGATIVE).all(axis=2).any()
    assert (marked[240:260, 360:380] == POSITIVE).all(axis=2).any()
    assert (marked[240:260, 20:40] == NEGATIVE).all(axis=2).any()


BOX = st.tuples(*[st.floats(-2000, 2000, width=32)] * 4)


@settings(max_examples=60)
@given(
    size=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    objects=st.lists(st.tuples(BOX, st.floats(0, 1, width=32)), max_size=6),
    category=st.text(max_size=50),
    seed=st.integers(0, 9),
)
def test_anything_can_be_drawn(size: Any, objects: Any, category: str, seed: int) -> None:
    width, height = size
    rng = np.random.default_rng(seed)
    masks = rng.random((len(objects), height, width)) > 0.5
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = found_in(masks, [box for box, _ in objects], [score for _, score in objects])
    drawn = draw(pixels, found, category, Prompt(boxes=[box for box, _ in objects]))
    assert drawn.size == size
    assert drawn.mode == "RGB"


def test_nothing_found_is_the_photograph() -> None:
    pixels, _ = two_squares()
    found = found_in(np.zeros((0, 300, 400)), [], [])
    np.testing.assert_array_equal(np.asarray(draw(pixels, found, "cat")), pixels)


def test_colors_are_distinct() -> None:
    told = np.array(colors(200)).astype(int)
    assert len({tuple(color) for color in told.tolist()}) == 200
    for index in range(1, 8):
        assert np.abs(told[:index] - told[index]).sum(axis=1).min() > 80


@given(mask=arrays(bool, st.tuples(st.integers(1, 9), st.integers(1, 9))))
def test_outline_is_the_part_of_a_mask_that_touches_what_it_is_not(mask: np.ndarray) -> None:
    expected = np.zeros_like(mask)
    height, width = mask.shape
    for y, x in np.argwhere(mask):
        near = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
        expected[y, x] = any(0 <= row < height and 0 <= col < width and not mask[row, col] for row, col in near)
    np.testing.assert_array_equal(outline(mask, 1), expected)
    assert (outline(mask, 2) >= outline(mask, 1)).all()


@settings(max_examples=100)
@given(mask=arrays(bool, st.tuples(st.integers(1, 40), st.integers(1, 40))))
def test_run_lengths_are_cocos(mask: np.ndarray) -> None:
    encoded = run_lengths(mask)
    again = json.loads(json.dumps(encoded))
    np.testing.assert_array_equal(coco.decode(again).astype(bool), mask)
    assert coco.area(again) == mask.sum()


def test_annotations() -> None:
    _, found = two_squares()
    first, second = coco_annotations(found, "photo.jpg", "кошка")
    assert {name: first[name] for name in ("image", "category", "bbox", "area")} == {
        "image": "photo.jpg",
        "category": "кошка",
        "bbox": [50, 100, 100, 100],
        "area": 10_000,
    }
    assert first["score"] == pytest.approx(0.9)
    np.testing.assert_array_equal(coco.decode(second["segmentation"]).astype(bool), found.masks[1])


def test_images_and_folders(tmp_path: Path) -> None:
    for name in ("b.png", "A.JPG", "a.txt", ".hidden.png", "below/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    assert find_images([tmp_path]) == [tmp_path / "A.JPG", tmp_path / "b.png"]
    assert find_images([tmp_path / "a.txt", tmp_path, tmp_path / "b.png"]) == [
        tmp_path / "a.txt",
        tmp_path / "A.JPG",
        tmp_path / "b.png",
    ]
    with pytest.raises(HarnessError, match="nowhere does not exist"):
        find_images([tmp_path, tmp_path / "nowhere"])
    with pytest.raises(HarnessError, match=r"folder\.png has no images"):
        find_images([tmp_path / "folder.png"])


def test_names_of_results() -> None:
    paths = [Path("a/cat.png"), Path("a/cat.jpg"), Path("b/Cat.png"), Path("dog.png"), Path("c/cat.png")]
    assert unique_names(paths) == ["cat.png", "cat.jpg", "Cat.png_2", "dog", "cat.png_3"]


STEM = st.sampled_from(["cat", "CAT", "cat.png", "cat.png_2", "cat_2", "dog"])


@given(paths=st.lists(st.tuples(STEM, st.sampled_from([".png", ".jpg", ""])).map(lambda p: Path(p[0] + p[1]))))
def test_names_of_results_are_distinct(paths: list[Path]) -> None:
    names = unique_names(paths)
    assert len({name.casefold() for name in names}) == len(paths)


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, ["ключ", "\ud800"])
    assert json.loads(path.read_text(encoding="utf-8"))[0] == "ключ"
    before = path.read_bytes()
    # A limit on file size fails a write in the middle, as a full disk does.
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from harness.segment.files import write_bytes\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_bytes(Path(sys.argv[1]), b'x' * 5000)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert "HarnessError: Cannot write" in done.stderr
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    make_folder(tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep").is_dir()
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    (tmp_path / "taken").touch()
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(HarnessError, match=r"taken.*give another folder"):
            make_folder(folder)
    with pytest.raises(HarnessError, match="Cannot write"):
        write_bytes(tmp_path / "nowhere" / "file", b"")


def test_masks_are_one_bit(tmp_path: Path) -> None:
    mask = np.eye(5, 9, dtype=bool)
    write_png(tmp_path / "mask.png", Image.fromarray(mask))
    with Image.open(tmp_path / "mask.png") as image:
        assert image.mode == "1"
        np.testing.assert_array_equal(np.asarray(image), mask)


def test_prompts_of_the_command() -> None:
    prompt = make_prompt("cat", ["1,2,3.5,4"], ["5,6,7,8"], ["-1, 2"], ["3,4"])
    expected = Prompt("cat", [[1, 2, 3.5, 4], [5, 6, 7, 8]], [True, False], [[-1, 2], [3, 4]], [True, False])
    assert prompt == expected


@pytest.mark.parametrize("given", ["1,2,3", "1,2,3,4,5", "1 2 3 4", "a,b,c,d", ""])
def test_boxes_of_the_command_that_are_none(given: str) -> None:
    for boxes, negative, option in (([given], [], "--box"), ([], [given], "--negative-box")):
        with pytest.raises(HarnessError, match=f"{option} .* is not x0,y0,x1,y1"):
            make_prompt("cat", boxes, negative, [], [])
    with pytest.raises(HarnessError, match=r"--point .* is not x,y;"):
        make_prompt(None, [], [], [given], [])


def test_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HarnessError, match=r"sam3-tvm compile --out dist/sam3-llvm"):
        choose_model(None)
    assert choose_model(Path("mine")) == Path("mine")
    DEFAULT_MODEL.mkdir(parents=True)
    assert choose_model(None) == DEFAULT_MODEL


def printed(table: Any) -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(table)
    return console.export_text()


def test_tables() -> None:
    _, found = two_squares()
    result = Segmented(Path("photo.jpg"), (400, 300), coco_annotations(found, "photo.jpg", "[red]cat"), (), 1.25)
    one = printed(objects_table(result))
    assert "photo.jpg, 400 x 300: 2 objects" in one
    assert "[red]cat" in one
    assert "0.900" in one
    assert "50, 100, 150, 200" in one
    assert "8.3%" in one
    many = printed(images_table([result] * 25))
    assert many.count("photo.jpg") == 20
    assert "and 5 more" in many
