"""Results for people and programs: overlays, masks, COCO annotations, names of files, what a command line means."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from pycocotools import mask as coco
from pycocotools.coco import COCO
from rich.console import Console

from conformance.support.examples import examples
from conformance.support.sentences import sentence
from harness.app.results.coco import AnnotatedImage, coco_annotations, data_set
from harness.app.results.journal import JOURNAL, Journal, entries_of
from harness.app.results.objects import Objects, concatenate_objects, encode_objects, run_lengths
from harness.app.results.overlay import NEGATIVE, POSITIVE, color_of, draw, mask_png, outline
from harness.app.segment.job import SegmentedImage, unique_names
from harness.app.segment.sources import find_images
from harness.cli.segment import DEFAULT_MODEL, choose_model, make_prompts, read_classes
from harness.cli.segment_display import images_table, objects_table
from harness.core.errors import HarnessError
from harness.runtime import Found, Outputs, Prompt
from harness.runtime.sam3.segmentation import SegmentationHead

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "images"
NOTHING = np.zeros((0,), np.float32)


def objects_in(masks: Any, boxes: Any, scores: Any, category: str = "cat") -> Objects:
    """These objects, as they are taken out of what a prompt found."""
    masks = np.asarray(masks, bool)
    height, width = masks.shape[1:]
    found = Found(
        lambda: iter([masks]),
        np.asarray(boxes, np.float32).reshape(-1, 4),
        np.asarray(scores, np.float32),
        np.arange(len(masks)),
        Outputs(*[NOTHING] * 5, SegmentationHead(None, {}, {})),
        (width, height),
    )
    return encode_objects(found, category)


def two_squares() -> tuple[np.ndarray, Objects]:
    pixels = np.full((300, 400, 3), 100, np.uint8)
    masks = np.zeros((2, 300, 400), bool)
    masks[0, 100:200, 50:150] = True
    masks[1, 150:250, 120:320] = True
    return pixels, objects_in(masks, [(50, 100, 150, 200), (120, 150, 320, 250)], [0.9, 0.6])


def test_overlay_tints_masks_and_leaves_the_rest() -> None:
    pixels, found = two_squares()
    drawn = np.asarray(draw(pixels, found))
    assert drawn.shape == pixels.shape
    first, second = (np.array(color) for color in map(color_of, range(2)))
    np.testing.assert_allclose(drawn[120, 80], 100 * 0.58 + first * 0.42, atol=1)
    np.testing.assert_allclose(drawn[230, 250], 100 * 0.58 + second * 0.42, atol=1)
    np.testing.assert_array_equal(drawn[250:][:, 330:], pixels[250:][:, 330:])
    np.testing.assert_array_equal(drawn[199, 100], first, "the edge of a mask is opaque")
    assert (pixels == 100).all(), "the photograph itself stays"


def test_the_best_is_on_top() -> None:
    pixels, found = two_squares()
    drawn = np.asarray(draw(pixels, found))
    np.testing.assert_array_equal(drawn[190:198, 149], np.tile(color_of(0), (8, 1)))


def test_labels_are_written_near_their_boxes() -> None:
    pixels, found = two_squares()
    drawn = np.asarray(draw(pixels, found)).astype(int)
    color = np.array(color_of(0))
    chip = drawn[84:99, 52:110].reshape(-1, 3)
    assert (chip == color).all(axis=1).mean() > 0.3
    dark_or_light = (np.abs(chip - 0).max(axis=1) < 40) | (np.abs(chip - 255).max(axis=1) < 40)
    assert dark_or_light.mean() > 0.03, "letters on the chip"


def test_marks_of_the_prompt() -> None:
    pixels, found = two_squares()
    prompt = Prompt(
        boxes=[(350, 20, 390, 60)], box_labels=[False], points=[(370, 250), (30, 250)], point_labels=[True, False]
    )
    plain, marked = (np.asarray(draw(pixels, found, asked)) for asked in ((), (prompt,)))
    assert (plain[20:60, 350:390] == 100).all()
    assert (marked[20:60, 350:390] == NEGATIVE).all(axis=2).any()
    assert (marked[240:260, 360:380] == POSITIVE).all(axis=2).any()
    assert (marked[240:260, 20:40] == NEGATIVE).all(axis=2).any()
    minus = (marked[247:254, 30] == 255).all(axis=1)
    assert minus.sum() == 2, "as wide as a line of an image of this size"


BOX = st.tuples(*[st.floats(-2000, 2000, width=32)] * 4)


@examples(60)
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
    found = objects_in(masks, [box for box, _ in objects], [score for _, score in objects], category)
    drawn = draw(pixels, found, [Prompt(boxes=[box for box, _ in objects])])
    assert drawn.size == size
    assert drawn.mode == "RGB"


def test_nothing_found_is_the_photograph() -> None:
    pixels, _ = two_squares()
    found = objects_in(np.zeros((0, 300, 400)), [], [])
    np.testing.assert_array_equal(np.asarray(draw(pixels, found)), pixels)


def test_colors_are_distinct() -> None:
    told = np.array([color_of(index) for index in range(200)]).astype(int)
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


@examples(100)
@given(mask=arrays(bool, st.tuples(st.integers(1, 40), st.integers(1, 40))))
def test_run_lengths_are_cocos(mask: np.ndarray) -> None:
    encoded = run_lengths(mask)
    again = json.loads(json.dumps(encoded))
    np.testing.assert_array_equal(coco.decode(again).astype(bool), mask)
    assert coco.area(again) == mask.sum()


def test_objects_of_several_prompts() -> None:
    _, cats = two_squares()
    dogs = objects_in([cats.mask(0)], cats.boxes[:1], [0.7], "dog")
    none = objects_in(np.zeros((0, 300, 400)), [], [], "bird")
    both = concatenate_objects([cats, none, dogs])
    assert both.categories == ("cat", "cat", "dog")
    assert both.scores.tolist() == [*cats.scores.tolist(), *dogs.scores.tolist()]
    np.testing.assert_array_equal(both.mask(2), cats.mask(0))
    assert both.size == (400, 300)
    assert len(concatenate_objects([none]).runs) == 0


def test_the_data_set_is_cocos(tmp_path: Path) -> None:
    """pycocotools loads it, and finds every image, category, box and mask in it."""
    _, found = two_squares()
    other = objects_in([found.mask(1)], found.boxes[1:], [0.5], "собака")
    images = [
        AnnotatedImage("a/photo.jpg", (400, 300), coco_annotations(concatenate_objects([found, other]))),
        AnnotatedImage("b/empty.jpg", (20, 10), []),
    ]
    written = data_set(images, ["cat", "собака", "cat"])
    (tmp_path / "annotations.json").write_text(json.dumps(written), encoding="utf-8")
    loaded = COCO(str(tmp_path / "annotations.json"))
    assert [category["name"] for category in loaded.loadCats(loaded.getCatIds())] == ["cat", "собака"]
    photo, empty = loaded.loadImgs(loaded.getImgIds())
    assert (photo["file_name"], photo["width"], photo["height"]) == ("a/photo.jpg", 400, 300)
    assert not loaded.getAnnIds(imgIds=[empty["id"]])
    assert len(loaded.getAnnIds(imgIds=[photo["id"]], catIds=loaded.getCatIds(catNms=["cat"]))) == 2
    first, second, third = loaded.loadAnns(loaded.getAnnIds(imgIds=[photo["id"]]))
    assert (first["bbox"], first["area"], first["iscrowd"]) == ([50, 100, 100, 100], 10_000, 0)
    assert [entry["score"] for entry in (first, second, third)] == pytest.approx([0.9, 0.6, 0.5])
    for entry, mask in zip((first, second, third), (found.mask(0), found.mask(1), found.mask(1)), strict=True):
        np.testing.assert_array_equal(loaded.annToMask(entry).astype(bool), mask)


@examples(100)
@given(mask=arrays(bool, st.tuples(st.integers(1, 40), st.integers(1, 40))))
def test_the_box_of_an_annotation_is_that_of_its_mask_inside_the_image(mask: np.ndarray) -> None:
    """The model's own box may reach beyond the image, and is beside it; a mask without pixels has a box without any."""
    (entry,) = coco_annotations(objects_in(mask[None], [(-3.5, -2, 50, 60)], [0.5], "cat"))
    x, y, width, height = (int(each) for each in entry["bbox"])
    assert entry["bbox"] == coco.toBbox(entry["segmentation"]).tolist()
    assert x + width <= mask.shape[1]
    assert y + height <= mask.shape[0]
    assert mask[y : y + height, x : x + width].sum() == mask.sum() == entry["area"]
    assert (width, height) > (0, 0) if mask.any() else (x, y, width, height) == (0, 0, 0, 0)
    assert entry["predicted_bbox"] == [-3.5, -2, 53.5, 62]


