"""Images one after another: ask the model, write what it found; one that fails does not keep the others waiting.

A job that was interrupted or killed goes on where it was when it is run again (`harness.segment.journal`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.core.errors import HarnessError
from harness.execution.remote.client import RemoteError
from harness.files import make_folder, write_bytes, write_json
from harness.runtime import EncodedImage, ObjectPrompt, Prompt
from harness.runtime.errors import Sam3Error
from harness.runtime.manifest import Manifest
from harness.segment.asking import ask_all, category_of
from harness.segment.coco import AnnotatedImage, coco_annotations, data_set
from harness.segment.images import mask_png, unique_names, write_png
from harness.segment.journal import Journal, results_folder
from harness.segment.objects import Objects, joined

ANNOTATIONS = "annotations.json"

_MASK_FILE = re.compile(r"\d{3,}\.png")


@dataclass(frozen=True)
class Job:
    """What to do.

    Attributes:
        images: Files.
        prompts: What to ask of each of them; each image is encoded once. Of what a prompt for one object gives, the
            best mask is kept.
        out: Folder for the results: for each image `NAME_overlay.png` and `NAME_masks/000.png` and so on, one for each
            object in the order of `annotations.json`, which is a data set in COCO's format of all images that were
            asked the same there, those of earlier jobs included.
        threshold: What scores above it is kept.
    """

    images: Sequence[Path]
    prompts: Sequence[Prompt | ObjectPrompt]
    out: Path
    threshold: float

    @property
    def categories(self) -> tuple[str, ...]:
        """What the objects of each prompt are called."""
        return tuple(category_of(prompt) for prompt in self.prompts)


@dataclass(frozen=True)
class Segmented:
    """An image that was done.

    Attributes:
        image: The file.
        size: Width and height in pixels.
        annotations: What was found, entries of `harness.segment.coco.coco_annotations`.
        notes: A sentence for each part of a prompt that was not used as it was given.
        seconds: From reading the file to the last result written.
        resumed: Whether an earlier run did it.
    """

    image: Path
    size: tuple[int, int]
    annotations: Sequence[dict[str, Any]]
    notes: Sequence[str]
    seconds: float
    resumed: bool = False


@dataclass(frozen=True)
class Failed:
    """An image that was not done, and the sentence that says why."""

    image: Path
    reason: str


Result = Segmented | Failed


class Model(Protocol):
    """What a job asks of `harness.runtime.Sam3`."""

    @property
    def manifest(self) -> Manifest:
        """What the model says about itself."""

    def check_prompt(self, prompt: Prompt, /) -> None:
        """Checks everything of a prompt that does not depend on the image."""

    def encode_prompt(self, prompt: Prompt, size: tuple[int, int], /) -> object:
        """Checks the rest."""

    def encode_object_prompt(self, prompt: ObjectPrompt, size: tuple[int, int], /) -> object:
        """Checks everything of a prompt for one object."""

    def set_image(self, image: Any, /) -> EncodedImage:
        """Encodes an image."""


def run(model: Model, job: Job, on_done: Callable[[Result], object] = lambda result: None) -> list[Result]:
    """Does all images that no earlier run of the same job has done.

    `annotations.json` is written in the end, also when the user interrupts. If all is done already, nothing is written.

    Args:
        model: Whom to ask.
        job: What to do.
        on_done: Called after each image.

    Raises:
        HarnessError: A file cannot be written, or would replace an image of the job or what is no result of an earlier
            one; or another command is writing the folder.
        Sam3Error: A prompt makes no sense for any image.
    """
    for prompt in job.prompts:
        if isinstance(prompt, Prompt):
            model.check_prompt(prompt)
    names = unique_names(job.images)
    inputs = {image.resolve() for image in job.images}
    for name in names:
        if overlay_path(job.out, name).resolve() in inputs:
            raise HarnessError(f"{overlay_path(job.out, name)} would be replaced; give another folder with --out.")
    with results_folder(job.out):
        journal = Journal(job.out, _question(model, job), _results_there(job.out, names))
        return _run(model, job, names, journal, on_done)


def _run(
    model: Model, job: Job, names: Sequence[str], journal: Journal, on_done: Callable[[Result], object]
) -> list[Result]:
    done = {str(entry["name"]).casefold(): entry for entry in journal if "name" in entry}
    annotations = job.out / ANNOTATIONS
    if not done:
        journal.remove_listed(annotations)  # of another question
    journal.list_files([annotations])
    results: list[Result] = []
    try:
        for image, name in zip(job.images, names, strict=True):
            key = _key(image, name)
            earlier = done.get(name.casefold())
            if earlier is not None and earlier["key"] == key and _files_are_there(job.out, name, earlier):
                result: Result = _resumed(image, earlier)
            else:
                result = _segment(model, job, image, name, journal)
                if isinstance(result, Segmented):
                    entry = {field: getattr(result, field) for field in _KEPT}
                    entry |= {"name": name, "image": str(image.resolve()), "key": key}
                    journal.add(entry)
                    done[name.casefold()] = entry
            results.append(result)
            on_done(result)
    finally:
        if not (journal.is_whole and annotations.is_file()):
            write_json(annotations, data_set(_annotated(job, names, done), job.categories))
    journal.end()
    return results


def _results_there(out: Path, names: Sequence[str]) -> Iterator[Path]:
    """The files of a folder that have names of results."""
    for path in (out / ANNOTATIONS, *(overlay_path(out, name) for name in names)):
        if path.exists():
            yield path
    for name in names:
        if masks_path(out, name).is_dir():
            yield from (path for path in masks_path(out, name).iterdir() if _MASK_FILE.fullmatch(path.name))


def _files_are_there(out: Path, name: str, entry: dict[str, Any]) -> bool:
    return all(path.is_file() for path in _files(out, name, len(entry["annotations"])))


def _files(out: Path, name: str, count: int) -> list[Path]:
    """The files of an image with so many objects: its overlay, and their masks."""
    return [overlay_path(out, name), *(masks_path(out, name) / f"{index:03}.png" for index in range(count))]


def _annotated(job: Job, names: Sequence[str], done: dict[str, dict[str, Any]]) -> list[AnnotatedImage]:
    """The images of the data set: those of the job in its order, then those of earlier jobs.

    Each is called by its path below the folder that all of them lie in.
    """
    entries = [done[name.casefold()] for name in names if name.casefold() in done]
    images = {entry["image"] for entry in entries}
    entries += [entry for entry in done.values() if entry["image"] not in images]
    paths = [Path(entry["image"]) for entry in entries]
    above = Path(os.path.commonpath([path.resolve().parent for path in (*paths, *job.images)]))
    return [
        AnnotatedImage(path.relative_to(above).as_posix(), (entry["size"][0], entry["size"][1]), entry["annotations"])
        for path, entry in zip(paths, entries, strict=True)
    ]


_KEPT = ("size", "annotations", "notes", "seconds")
"""The fields of a `Segmented` that the journal keeps."""


def _question(model: Model, job: Job) -> dict[str, Any]:
    """All that the results depend on besides the images, as JSON."""
    files = json.dumps({name: asdict(file) for name, file in model.manifest.files.items()}, sort_keys=True)
    prompts = [
        {
            name: value if value is None or name == "text" else np.asarray(value).tolist()
            for name, value in vars(prompt).items()
        }
        for prompt in job.prompts
    ]
    return {"model": hashlib.sha256(files.encode()).hexdigest(), "prompts": prompts, "threshold": job.threshold}


def _key(image: Path, name: str) -> str:
    """What says in a journal that an image is the same file, and that its results have the same name."""
    try:
        status = image.stat()
    except OSError:
        return f"{image} cannot be read"  # the model says why
    return json.dumps([str(image.resolve()), name, status.st_size, status.st_mtime_ns])


def _resumed(image: Path, entry: dict[str, Any]) -> Segmented:
    width, height = entry["size"]
    return Segmented(image, (width, height), entry["annotations"], entry["notes"], entry["seconds"], resumed=True)


def _segment(model: Model, job: Job, image: Path, name: str, journal: Journal) -> Result:
    from harness.runtime.sam3.images import to_pixels
    from harness.segment.overlay import draw

    start = time.perf_counter()
    try:
        pixels = to_pixels(image)
        # What is wrong with a prompt is told before the image is encoded, which takes long.
        for prompt in job.prompts:
            size = pixels.shape[1], pixels.shape[0]
            if isinstance(prompt, Prompt):
                model.encode_prompt(prompt, size)
            else:
                model.encode_object_prompt(prompt, size)
        encoded = model.set_image(pixels)
        objects = joined(ask_all(encoded, job.prompts, job.threshold))
    except (Sam3Error, RemoteError) as error:
        return Failed(image, str(error))
    overlay, *masks = files = _files(job.out, name, len(objects.masks))
    journal.list_files(files)
    write_png(overlay, draw(pixels, objects, job.prompts))
    _write_masks(masks_path(job.out, name), masks, objects, journal)
    return Segmented(image, objects.size, coco_annotations(objects), objects.notes, time.perf_counter() - start)


def overlay_path(out: Path, name: str) -> Path:
    """Where the overlay of an image goes."""
    return out / f"{name}_overlay.png"


def masks_path(out: Path, name: str) -> Path:
    """Where the masks of an image go."""
    return out / f"{name}_masks"


def _write_masks(folder: Path, files: Sequence[Path], objects: Objects, journal: Journal) -> None:
    """One 1-bit PNG for each object; those of an earlier run that are not replaced are removed."""
    make_folder(folder)
    for path, mask in zip(files, objects.masks, strict=True):
        write_bytes(path, mask_png(mask))
    for path in set(folder.iterdir()).difference(files):
        journal.remove_listed(path)


def failures(results: Sequence[Result]) -> list[str]:
    """A sentence for each image that was not done; it names the image."""
    failed = [result for result in results if isinstance(result, Failed)]
    return [
        result.reason if str(result.image) in result.reason else f"{result.image}: {result.reason}" for result in failed
    ]
