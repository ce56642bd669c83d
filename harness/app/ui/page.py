"""Builds the state of a running page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.app.ui.encodings import Encodings, ModelQueue
from harness.app.ui.photographs import ImageFolder, Photographs
from harness.app.ui.sessions import Sessions
from harness.runtime import Sam3
from harness.runtime.sam3.image_model import GROUNDING, INTERACTIVE, THRESHOLD


@dataclass(frozen=True)
class Page:
    """The state of a page: a model, and its users in browsers.

    Attributes:
        model: The model; called in the queue's thread alone.
        abilities: Name, scale, target and precision of the model; `note`, the sentence that its weights are untrained,
            or None; `clicks`, the maximum number of points on one object, and `boxes`, that of boxes of a prompt for
            all of a kind, 0 where the model was compiled without such prompts; the default `threshold` of scores; `folder`,
            whether there is a folder of images to choose from.
        folder: The images of `--images`; None without this option.
        photographs: The uploaded photographs.
        encodings: The encoded photographs.
        queue: The calls that wait for the model.
        sessions: The state of each tab.
    """

    model: Sam3
    abilities: Mapping[str, Any]
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
    abilities = {
        "name": name,
        "scale": manifest.scale,
        "target": manifest.target,
        "precision": manifest.precision,
        "note": note,
        "clicks": model.description.capacity.clicks if answers_clicks else 0,
        "boxes": model.description.capacity.boxes if answers_kinds else 0,
        "threshold": THRESHOLD,
        "folder": folder is not None,
    }
    photographs = Photographs(files)
    encodings = Encodings(model, photographs, most_encoded)
    return Page(model, abilities, folder, photographs, encodings, ModelQueue(), Sessions())
