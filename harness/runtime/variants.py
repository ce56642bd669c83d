"""Defines and reads the contents of folders for several CPUs.

Packed weights differ from CPU to CPU, because operands are packed into panels as wide as the CPU's registers. Such a
folder therefore has the weights as they were imported, and in it a folder for each CPU, its variant. A variant becomes
an ordinary folder, which runs alone, when it is loaded for the first time (`harness.runtime.preparing`).

    sam3-any/variants.json              names of the variants, and of the weights in order
    sam3-any/<entry>.safetensors        the weights as imported
    sam3-any/x86-64-v3/variant.json     as manifest.json, but without weights
    sam3-any/x86-64-v3/model.so         and everything else that an ordinary folder has
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.runtime.manifest import FORMAT, VARIANT, VARIANTS, File, Manifest, read_description, read_manifest


@dataclass(frozen=True)
class Variants:
    """The contents of a folder for several CPUs.

    Attributes:
        names: Names of the variants, which are folders.
        weights: Names of the weights that each entry point takes, in the order in which its packing takes them.
        files: The files of the weights, by name.
        format: `harness.runtime.manifest.FORMAT` of the version that wrote it.
    """

    names: tuple[str, ...]
    weights: Mapping[str, tuple[str, ...]]
    files: Mapping[str, File]
    format: int = FORMAT

    def to_json(self) -> str:
        """Returns the text of `variants.json`."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def read_variants(folder: Path) -> Variants:
    """Reads the contents of a folder for several CPUs.

    Raises:
        ArtifactError: It is no such folder, or it is of another version or damaged.
    """
    return read_description(folder / VARIANTS, _variants)


def is_for_several(folder: Path) -> bool:
    """Returns whether a folder is for several CPUs."""
    return (folder / VARIANTS).is_file()


def described(folder: Path) -> Manifest:
    """Returns the manifest of a folder; of one for several CPUs, that of its first variant, which has no weights.

    Raises:
        ArtifactError: There is none, or it is of another version or damaged.
    """
    if is_for_several(folder):
        return read_manifest(folder / read_variants(folder).names[0], VARIANT)
    return read_manifest(folder)


def _variants(data: dict[str, Any]) -> Variants:
    """Returns the contents of `variants.json`.

    Raises:
        ValueError: There is no variant.
    """
    names = tuple(map(str, data["names"]))
    if not names:
        raise ValueError("no variant")
    return Variants(
        names,
        {entry: tuple(order) for entry, order in data["weights"].items()},
        {name: File(**file) for name, file in data["files"].items()},
    )