def test_a_journal_of_an_earlier_version_without_checksums_goes_on(tmp_path: Path) -> None:
    question = {"asked": "a cat"}
    Journal(tmp_path, question).add({"key": "first"})
    file = tmp_path / JOURNAL
    file.write_text("".join(line.partition(" ")[2] for line in file.read_text().splitlines(keepends=True)))
    assert file.read_text().startswith("{")
    assert [entry["key"] for entry in entries_of(tmp_path, question) if "key" in entry] == ["first"]


@pytest.mark.parametrize("cut", [0, 1, 30, 10_000])
def test_a_journal_survives_being_cut_anywhere(tmp_path: Path, cut: int) -> None:
    question = {"prompts": ["cat"], "threshold": 0.5}
    journal = Journal(tmp_path, question)
    for index in range(3):
        journal.add({"key": f"image {index}", "seconds": index})
    file = tmp_path / JOURNAL
    written = file.read_bytes()
    file.write_bytes(written[: max(0, len(written) - cut)])
    again = Journal(tmp_path, question)
    expected = {0: 3, 1: 3, 30: 2, 10_000: 0}[cut]
    assert [entry["key"] for entry in again] == [f"image {index}" for index in range(expected)]
    again.add({"key": "image 9", "seconds": 9})
    kept = list(Journal(tmp_path, question))
    assert kept == list(again)
    assert [entry["seconds"] for entry in kept] == [*range(expected), 9]
    assert not list(Journal(tmp_path, question, keeps=lambda entry: entry["seconds"] > 9))
    assert not list(Journal(tmp_path, question | {"threshold": 0.4}))


