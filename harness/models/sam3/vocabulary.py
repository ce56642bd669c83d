"""Finds the BPE vocabulary of an installed package without importing that package."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from harness.core.errors import HarnessError
from harness.runtime.sam3 import VOCABULARY_FILE
from harness.runtime.sam3.tokenizer import Tokenizer


def package_folder() -> Path | None:
    """Returns the folder of the installed sam3 package; None if it is not installed."""
    spec = find_spec("sam3")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def shipped_vocabulary() -> Path | None:
    """Returns the vocabulary file of the sam3 package, which the published wheel lacks; None without one."""
    folder = package_folder()
    paths = () if folder is None else (place / "assets" / VOCABULARY_FILE for place in (folder, folder.parent))
    return next(filter(Path.is_file, paths), None)


def vocabulary_path() -> Path:
    """Returns the path of the vocabulary file.

    Raises:
        HarnessError: Neither sam3 nor open_clip_torch brings the file.
    """
    if (shipped := shipped_vocabulary()) is not None:
        return shipped
    try:
        files = metadata.files("open_clip_torch") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name == VOCABULARY_FILE and path.is_file():
            return path
    raise HarnessError(
        f"The BPE vocabulary {VOCABULARY_FILE} was not found in the installed packages sam3 and open_clip_torch; "
        "install open_clip_torch, which carries it."
    )


@cache
def installed_tokenizer() -> Tokenizer:
    """Returns the tokenizer with the vocabulary of an installed package.

    Raises:
        HarnessError: No installed package brings the file.
        ModelError: The file is damaged.
    """
    return Tokenizer.read(vocabulary_path())
