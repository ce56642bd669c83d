"""Stores the photographs that were uploaded or chosen as files, and lists the images of the folder of `--images`."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.app.results.overlay import png
from harness.app.segment.sources import find_images
from harness.core.errors import HarnessError
from harness.core.files import write_bytes
from harness.runtime.arrays import Pixels
from harness.runtime.errors import ModelError, reason
from harness.runtime.sam3.images import load_image

if TYPE_CHECKING:
    from PIL import Image


LARGEST_UPLOAD = 256 * 2**20
"""Maximum size of a file in bytes."""
MOST_BYTES = 4 * LARGEST_UPLOAD
"""Maximum size of all files together in bytes."""
LONGEST_NAME = 120
UNNAMED = "photograph"
_QUALITY = 92
"""Quality of the JPEG that the page shows."""
_LONGEST_JPEG = 65500
"""Maximum length of the longer side in pixels: the format allows 65535, Pillow's library this."""

_reading = threading.Lock()
"""Lock for reading images: Pillow warns of large images, and Python's warning filters are shared by all threads."""


@dataclass(frozen=True)
class Photograph:
    """A photograph that can be read.

    Attributes:
        key: Its key on the page: a digest of its name and contents.
        name: Its file name, without folders.
        file: The file with its contents.
        size: Width and height in pixels, upright.
    """

    key: str
    name: str
    file: Path
    size: tuple[int, int]


class Photographs:
    """The photographs of a server that were used last, up to `MOST_BYTES`. Several threads may use it."""

    def __init__(self, folder: Path) -> None:
        """Stores files in a folder that nobody else writes."""
        self._folder = folder
        self._known: OrderedDict[str, Photograph] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, content: bytes, name: str) -> Photograph:
        """Stores a photograph.

        Args:
            content: The contents of an image file.
            name: Its name; folders and unprintable characters are removed.

        Raises:
            ModelError: The file is no image, damaged, or too large.
            HarnessError: The file cannot be stored.
        """
        name = plain_name(name)
        key = hashlib.sha256(name.encode("utf-8", "replace") + b"\0" + content).hexdigest()[:32]
        existing = self._touch(key)
        if existing is not None:
            return existing
        file = self._folder / key
        write_bytes(file, content)
        try:
            size = read_image(file, name).size
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        with self._lock:
            if key not in self._known:
                self._known[key] = Photograph(key, name, file, size)
                self._bytes += len(content)
            while self._bytes > MOST_BYTES and len(self._known) > 1:
                _, oldest = self._known.popitem(last=False)
                self._bytes -= oldest.file.stat().st_size
                oldest.file.unlink()
            return self._known[key]

    def _touch(self, key: str) -> Photograph | None:
        """Marks a photograph as used last and returns it; None if there is none with this key."""
        with self._lock:
            photograph = self._known.get(key)
            if photograph is not None:
                self._known.move_to_end(key)
        return photograph

    def get(self, key: str) -> Photograph:
        """Returns a photograph.

        Raises:
            HarnessError: There is none with this key.
        """
        photograph = self._touch(key)
        if photograph is None:
            raise HarnessError("This photograph is not known here; choose it again.")
        return photograph

    def pixels(self, photograph: Photograph) -> Pixels:
        """Returns the pixels of a photograph, uint8 [h, w, 3], RGB, upright."""
        return np.array(read_image(photograph.file, photograph.name))

    def preview(self, photograph: Photograph) -> tuple[bytes, str]:
        """Returns a photograph as the model sees it, upright, 8-bit RGB, every pixel; and its media type.

        The picture is a JPEG, or a PNG where the photograph is too large for JPEG.
        """
        image = read_image(photograph.file, photograph.name)
        if max(image.size) > _LONGEST_JPEG:
            return png(image), "image/png"
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=_QUALITY)
        return buffer.getvalue(), "image/jpeg"


def read_image(file: Path, name: str) -> Image.Image:
    """Reads an image file as `load_image` does; one thread at a time.

    Raises:
        ModelError: The file is no image, damaged, or too large.
    """
    with _reading:
        return load_image(file, name)


def plain_name(path: str) -> str:
    """Returns a file name without folders and unprintable characters, never empty and not too long."""
    name = path.replace("\\", "/").rpartition("/")[2]
    name = "".join(letter for letter in name if letter.isprintable()).strip()
    if len(name) > LONGEST_NAME:
        stem, dot, suffix = name.rpartition(".")
        name = f"{stem[:LONGEST_NAME]}{dot}{suffix[:10]}" if stem else name[:LONGEST_NAME]
    return name or UNNAMED


class ImageFolder:
    """The images of a folder by name; all are read once in the background, to find broken ones."""

    def __init__(self, folder: Path) -> None:
        """Lists a folder.

        Raises:
            HarnessError: The path is no folder, or the folder has no images.
        """
        if folder.exists() and not folder.is_dir():
            raise HarnessError(f"{folder} is a file; give a folder of images with --images.")
        images = find_images([folder], has_shards=False)
        self._files = {image.name: image for image in images if isinstance(image, Path)}
        self._problems: dict[str, str] = {}
        self._unchecked = len(self._files)

    def check(self) -> None:
        """Starts to read all images in the background."""
        threading.Thread(target=self._check, name="check images", daemon=True).start()

    def _check(self) -> None:
        for name, path in self._files.items():
            try:
                read_image(path, name)
            except ModelError as error:
                self._problems[name] = str(error)
            except Exception as error:  # such as too little memory, which the other files may not need
                self._problems[name] = f"The image {name} cannot be read ({reason(error)}); scale it down."
            self._unchecked -= 1

    def state(self) -> dict[str, Any]:
        """Returns the images and the number of those that were not read yet.

        Returns:
            `images` have a `name` and a `problem`, the sentence that says why one cannot be used, or None; `unchecked`
            is the number.
        """
        unchecked = self._unchecked  # a problem that is found meanwhile belongs to an image that still counts
        images = [{"name": name, "problem": self._problems.get(name)} for name in self._files]
        return {"images": images, "unchecked": unchecked}

    def read(self, name: str) -> bytes:
        """Returns the contents of an image file.

        Raises:
            HarnessError: There is no file of this name, or it cannot be read.
        """
        path = self._files.get(name)
        if path is None:
            raise HarnessError(f"The folder has no image {name!r}; choose one that is listed.")
        try:
            return path.read_bytes()
        except OSError as error:
            raise HarnessError(f"The image {name} cannot be read: {error.strerror or error}.") from error
