"""Segments images one after another and writes the results; an image that fails does not stop the others.

A job that was interrupted or killed continues when it is run again (`harness.app.results.journal`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from msgspec.structs import asdict

from harness.app.results.coco import (
    AnnotatedImage,
    Annotation,
    DistinctNames,
    coco_annotations,
    data_set,
    distinct_names,
)
from harness.app.results.journal import Journal, existing_files, has_form, results_folder
from harness.app.results.objects import concatenate_objects
from harness.app.results.overlay import mask_png, png
from harness.app.segment.prompts import category_name, check_prompts, run_prompts
from harness.app.segment.sources import Image, images_of, is_location, is_shard, read_image, version
from harness.compiler.execution.remote.client import RemoteError
from harness.core.errors import HarnessError
from harness.core.files import make_folder, write_bytes, write_json
from harness.runtime import ObjectPrompt, Prompt, Sam3
from harness.runtime.errors import ModelError

_LONGEST = 200


def unique_names(images: Sequence[Image]) -> list[str]:
    """Returns a name for the results of each image: its stem, or its file name or a number where stems are equal.

    Names differ in more than case, which some file systems ignore, and leave room for suffixes.
    """
    stems = Counter(image.stem.casefold() for image in images)
    return distinct_names(
        (_short(image.stem if stems[image.stem.casefold()] == 1 else image.name), "") for image in images
    )


def _short(name: str) -> str:
    """Cuts a name to its first 200 bytes; file systems allow 255 bytes with the suffix."""
    name_bytes = os.fsencode(name)
    return name if len(name_bytes) <= _LONGEST else name_bytes[:_LONGEST].decode(errors="ignore")


ANNOTATIONS = "annotations.json"

_MASK_FILE = re.compile(r"\d{3,}\.png")


@dataclass(frozen=True)
class Job:
    """The inputs of a run.

    Attributes:
        images: Images and shards of images.
        prompts: The prompts for each image, which is encoded once. Of a prompt for one object the best mask is kept.
        out: Folder for the results: for each image `NAME_overlay.png` and `NAME_masks/000.png` and so on, one for each
            object in the order of `annotations.json`. This file is a data set in COCO's format of all images with the
            same prompts, including those of earlier jobs. The names of a shard's images begin with the shard's.
        threshold: Objects score above this.
    """

    images: Sequence[Image]
    prompts: Sequence[Prompt | ObjectPrompt]
    out: Path
    threshold: float

    @property
    def categories(self) -> tuple[str, ...]:
        """The category of each prompt's objects."""
        return tuple(category_name(prompt) for prompt in self.prompts)


@dataclass(frozen=True)
class SegmentedImage:
    """An image that was segmented, and its pictures until they are written.

    Attributes:
        image: The image.
        size: Width and height in pixels.
        annotations: The objects, entries of `harness.app.results.coco.coco_annotations`.
        notes: A sentence for each part of a prompt that was changed or ignored.
        seconds: Time from reading the file to writing the last result.
        resumed: Whether the results are from an earlier run.
        overlay: The overlay as PNG.
        masks: The mask of each object as PNG.
    """

    image: Image
    size: tuple[int, int]
    annotations: Sequence[dict[str, Any]]
    notes: Sequence[str]
    seconds: float
    resumed: bool = False
    overlay: bytes = b""
    masks: Sequence[bytes] = ()


@dataclass(frozen=True)
class FailedImage:
    """An image that was not segmented, or a shard that was not read to its end.

    Attributes:
        image: The image or the shard.
        reason: The sentence that says why.
    """

    image: Image
    reason: str


Result = SegmentedImage | FailedImage


@dataclass(frozen=True)
class PendingImage:
    """An image that is to be segmented.

    Attributes:
        index: Its place in the job.
        image: The image.
        content: The contents of its file; None for those that are read where it is segmented.
    """

    index: int
    image: Image
    content: bytes | None = None


Computation = Callable[[Iterator[PendingImage]], Iterator[tuple[int, Result]]]
"""Segments images: yields the index of each and its result, in any order."""


def run(
    model: Sam3,
    job: Job,
    on_done: Callable[[Result], object] = lambda result: None,
    compute: Computation | None = None,
) -> list[Result]:
    """Segments all images without results of an earlier run of the same job.

    `annotations.json` is written in the end, also when the user interrupts. If all images are done already, nothing is
    written.

    Args:
        model: The model.
        job: The job.
        on_done: Called after each image.
        compute: Segments the images with this model elsewhere; by default this process does, one after another.

    Raises:
        HarnessError: A file cannot be written, or would replace an image of the job or a file that no earlier job
            wrote; or another command is writing the folder.
        ModelError: A prompt is invalid for any image.
    """
    for prompt in job.prompts:
        if isinstance(prompt, Prompt):
            model.check_prompt(prompt)
    names = unique_names(job.images)
    inputs = {image.resolve() for image in job.images}
    overlays = _paths(job, names, overlay_path)
    for overlay in overlays:
        if overlay.resolve() in inputs:
            raise HarnessError(f"{overlay} would be replaced; give another folder with --out.")
    with results_folder(job.out):
        files = (job.out / ANNOTATIONS, *overlays)
        existing = existing_files(files, _paths(job, names, masks_path), _MASK_FILE)
        journal = Journal(job.out, _question(model, job), existing)
        return _run(job, names, journal, on_done, compute or partial(_compute, model, job))


