"""Lists the images of the folder of `--images`, and finds those that cannot be read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.app.segment.images import find_images
from harness.app.ui.photographs import read_image
from harness.core.errors import HarnessError
from harness.runtime.errors import ModelError, reason


@dataclass(frozen=True)
class FolderImage:
    """An image of the folder.

    Attributes:
        name: Its file name.
        problem: The sentence that says why it cannot be used; None if it can be, or was not checked yet.
    """

    name: str
    problem: str | None


class ImageFolder:
    """The images of a folder by name; all are read once in the background, to find broken ones."""

    def __init__(self, folder: Path) -> None:
        """Lists a folder.

        Raises:
            HarnessError: The path is no folder, or the folder has no images.
        """
        if folder.exists() and not folder.is_dir():
            raise HarnessError(f"{folder} is a file; give a folder of images with --images.")
        self._files = {path.name: path for path in find_images([folder])}
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

    @property
    def unchecked(self) -> int:
        """Number of images that were not read yet."""
        return self._unchecked

    @property
    def images(self) -> Sequence[FolderImage]:
        """All images, by name."""
        return [FolderImage(name, self._problems.get(name)) for name in self._files]

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
