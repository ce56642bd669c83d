"""Files that are there as a whole or not at all."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.errors import HarnessError

if TYPE_CHECKING:
    from PIL import Image


def make_folder(folder: Path) -> None:
    """Makes a folder, with those above it, and makes sure that it can be written.

    Raises:
        HarnessError: It cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise HarnessError(f"Cannot write into {folder}: {error.strerror}; give another folder.") from error


def write_png(path: Path, image: Image.Image) -> None:
    """Writes an image as PNG.

    Raises:
        HarnessError: It cannot be written.
    """
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    write_bytes(path, buffer.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON.

    Raises:
        HarnessError: It cannot be written.
    """
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file under a temporary name, then renames it.

    Raises:
        HarnessError: It cannot be written; what was there before still is.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise HarnessError(f"Cannot write {path}: {error.strerror}; free some space or give another folder.") from error
    finally:
        temporary.unlink(missing_ok=True)
