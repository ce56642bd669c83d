"""Compares the files of a folder with the sizes and checksums in its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.runtime.manifest import OPTIONAL, ArtifactError, File
from harness.runtime.weights import file_digest


def check_files(folder: Path, files: Mapping[str, File], *, contents: bool) -> None:
    """Compares files with their expected sizes, and then, if requested, with their checksums.

    Args:
        folder: The folder.
        files: Expected sizes and checksums, by file name.
        contents: Whether to compare checksums.

    Raises:
        ArtifactError: A file is missing or differs.
    """
    present = {name: file for name, file in files.items() if name not in OPTIONAL or (folder / name).exists()}
    for name, expected in present.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(f"{folder} is incomplete: {name} is missing; copy the whole folder, or compile again")
        if path.stat().st_size != expected.bytes:
            raise ArtifactError(
                f"{path} is damaged: {path.stat().st_size} bytes instead of {expected.bytes}; "
                "copy it again, or compile again"
            )
    if contents:
        with ThreadPoolExecutor() as pool:
            actual: Mapping[str, File] = dict(
                zip(present, pool.map(lambda name: file_digest(folder / name), present), strict=True)
            )
        for name, file in actual.items():
            if file != present[name]:
                raise ArtifactError(f"{folder / name} is damaged, its checksum is wrong: copy it or compile again")