def _paths(job: Job, names: Sequence[str], path_of: Callable[[Path, str], Path]) -> list[Path]:
    """Returns the paths of results; of a shard, those that are there and begin with its name."""
    paths: list[Path] = []
    for image, name in zip(job.images, names, strict=True):
        if is_shard(image):
            paths += job.out.glob(path_of(Path(), f"{escape(name)}*").name)
        else:
            paths.append(path_of(job.out, name))
    return paths


def _compute(model: Sam3, job: Job, images: Iterator[PendingImage]) -> Iterator[tuple[int, Result]]:
    for pending in images:
        yield pending.index, segment(model, job.prompts, job.threshold, pending.image, pending.content)


def _run(
    job: Job,
    names: Sequence[str],
    journal: Journal,
    on_done: Callable[[Result], object],
    compute: Computation,
) -> list[Result]:
    entries = {entry["name"].casefold(): entry for entry in _entries(journal, job.categories)}
    annotations = job.out / ANNOTATIONS
    if not entries:
        journal.remove_listed(annotations)  # they belong to another question
    journal.list_files([annotations])
    results: dict[int, Result] = {}
    photographs: list[_Photograph] = []  # those of shards as they are found there

    def pending() -> Iterator[PendingImage]:
        for index, (photograph, read) in enumerate(_photographs(job.images, names)):
            photographs.append(photograph)
            entry = entries.get(photograph.name.casefold())
            if entry is not None and _is_done(job.out, photograph, entry):
                results[index] = _resumed(photograph.image, entry)
            else:
                try:
                    content = read()
                except (HarnessError, ModelError) as error:
                    results[index] = FailedImage(photograph.image, str(error))
                else:
                    yield PendingImage(index, photograph.image, content)
                    continue
            on_done(results[index])

    try:
        for index, result in compute(pending()):
            photograph = photographs[index]
            if isinstance(result, SegmentedImage):
                _write(job.out, photograph.name, result, journal)
                result = replace(result, image=photograph.image, overlay=b"", masks=())
                entry = {field: getattr(result, field) for field in _JOURNAL_FIELDS}
                entry |= {"name": photograph.name, "image": str(photograph.image.resolve()), "key": photograph.key}
                journal.add(entry)
                entries[photograph.name.casefold()] = entry
            results[index] = result
            on_done(result)
    finally:
        if not (journal.is_whole and annotations.is_file()):
            write_json(annotations, data_set(_annotated(job, photographs, entries), job.categories))
    journal.end()
    return [results[index] for index in range(len(photographs))]


def _is_done(out: Path, photograph: _Photograph, entry: dict[str, Any]) -> bool:
    """Returns whether an entry of the journal is of the unchanged image, and the files of its results exist."""
    files = _files(out, photograph.name, len(entry["annotations"]))
    return entry["key"] == photograph.key and all(path.is_file() for path in files)


def _files(out: Path, name: str, count: int) -> list[Path]:
    """Returns the result files of an image with `count` objects: its overlay and their masks."""
    return [overlay_path(out, name), *(masks_path(out, name) / f"{index:03}.png" for index in range(count))]


@dataclass(frozen=True)
class _Photograph:
    """An image of a job.

    Attributes:
        image: The image; a shard where that cannot be read to its end.
        name: The name of its results.
        key: The key by which the journal recognizes the unchanged image with the same name.
    """

    image: Image
    name: str
    key: str


def _photographs(
    images: Sequence[Image], names: Sequence[str]
) -> Iterator[tuple[_Photograph, Callable[[], bytes | None]]]:
    """Yields images and functions that return the contents of their files, None for those that are read elsewhere.

    The images of a shard have names that begin with the shard's.
    """
    distinct = DistinctNames()
    for name in names:
        distinct.take(name)
    for source, name in zip(images, names, strict=True):
        if not is_shard(source):
            yield _Photograph(source, name, _image_key(source, name, source)), lambda: None
            continue
        try:
            for image, read in images_of(source):
                longer = distinct.take(_short(f"{name}_{image.stem}"))
                yield _Photograph(image, longer, _image_key(image, longer, source)), read
        except (HarnessError, ModelError) as error:
            yield _Photograph(source, name, ""), partial(_fail, error)


def _fail(error: Exception) -> bytes:
    raise error


