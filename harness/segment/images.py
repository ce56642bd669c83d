"""Which images a command line means, what their results are called, and writing them."""

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
from harness.files import write_bytes
from harness.runtime.sam3.images import image_suffixes

if TYPE_CHECKING:
    from PIL import Image

_LONGEST = 200


def find_images(paths: Iterable[Path]) -> list[Path]:
    """The images that are named, and those in folders that are named, by name; each once.

    A file that is named is taken whatever it is; of a folder, the files whose suffix is that of an image, not those in
    folders below it.

    Raises:
        HarnessError: A path does not exist, or a folder has no image.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise HarnessError(f"{path} does not exist; give images or folders of images.")
        images = _in_folder(path) if path.is_dir() else [path]
        if not images:
            raise HarnessError(f"The folder {path} has no images; give one that has.")
        for image in images:
            found.setdefault(image.resolve(), image)
    return list(found.values())


def _in_folder(folder: Path) -> list[Path]:
    suffixes, hidden = image_suffixes(), "."
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in suffixes and path.is_file() and not path.name.startswith(hidden)
    )


def unique_names(images: Sequence[Path]) -> list[str]:
    """A name for the results of each image: its own without suffix, with it or a number where others have it too.

    Names differ in more than case, which some file systems do not see, and leave room for what is added to them.
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
    """Cuts a name to its first 200 bytes, of the 255 that a file's name may have."""
    name_bytes = os.fsencode(name)
    return name if len(name_bytes) <= _LONGEST else name_bytes[:_LONGEST].decode(errors="ignore")


def write_png(path: Path, image: Image.Image) -> None:
    """Writes an image as PNG.

    Raises:
        HarnessError: It cannot be written.
    """
    write_bytes(path, png(image))


def mask_png(mask: npt.NDArray[np.bool_]) -> bytes:
    """Returns the file of a mask [h, w]: a PNG of 1 bit a pixel."""
    from PIL import Image

    return png(Image.fromarray(mask))


def png(image: Image.Image) -> bytes:
    """Returns the PNG file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
