"""Images one after another: ask the model, write what it found; one that fails does not keep the others waiting."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.core.errors import HarnessError
from harness.execution.remote.errors import RemoteError
from harness.runtime import EncodedImage, Found, Prompt
from harness.runtime.errors import Sam3Error
from harness.segment.coco import coco_annotations
from harness.segment.files import make_folder, write_json, write_png
from harness.segment.images import unique_names

ANNOTATIONS = "annotations.json"
VISUAL = "object"
"""What objects are called where no text was given."""

_MASK_FILE = re.compile(r"\d{3}\.png")


@dataclass(frozen=True)
class Job:
    """What to do.

    Attributes:
        images: Files.
        prompt: What to ask of each of them.
        out: Folder for the results: for each image `NAME_overlay.png` and `NAME_masks/000.png` and so on, one for each
            object in the order of `annotations.json`, which has those of all images.
        threshold: What scores above it is kept.
    """

    images: Sequence[Path]
    prompt: Prompt
    out: Path
    threshold: float

    @property
    def category(self) -> str:
        """What objects are called."""
        return VISUAL if self.prompt.text is None else self.prompt.text


@dataclass(frozen=True)
class Segmented:
    """An image that was done.

    Attributes:
        image: The file.
        size: Width and height in pixels.
        annotations: What was found, as in `annotations.json`.
        notes: A sentence for each part of the prompt that was not used as it was given.
        seconds: From reading the file to the last result written.
    """

    image: Path
    size: tuple[int, int]
    annotations: Sequence[dict[str, Any]]
    notes: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class Failed:
    """An image that was not done, and the sentence that says why."""

    image: Path
    reason: str


Result = Segmented | Failed


class Model(Protocol):
    """What a job asks of `harness.runtime.Sam3`, or of `harness.execution.remote.model.RemoteModel`."""

    def check_prompt(self, prompt: Prompt, /) -> None:
        """Checks everything of a prompt that does not depend on the image."""

    def encode_prompt(self, prompt: Prompt, size: tuple[int, int], /) -> object:
        """Checks the rest."""

    def set_image(self, image: Any, /) -> EncodedImage:
        """Encodes an image."""


def run(model: Model, job: Job, on_done: Callable[[Result], object] = lambda result: None) -> list[Result]:
    """Does all images; `annotations.json` is written in the end, also when the user interrupts.

    Args:
        model: Whom to ask.
        job: What to do.
        on_done: Called after each image.

    Raises:
        HarnessError: A file cannot be written, or would replace an image of the job.
        Sam3Error: The prompt makes no sense for any image.
    """
    model.check_prompt(job.prompt)
    names = unique_names(job.images)
    inputs = {image.resolve() for image in job.images}
    for name in names:
        if overlay_path(job.out, name).resolve() in inputs:
            raise HarnessError(f"{overlay_path(job.out, name)} would be replaced; give another folder with --out.")
    make_folder(job.out)
    results: list[Result] = []
    try:
        for image, name in zip(job.images, names, strict=True):
            results.append(_segment(model, job, image, name))
            on_done(results[-1])
    finally:
        done = [entry for result in results if isinstance(result, Segmented) for entry in result.annotations]
        write_json(job.out / ANNOTATIONS, done)
    return results


def _segment(model: Model, job: Job, image: Path, name: str) -> Result:
    from harness.runtime.sam3.images import to_pixels
    from harness.segment.overlay import draw

    start = time.perf_counter()
    try:
        pixels = to_pixels(image)
        # What is wrong with the prompt is told before the image is encoded, which takes long.
        model.encode_prompt(job.prompt, (pixels.shape[1], pixels.shape[0]))
        encoded = model.set_image(pixels)
        (found,) = encoded.segment_batch([job.prompt], job.threshold)
    except Sam3Error as error:
        return Failed(image, str(error))
    except RemoteError as error:
        return Failed(image, f"the device raised {error.type}: {error}")
    write_png(overlay_path(job.out, name), draw(pixels, found, job.category, job.prompt))
    _write_masks(job.out / f"{name}_masks", found)
    entries = coco_annotations(found, image.name, job.category)
    return Segmented(image, found.size, entries, found.notes, time.perf_counter() - start)


def overlay_path(out: Path, name: str) -> Path:
    """Where the overlay of an image goes."""
    return out / f"{name}_overlay.png"


def _write_masks(folder: Path, found: Found) -> None:
    """One 1-bit PNG for each object; those of an earlier run that are not replaced are removed."""
    from PIL import Image

    make_folder(folder)
    written = set()
    for index, mask in enumerate(found.masks):
        path = folder / f"{index:03}.png"
        write_png(path, Image.fromarray(mask))
        written.add(path.name)
    for path in folder.iterdir():
        if _MASK_FILE.fullmatch(path.name) and path.name not in written:
            path.unlink()
