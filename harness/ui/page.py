"""All that one running page has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.runtime import Sam3
from harness.runtime.sam3.image_model import GROUNDING, INTERACTIVE, THRESHOLD
from harness.ui.encodings import Encodings
from harness.ui.folder import ImageFolder
from harness.ui.photographs import Photographs
from harness.ui.queue import ModelQueue
from harness.ui.sessions import Sessions


@dataclass(frozen=True)
class Abilities:
    """What the page can do with a compiled model.

    Attributes:
        name: The model's folder.
        scale, target, precision: What it is.
        note: The sentence that says that its weights are untrained; None if they are not.
        clicks: The most points on one object; 0 where it was compiled without them.
        boxes: The most boxes of a prompt for all of a kind; 0 where it was compiled for clicks alone.
        threshold: What scores above it is kept, unless the user says otherwise.
        folder: Whether there is a folder of images to choose from.
    """

    name: str
    scale: str
    target: str
    precision: str
    note: str | None
    clicks: int
    boxes: int
    threshold: float
    folder: bool


@dataclass(frozen=True)
class Page:
    """A model, and whoever uses it in a browser.

    Attributes:
        model: Asked in the queue's thread alone.
        abilities: What it can do.
        folder: The images of `--images`; None without.
        photographs, encodings, queue, sessions: What was uploaded, encoded, is waiting, and each tab's state.
    """

    model: Sam3
    abilities: Abilities
    folder: ImageFolder | None
    photographs: Photographs
    encodings: Encodings
    queue: ModelQueue
    sessions: Sessions


def make_page(
    model: Sam3, name: str, folder: ImageFolder | None, files: Path, note: str | None, most_encoded: int
) -> Page:
    """Makes the state of a page that nobody has opened yet.

    Args:
        model: Asked in the queue's thread alone.
        name: What the page calls it.
        folder: Images to choose from.
        files: Where to keep what is uploaded.
        note: What users have to know of the weights.
        most_encoded: Encoded photographs to keep.
    """
    manifest = model.manifest
    answers_clicks = all(entry in manifest.entries for entry in INTERACTIVE)
    answers_kinds = all(entry in manifest.entries for entry in GROUNDING)
    abilities = Abilities(
        name=name,
        scale=manifest.scale,
        target=manifest.target,
        precision=manifest.precision,
        note=note,
        clicks=manifest.capacity.clicks if answers_clicks else 0,
        boxes=manifest.capacity.boxes if answers_kinds else 0,
        threshold=THRESHOLD,
        folder=folder is not None,
    )
    photographs = Photographs(files)
    encodings = Encodings(model, photographs, most_encoded)
    return Page(model, abilities, folder, photographs, encodings, ModelQueue(), Sessions())