def test_images_and_folders(tmp_path: Path) -> None:
    for name in ("b.png", "A.JPG", "a.dat", "c.eps", "d.psd", ".hidden.png", "below/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    assert find_images([tmp_path]) == [tmp_path / "A.JPG", tmp_path / "b.png"]
    assert find_images([tmp_path / "a.dat", tmp_path, tmp_path / "b.png"]) == [
        tmp_path / "a.dat",
        tmp_path / "A.JPG",
        tmp_path / "b.png",
    ]
    with pytest.raises(HarnessError, match=sentence("no-such-path", path="nowhere")):
        find_images([tmp_path, tmp_path / "nowhere"])
    with pytest.raises(HarnessError, match=sentence("no-images", path="folder.png")):
        find_images([tmp_path / "folder.png"])


def test_lists_of_images(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name in ("below/b.png", "a.png"):
        (tmp_path / name).touch()
    file = tmp_path / "list.txt"
    file.write_text("below/b.png\n\n a.png \nbelow/b.png\n")
    assert find_images([file]) == [tmp_path / "below" / "b.png", tmp_path / "a.png"]
    file.write_text("a.png\nc.png\n")
    with pytest.raises(HarnessError, match=sentence("no-image-of-list", image="c.png", path="list.txt")):
        find_images([file])
    file.write_text("\n")
    with pytest.raises(HarnessError, match=sentence("no-images", kind="list", path="list.txt")):
        find_images([file])


def test_of_many_masks_few_are_in_memory_at_once() -> None:
    """200 masks of 4 megapixels, which the threshold 0 keeps, are 800 MB."""
    height, width, count = 2000, 2000, 200

    def predict() -> Iterator[np.ndarray]:
        for start in range(0, count, 4):
            masks = np.zeros((4, height, width), bool)
            masks[np.arange(4), start : start + 4, 7] = True
            yield masks

    outputs = Outputs(*[NOTHING] * 5, SegmentationHead(None, {}, {}))
    boxes, scores = np.zeros((count, 4), np.float32), np.linspace(1, 0, count, dtype=np.float32)
    found = Found(predict, boxes, scores, np.arange(count), outputs, (width, height))
    tracemalloc.start()
    both = concatenate_objects([encode_objects(found, "cat"), encode_objects(found, "dog")])
    entries = coco_annotations(both)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 * height * width
    assert len(both.runs) == len(entries) == 2 * count
    assert np.argwhere(both.mask(count + 3)).tolist()[0] == [0, 7]
    assert {entry["area"] for entry in entries} == {4}


def test_names_of_results() -> None:
    paths = [Path("a/cat.png"), Path("a/cat.jpg"), Path("b/Cat.png"), Path("dog.png"), Path("c/cat.png")]
    assert unique_names(paths) == ["cat.png", "cat.jpg", "Cat.png_2", "dog", "cat.png_3"]


STEM = st.sampled_from(["cat", "CAT", "cat.png", "cat.png_2", "cat_2", "dog"])


@given(paths=st.lists(st.tuples(STEM, st.sampled_from([".png", ".jpg", ""])).map(lambda p: Path(p[0] + p[1]))))
def test_names_of_results_are_distinct(paths: list[Path]) -> None:
    names = unique_names(paths)
    assert len({name.casefold() for name in names}) == len(paths)


def test_masks_are_one_bit(tmp_path: Path) -> None:
    mask = np.eye(5, 9, dtype=bool)
    (tmp_path / "mask.png").write_bytes(mask_png(mask))
    with Image.open(tmp_path / "mask.png") as image:
        assert image.mode == "1"
        np.testing.assert_array_equal(np.asarray(image), mask)


def test_prompts_of_the_command() -> None:
    prompts = make_prompts(["cat"], ["1,2,3.5,4"], ["5,6,7,8"], ["-1, 2"], ["3,4"])
    expected = Prompt("cat", [[1, 2, 3.5, 4], [5, 6, 7, 8]], [True, False], [[-1, 2], [3, 4]], [True, False])
    assert prompts == [expected]
    assert [prompt.text for prompt in make_prompts(["cat", "dog", "cat"], [], [], [], [])] == ["cat", "dog"]
    assert [prompt.text for prompt in make_prompts([], ["1,2,3,4"], [], [], [])] == [None]
    with pytest.raises(HarnessError, match=sentence("several-texts", distinct=2)):
        make_prompts(["cat", "dog"], [], [], ["1,2"], [])


def test_classes_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_bytes("\ufeffcat\r\n\r\n  red car \n猫".encode())
    assert read_classes(file) == ["cat", "red car", "猫"]
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HarnessError, match=sentence("not-utf8", file=file)):
        read_classes(file)
    file.write_text(" \n")
    with pytest.raises(HarnessError, match=sentence("no-phrases", file=file)):
        read_classes(file)


@pytest.mark.parametrize("given", ["1,2,3", "1,2,3,4,5", "1 2 3 4", "a,b,c,d", ""])
def test_boxes_of_the_command_that_are_none(given: str) -> None:
    for boxes, negative, option in (([given], [], "--box"), ([], [given], "--negative-box")):
        with pytest.raises(HarnessError, match=sentence("bad-numbers", option=option, form="x0,y0,x1,y1")):
            make_prompts(["cat"], boxes, negative, [], [])
    with pytest.raises(HarnessError, match=sentence("bad-numbers", option="--point", form="x,y")):
        make_prompts([], [], [], [given], [])


def test_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HarnessError, match=sentence("no-default-model", default_model="dist/sam3-llvm")):
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
    entries = coco_annotations(objects_in([found.mask(0), found.mask(1)], found.boxes, found.scores, "[red]cat"))
    result = SegmentedImage(Path("photo.jpg"), (400, 300), entries, (), 1.25)
    one = printed(objects_table(result))
    assert "photo.jpg, 400 x 300: 2 objects" in one
    assert "[red]cat" in one
    assert "0.900" in one
    assert "50, 100, 150, 200" in one
    assert "8.3%" in one
    many = printed(images_table([result] * 25))
    assert many.count("photo.jpg") == 20
    assert "and 5 more" in many
