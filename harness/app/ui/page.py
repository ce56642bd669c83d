"""Builds the state of a running page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.app.ui.encodings import Encodings, ModelQueue
from harness.app.ui.photographs import ImageFolder, Photographs
from harness.app.ui.sessions import Sessions
from harness.runtime import Sam3
from harness.runtime.sam3.image_model import GROUNDING, INTERACTIVE, THRESHOLD


@dataclass(frozen=True)
class Abilities:
    """The abilities of the page with a compiled model.

    Attributes:
        name: The model's folder.
        scale, target, precision: Those of the model.
        note: The sentence that says that its weights are untrained; None if they are trained.
        clicks: Maximum number of points on one object; 0 where the model was compiled without clicks.
        boxes: Maximum number of boxes of a prompt for all of a kind; 0 where the model was compiled for clicks alone.
        threshold: Default threshold of scores.
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
    """The state of a page: a model, and its users in browsers.

    Attributes:
        model: The model; called in the queue's thread alone.
        abilities: The abilities of the page.
        folder: The images of `--images`; None without this option.
        photographs: The uploaded photographs.
        encodings: The encoded photographs.
        queue: The calls that wait for the model.
        sessions: The state of each tab.
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
        model: The model; called in the queue's thread alone.
        name: Name of the model on the page.
        folder: Images to choose from.
        files: Folder for uploads.
        note: The note about the weights for users.
        most_encoded: Maximum number of cached encoded photographs.
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
        clicks=model.description.capacity.clicks if answers_clicks else 0,
        boxes=model.description.capacity.boxes if answers_kinds else 0,
        threshold=THRESHOLD,
        folder=folder is not None,
    )
    photographs = Photographs(files)
    encodings = Encodings(model, photographs, most_encoded)
    return Page(model, abilities, folder, photographs, encodings, ModelQueue(), Sessions())
