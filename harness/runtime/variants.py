"""Defines and reads the spec of folders for several CPUs.

Packed weights differ from CPU to CPU, because operands are packed into panels as wide as the CPU's registers. Such a
folder therefore has the weights as they were imported, and in it a folder for each CPU, its variant. A variant becomes
an ordinary folder, which runs alone, when it is loaded for the first time (`harness.runtime.preparing`).

    sam3-any/variants.json              names of the variants, and of the weights in order
    sam3-any/<entry>.safetensors        the weights as imported
    sam3-any/x86-64-v3/variant.json     as manifest.json, but without weights
    sam3-any/x86-64-v3/model.so         and everything else that an ordinary folder has
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from harness.runtime.manifest import (
    FORMAT,
    VARIANT,
    VARIANTS,
    Description,
    File,
    Manifest,
    read_description,
    read_manifest,
)


class Variants(Description, frozen=True):
    """The contents of a folder for several CPUs.

    Attributes:
        names: Names of the variants, which are folders.
        weights: Names of the weights that each entry point takes, in the order in which its packing takes them.
        files: The files of the weights, by name.
        format: `harness.runtime.manifest.FORMAT` of the version that wrote it.
    """

    names: Annotated[tuple[str, ...], Meta(min_length=1)]
    weights: Mapping[str, tuple[str, ...]]
    files: Mapping[str, File]
    format: int = FORMAT


def read_variants(folder: Path) -> Variants:
    """Reads the contents of a folder for several CPUs.

    Raises:
        ArtifactError: It is no such folder, or it is of another version or damaged.
    """
    return read_description(folder / VARIANTS, Variants)


def is_for_several(folder: Path) -> bool:
    """Returns whether a folder is for several CPUs."""
    return (folder / VARIANTS).is_file()


def read_any_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a folder; of one for several CPUs, that of its first variant, which has no weights.

    Raises:
        ArtifactError: There is none, or it is of another version or damaged.
    """
    if is_for_several(folder):
        return read_manifest(folder / read_variants(folder).names[0], VARIANT)
    return read_manifest(folder)
