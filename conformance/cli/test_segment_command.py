"""`sam3-tvm segment` as a user meets it: without torch and sam3, real files, exit codes, one sentence for a mistake."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from conformance.support.bare import BARE
from conformance.support.commands import run_command
from conformance.support.folders import EncodesOnce
from conformance.support.sentences import sentence
from conformance.support.shards import write_tar
from harness.app.results.journal import JOURNAL
from harness.runtime import ObjectPrompt, Prompt, Sam3
from harness.runtime.artifact import Artifact
from harness.runtime.errors import ModelError
from harness.runtime.sam3.image_model import GROUNDING, INTERACTIVE

CAT = Path(__file__).resolve().parents[2] / "fixtures" / "images" / "cat.png"


def segment(
    *arguments: str | Path, out: Path, model: Path | None = None, how: tuple[str, ...] = ("-c", BARE)
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *how, "segment", *map(str, arguments), "--out", str(out)]
    if model is not None:
        command += ["--model", str(model)]
    env = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(CAT.parents[2])}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=out.parent, timeout=600, check=False)


@pytest.fixture(scope="module")
def model(tiny_artifact: Path) -> Sam3:
    return Sam3(EncodesOnce.load(tiny_artifact))


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """A folder with a photograph, a broken one, a photograph in a smaller size, and a text."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    shutil.copy(CAT, folder / "a.png")
    (folder / "b.jpg").write_bytes(CAT.read_bytes()[:9000])
    with Image.open(CAT) as image:
        image.resize((90, 60)).save(folder / "c.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


def test_results_are_those_of_the_library(tiny_artifact: Path, model: Sam3, tmp_path: Path) -> None:
    image = model.set_image(CAT)
    asked = Prompt("a cat", boxes=[(60, 20, 400, 290)], points=[(5, 6)], point_labels=[False])
    (everything,) = image.segment_batch([asked], threshold=0)
    best = np.sort(everything.scores)[::-1]
    threshold = float(best[3] + best[4]) / 2
    kept = np.flatnonzero(everything.scores > threshold)
    out = tmp_path / "out"
    masks = out / "cat_masks"
    masks.mkdir(parents=True)
    (masks / "mine.png").write_bytes(b"older")
    done = segment(
        CAT, "--text", "a cat", "--box", "60,20,400,290", "--negative-point", "5,6", "--threshold", repr(threshold),
        out=out, model=tiny_artifact,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The weights are untrained" in done.stdout
    assert "meaningless" in done.stdout
    assert "cat.png, 451 x 300: 4 objects" in done.stdout
    assert "images/s" in done.stdout
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*")) == [
        JOURNAL,
        "annotations.json",
        "cat_masks",
        *[f"cat_masks/{index:03}.png" for index in range(4)],
        "cat_masks/mine.png",
        "cat_overlay.png",
    ]
    data_set = COCO(str(out / "annotations.json"))
    assert [(image["file_name"], image["width"], image["height"]) for image in data_set.dataset["images"]] == [
        ("cat.png", 451, 300)
    ]
    assert [category["name"] for category in data_set.dataset["categories"]] == ["a cat"]
    entries = data_set.dataset["annotations"]
    assert [entry["score"] for entry in entries] == everything.scores[kept].tolist()
    for index, entry in enumerate(entries):
        mask = everything.masks[kept[index]]
        assert (entry["image_id"], entry["category_id"]) == (1, 1)
        np.testing.assert_array_equal(data_set.annToMask(entry).astype(bool), mask)
        with Image.open(masks / f"{index:03}.png") as file:
            np.testing.assert_array_equal(np.asarray(file), mask)
    with Image.open(out / "cat_overlay.png") as overlay:
        assert overlay.size == (451, 300)


def test_a_folder_with_a_broken_image(tiny_artifact: Path, photographs: Path, tmp_path: Path) -> None:
    done = segment(
        photographs, "--text", "cat " * 40, "--box", "100,10,500,200", "--threshold", "0",
        out=tmp_path / "out", model=tiny_artifact,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    told = done.stderr.splitlines()
    assert len(told) == 2
    assert re.match("error: " + sentence("damaged", name=photographs / "b.jpg"), told[0])
    assert told[1].startswith(f"error: {photographs / 'c.png'}: ")
    assert re.search(sentence("outside", index=1, width=90, height=60), told[1])
    assert "has 40 tokens; the model reads the first 30" in done.stdout
    assert "Box 1 reaches beyond the image of 451 x 300 pixels" in done.stdout
    assert "1 image in" in done.stdout
    data_set = COCO(str(tmp_path / "out" / "annotations.json"))
    assert [image["file_name"] for image in data_set.dataset["images"]] == ["a.png"]
    assert len(data_set.dataset["annotations"]) == 200
    assert not (tmp_path / "out" / "c_overlay.png").exists()


def test_several_classes_and_a_killed_run(tiny_artifact: Path, model: Sam3, photographs: Path, tmp_path: Path) -> None:
    """Each class is a category; a run that was killed after the first image goes on with the second."""
    (photographs / "b.jpg").unlink()
    classes = tmp_path / "classes.txt"
    classes.write_text("dog\nthing\n")
    arguments = (photographs, "--text", "cat", "--classes", classes, "--threshold", "0")
    out = tmp_path / "out"
    command = [sys.executable, "-c", BARE, "segment", *map(str, arguments), "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": str(CAT.parents[2])}
    with subprocess.Popen(
        [*command, "--model", str(tiny_artifact)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as killed:
        journal = out / JOURNAL
        deadline = time.monotonic() + 300
        while not (journal.is_file() and '"key"' in journal.read_text(encoding="utf-8")):
            assert killed.poll() is None, "it ended before the first image was done"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killed.kill()
    overlay = out / "a_overlay.png"
    before = overlay.stat().st_mtime_ns
    again = segment(*arguments, out=out, model=tiny_artifact)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "1 image had been done by an earlier run" in again.stdout
    assert overlay.stat().st_mtime_ns == before
    written = (out / "annotations.json").stat().st_mtime_ns
    finished = segment(*arguments, out=out, model=tiny_artifact)
    assert finished.returncode == 0 and f"Done; results in {out}" in finished.stdout
    assert (out / "annotations.json").stat().st_mtime_ns == written
    data_set = COCO(str(out / "annotations.json"))
    names = {category["id"]: category["name"] for category in data_set.dataset["categories"]}
    assert list(names.values()) == ["cat", "dog", "thing"]
    assert [image["file_name"] for image in data_set.dataset["images"]] == ["a.png", "c.png"]
    (image,) = data_set.loadImgs([1])
    objects = data_set.loadAnns(data_set.getAnnIds(imgIds=[image["id"]]))
    expected = model.set_image(photographs / "a.png")
    for name in names.values():
        found = expected.segment(name, threshold=0)
        scores = [entry["score"] for entry in objects if names[entry["category_id"]] == name]
        assert scores == found.scores.tolist()
    assert len(list((out / "a_masks").iterdir())) == len(objects) == 600


def test_a_shard_needs_no_further_package(tiny_artifact: Path, photographs: Path, tmp_path: Path) -> None:
    """A tar of photographs has the objects that the photographs have in a folder."""
    names = ("a.png", "b.jpg", "c.png")
    shard = write_tar(tmp_path / "0.tar", [(name, (photographs / name).read_bytes()) for name in names])
    bare = BARE.replace("sys\n", "sys\nsys.modules['fsspec'] = sys.modules['pyarrow'] = None\n", 1)
    found = {}
    for source in (photographs, shard):
        out = tmp_path / f"out of {source.name}"
        done = segment(source, "--text", "cat", "--threshold", "0", out=out, model=tiny_artifact, how=("-c", bare))
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stdout + done.stderr
        assert re.match("error: " + sentence("damaged", name=source / "b.jpg"), done.stderr)
        found[source] = (out / "annotations.json").read_bytes()
    assert found[shard] == found[photographs]
    assert (tmp_path / "out of 0.tar" / "0_a_masks" / "000.png").is_file()


def test_clicks_are_those_of_the_library(tiny_artifact: Path, model: Sam3, tmp_path: Path) -> None:
    """One click takes the best of three masks; a box, or several clicks, mean one mask. No torch is imported for it."""
    image = model.set_image(CAT)
    one = image.predict([(200, 150)])
    assert one.masks.shape == (3, 300, 451) and one.logits.shape == (3, 288, 288) and one.iou.shape == (3,)
    refined = image.predict([(200, 150), (20, 20)], [1, 0], mask=one.logits[one.best], multimask=False)
    assert refined.masks.shape == (1, 300, 451)
    several = image.predict([(200, 150), (20, 20)], [1, 0], (60, 20, 400, 290), multimask=False)
    for arguments, prediction, how in (
        (("--click", "200,150"), one, ("-X", "importtime", "-m", "harness")),
        (("--click", "200,150", "--click-out", "20,20", "--click-box", "60,20,400,290"), several, ("-c", BARE)),
    ):
        out = tmp_path / str(len(arguments))
        done = segment(CAT, *arguments, out=out, model=tiny_artifact, how=how)
        assert done.returncode == 0, done.stdout + done.stderr
        if how[0] == "-X":
            imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
            assert "tvm_ffi" in imported and "torch._C" not in imported, "where it is installed"
        data_set = COCO(str(out / "annotations.json"))
        (entry,) = data_set.dataset["annotations"]
        assert entry["score"] == pytest.approx(float(prediction.iou[prediction.best]))
        np.testing.assert_array_equal(data_set.annToMask(entry).astype(bool), prediction.masks[prediction.best])
        assert [category["name"] for category in data_set.dataset["categories"]] == ["object"]
    batch = image.predict_batch([ObjectPrompt([(200, 150)]), ObjectPrompt(box=(60, 20, 400, 290))])
    np.testing.assert_array_equal(batch[0].masks, one.masks)
    assert len(batch) == 2


def test_half_a_folder_says_what_it_lacks(tiny_artifact: Path) -> None:
    """A folder of before, or one compiled with --clicks 0, has no entry points for clicks; and the other way round."""
    loaded = Artifact.load(tiny_artifact, check=False)
    manifest = loaded.manifest
    for lacking, ask, code in (
        (INTERACTIVE, lambda model: model.encode_object_prompt(ObjectPrompt([(1, 1)]), (9, 9)), "no-clicks"),
        (GROUNDING, lambda model: model.encode_prompt(Prompt("cat"), (9, 9)), "no-grounding"),
    ):
        kept = {name: entry for name, entry in manifest.entries.items() if name not in lacking}
        loaded.manifest = msgspec.structs.replace(manifest, entries=kept)
        with pytest.raises(ModelError, match=sentence(code)):
            ask(Sam3(loaded))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([CAT], sentence("nothing-asked")),
        ([CAT, "--text", ""], sentence("empty-text")),
        ([CAT, "--box", "5,5,1"], sentence("bad-numbers", option="--box", value="5,5,1", form="x0,y0,x1,y1")),
        (["nowhere.png", "--text", "cat"], sentence("no-such-path", path="nowhere.png")),
        ([CAT, "--text", "cat", "--text", "dog", "--box", "1,2,30,40"], sentence("several-texts", distinct=2)),
        ([CAT, "--text", "cat", "--click", "5,5"], sentence("clicks-and-texts")),
        ([CAT, "--click", "5;5"], sentence("bad-numbers", option="--click", value="5;5", form="x,y")),
        ([CAT, "--click-box", "5,5"], sentence("bad-numbers", option="--click-box", value="5,5", form="x0,y0,x1,y1")),
        ([CAT, "--text", "cat", "--threads", "0"], sentence("thread-count", count=0)),
        ([CAT, "--text", "cat", "--threshold", "2"], "--threshold"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str | Path], expected: str, tiny_artifact: Path, tmp_path: Path
) -> None:
    words = (*map(str, arguments), "--out", "out", "--model", str(tiny_artifact))
    done = run_command("segment", *words, folder=tmp_path, bare=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(expected, done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_a_model(tmp_path: Path) -> None:
    done = segment(CAT, "--text", "cat", out=tmp_path / "out")
    assert done.returncode == 2
    assert re.search(sentence("no-default-model", default_model="dist/sam3-llvm"), done.stderr)
    done = segment(CAT, "--text", "cat", out=tmp_path / "out", model=tmp_path)
    assert done.returncode == 2
    assert re.search(sentence("no-manifest", folder=tmp_path), done.stderr)


def test_an_image_is_never_replaced(tiny_artifact: Path, tmp_path: Path) -> None:
    for name in ("cat.png", "cat_overlay.png"):
        shutil.copy(CAT, tmp_path / name)
    done = segment(
        tmp_path / "cat.png", tmp_path / "cat_overlay.png", "--text", "cat", out=tmp_path, model=tiny_artifact
    )
    assert done.returncode == 2
    assert re.search(sentence("replaces-input", path="cat_overlay.png"), done.stderr)
    assert (tmp_path / "cat_overlay.png").read_bytes() == CAT.read_bytes()