def _annotated(job: Job, photographs: Sequence[_Photograph], done: dict[str, dict[str, Any]]) -> list[AnnotatedImage]:
    """Returns the images of the data set: those of the job in its order, then those of earlier jobs by their paths.

    The name of an image is its path relative to the common folder of all images. A shard is a folder, and so is what
    an address begins with.
    """
    keys = [photograph.name.casefold() for photograph in photographs]
    entries = [done[key] for key in keys if key in done]
    images = {entry["image"] for entry in entries}
    others = [entry for entry in done.values() if entry["image"] not in images]
    entries += sorted(others, key=lambda entry: entry["image"])  # the journal has them as they were done
    paths = [Path("/", entry["image"]) for entry in entries]
    sources = [(Path("/", str(image.resolve())), is_shard(image)) for image in job.images]
    folders = [*(path.parent for path in paths), *(path if is_folder else path.parent for path, is_folder in sources)]
    above = Path(os.path.commonpath(folders))
    return [
        AnnotatedImage(path.relative_to(above).as_posix(), (entry["size"][0], entry["size"][1]), entry["annotations"])
        for path, entry in zip(paths, entries, strict=True)
    ]


class _Entry(TypedDict):
    """The form of an entry of the journal, an image that was segmented."""

    name: str
    image: str
    key: str
    size: tuple[int, int]
    annotations: list[Annotation]
    notes: list[str]
    seconds: float


def _entries(journal: Journal, categories: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yields the entries of images, without damaged ones and those with objects of other categories."""
    for entry in journal:
        if has_form(entry, _Entry, categories) and is_location(entry["image"]):
            yield entry


_JOURNAL_FIELDS = ("size", "annotations", "notes", "seconds")
"""The fields of a `SegmentedImage` that are written to the journal."""


def _question(model: Sam3, job: Job) -> dict[str, Any]:
    """Returns all inputs of the results besides the images, as JSON."""
    files = json.dumps({name: asdict(file) for name, file in model.manifest.files.items()}, sort_keys=True)
    prompts = [
        {
            name: value if value is None or name == "text" else np.asarray(value).tolist()
            for name, value in vars(prompt).items()
        }
        for prompt in job.prompts
    ]
    return {"model": hashlib.sha256(files.encode()).hexdigest(), "prompts": prompts, "threshold": job.threshold}


def _image_key(image: Image, name: str, file: Image) -> str:
    """Returns a key by which the journal recognizes an image in an unchanged file with the same result name."""
    try:
        return json.dumps([str(image.resolve()), name, *version(file)])
    except OSError:
        return f"{image} cannot be read"  # reading it raises the reason


def _resumed(image: Image, entry: dict[str, Any]) -> SegmentedImage:
    width, height = entry["size"]
    return SegmentedImage(image, (width, height), entry["annotations"], entry["notes"], entry["seconds"], resumed=True)


def segment(
    model: Sam3,
    prompts: Sequence[Prompt | ObjectPrompt],
    threshold: float,
    image: Image,
    content: bytes | None = None,
) -> Result:
    """Segments one image, which is encoded once for all prompts, and writes nothing.

    Args:
        model: The model.
        prompts: The prompts.
        threshold: Objects score above this.
        image: The image.
        content: The contents of its file; by default they are read.
    """
    from harness.app.results.overlay import draw

    start = time.perf_counter()
    try:
        pixels = np.array(read_image(image, content))
        check_prompts(model, prompts, (pixels.shape[1], pixels.shape[0]))
        encoded = model.set_image(pixels)
        objects = concatenate_objects(run_prompts(encoded, prompts, threshold))
    except (HarnessError, ModelError, RemoteError) as error:
        return FailedImage(image, str(error))
    overlay = png(draw(pixels, objects, prompts))
    masks = [mask_png(objects.mask(index)) for index in range(len(objects.runs))]
    annotations = coco_annotations(objects)
    seconds = time.perf_counter() - start
    return SegmentedImage(image, objects.size, annotations, objects.notes, seconds, overlay=overlay, masks=masks)


def _write(out: Path, name: str, image: SegmentedImage, journal: Journal) -> None:
    """Writes an image's overlay and masks, and removes other masks of an earlier run."""
    overlay, *masks = files = _files(out, name, len(image.masks))
    journal.list_files(files)
    write_bytes(overlay, image.overlay)
    folder = masks_path(out, name)
    make_folder(folder)
    for path, mask in zip(masks, image.masks, strict=True):
        write_bytes(path, mask)
    for path in set(folder.iterdir()).difference(masks):
        journal.remove_listed(path)


def overlay_path(out: Path, name: str) -> Path:
    """Returns the path of an image's overlay."""
    return out / f"{name}_overlay.png"


def masks_path(out: Path, name: str) -> Path:
    """Returns the folder of an image's masks."""
    return out / f"{name}_masks"


def failures(results: Sequence[Result]) -> list[str]:
    """Returns a sentence for each image that failed; it names the image."""
    failed = [result for result in results if isinstance(result, FailedImage)]
    return [
        result.reason if str(result.image) in result.reason else f"{result.image}: {result.reason}" for result in failed
    ]
