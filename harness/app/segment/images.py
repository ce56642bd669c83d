"""Finds the images of a command line, names their results, and encodes PNG files."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.core.errors import HarnessError
from harness.core.files import write_bytes
from harness.runtime.sam3.images import image_suffixes

if TYPE_CHECKING:
    from PIL import Image

_LONGEST = 200


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Returns the images among the paths and in the folders among them, sorted by name; each image once.

    A file is taken whatever its suffix. Of a folder, files with the suffix of an image are taken, without subfolders.

    Raises:
        HarnessError: A path does not exist, or a folder has no image.
    """
    unique: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise HarnessError(f"{path} does not exist; give images or folders of images.")
        images = _in_folder(path) if path.is_dir() else [path]
        if not images:
            raise HarnessError(f"The folder {path} has no images; give one that has.")
        for image in images:
            unique.setdefault(image.resolve(), image)
    return list(unique.values())


def _in_folder(folder: Path) -> list[Path]:
    suffixes, hidden = image_suffixes(), "."
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in suffixes and path.is_file() and not path.name.startswith(hidden)
    )


def unique_names(images: Sequence[Path]) -> list[str]:
    """Returns a name for the results of each image: its stem, or its file name or a number where stems are equal.

    Names differ in more than case, which some file systems ignore, and leave room for suffixes.
    """
    stems = Counter(image.stem.casefold() for image in images)
    taken: set[str] = set()
    names = []
    for image in images:
        base = _short(image.stem if stems[image.stem.casefold()] == 1 else image.name)
        name, number = base, 1
        while name.casefold() in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name.casefold())
        names.append(name)
    return names


def _short(name: str) -> str:
    """Cuts a name to its first 200 bytes; file systems allow 255 bytes with the suffix."""
    name_bytes = os.fsencode(name)
    return name if len(name_bytes) <= _LONGEST else name_bytes[:_LONGEST].decode(errors="ignore")


def write_png(path: Path, image: Image.Image) -> None:
    """Writes an image as PNG.

    Raises:
        HarnessError: The file cannot be written.
    """
    write_bytes(path, png(image))


def mask_png(mask: npt.NDArray[np.bool_]) -> bytes:
    """Returns the PNG file of a mask [h, w], with 1 bit per pixel."""
    from PIL import Image

    return png(Image.fromarray(mask))


def png(image: Image.Image) -> bytes:
    """Returns the PNG file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
