"""Defines the manifest of an artifact folder, `manifest.json`, and the description of a folder for several CPUs.

Packed weights differ from CPU to CPU, because operands are packed into panels as wide as the CPU's registers. A folder
for several CPUs therefore has the weights as they were imported, and in it a folder for each CPU, its variant. A
variant becomes an ordinary folder, which runs alone, when it is loaded for the first time
(`harness.runtime.preparing`).

    sam3-any/variants.json              names of the variants, and of the weights in order
    sam3-any/<entry>.safetensors        the weights as imported
    sam3-any/x86-64-v3/variant.json     as manifest.json, but without weights
    sam3-any/x86-64-v3/model.so         and everything else that an ordinary folder has
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict

from harness.runtime.decoding import convert, decode
from harness.runtime.errors import ModelError

FORMAT = 1
"""Version of the folder's layout; a runtime reads this version alone."""
MANIFEST = "manifest.json"
VARIANTS = "variants.json"
"""Describes a folder for several CPUs; see `harness.runtime.manifest`."""
VARIANT = "variant.json"
"""Describes one CPU's variant in such a folder: its manifest until its weights are packed."""
LIBRARY = "model.so"
PACKING_LIBRARY = "packing.so"
"""Packs the weights of every entry point; runs on the machine that compiled, whatever the target is."""
CUDART = "libcudart.so.13"
"""CUDA's runtime library that TVM 0.27 is linked with; NVIDIA allows its redistribution (CUDA EULA, attachment A)."""
RUNTIME_LIBRARIES = (
    *(f"libtvm_runtime{device}.{suffix}" for device in ("", "_cuda", "_metal") for suffix in ("so", "dylib")),
    CUDART,
)
"""Libraries that a folder has for machines without TVM."""
OPTIONAL = (PACKING_LIBRARY, *RUNTIME_LIBRARIES)
"""Files without which a folder still runs."""


def weights_file(entry: str) -> str:
    """Returns the name of the file with the weights of an entry point."""
    return f"{entry}.safetensors"


class ArtifactError(ModelError):
    """A folder that is no artifact, is damaged, or was made for another machine or version."""


class TensorSpec(Struct, frozen=True):
    """An input or output tensor of an entry point; a dimension is a number, or a letter where any extent is allowed.

    Attributes:
        below: For an input of indices, their exclusive upper bound: a number or the letter of a dimension; the lower
            bound is 0. None for other tensors and in folders that were compiled before this field existed.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    below: int | str | None = None


class Entry(Struct, frozen=True):
    """The signature of an entry point.

    Attributes:
        inputs, outputs: Its tensors, in order.
        weights: Names in its weights file, in the order in which it takes them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[str, ...] = ()


class File(Struct, frozen=True, forbid_unknown_fields=True):
    """Size and checksum of a file of the folder."""

    bytes: int
    sha256: str


class Description(Struct, frozen=True):
    """A description of a folder, which is a JSON file in it."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Returns the description of a decoded file.

        Raises:
            ValueError: The data do not have this form; the clause names the field.
        """
        return convert(data, cls)

    def to_json(self) -> str:
        """Returns the text of the file."""
        return _encode(asdict(self))


class Manifest(Description, frozen=True, forbid_unknown_fields=True):
    """All facts about an artifact that are not in its library or its weights.

    Attributes:
        format: `FORMAT` of the version that wrote it.
        made: The time (UTC), the versions of the packages and the options of the compilation.
        target: Name of the target.
        system, architecture: The system that the library runs on, for instance `Linux` and `x86_64`.
        cpu: LLVM's name of the CPU that host code was compiled for.
        cpu_features: The features of this CPU that the code may use, in LLVM's spelling.
        architectures: GPU architectures that the library has code for, in the format of
            `harness.runtime.devices.architecture_problem`; empty if it runs on every GPU.
        scale, strategy: Scale of the model and strategy of its rotary position encoding.
        precision: Type of weights and operands of products: `fp32`, `fp16` or `bf16`. Inputs and outputs of the entry
            points have the types in `entries`, and none of these is a half type.
        float32: Groups of products that stay float32 in a half precision.
        model: Name of the compiled model.
        frontend: Name of the frontend that exported and imported the model.
        weights: Origin of the weights: `seed 0`, or name and digest of a checkpoint.
        trained: Whether the weights are from a checkpoint.
        entries: The entry points, by name.
        files: All other files of the folder, by name.
        extra: The model's own part, which its runtime reads; beside the other keys in the file.
    """

    made: Mapping[str, str]
    target: str
    system: str
    architecture: str
    cpu: str
    cpu_features: tuple[str, ...]
    scale: str
    strategy: str
    weights: str
    trained: bool
    entries: Mapping[str, Entry]
    files: Mapping[str, File]
    architectures: tuple[str, ...] = ()
    precision: str = "fp32"
    float32: tuple[str, ...] = ()
    model: str = "sam3"
    frontend: str = "torch"
    format: int = FORMAT
    extra: Mapping[str, Any] = {}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Returns the manifest of a decoded file; the keys of the model go to `extra`."""
        common = {name: value for name, value in data.items() if name in cls.__struct_fields__ and name != "extra"}
        return convert({**common, "extra": {name: data[name] for name in data.keys() - common.keys()}}, cls)

    def to_json(self) -> str:
        """Returns the text of `manifest.json`."""
        facts = asdict(self)
        return _encode({**facts.pop("extra"), **facts})


Described = TypeVar("Described", bound=Description)


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """Reads a folder's manifest.

    Args:
        folder: The folder.
        name: Name of the file.

    Raises:
        ArtifactError: The file is missing, damaged, or of another version.
    """
    return read_description(folder / name, Manifest)


def read_description(path: Path, kind: type[Described]) -> Described:
    """Reads a JSON file that describes its folder.

    Args:
        path: The file.
        kind: Type of the description.

    Raises:
        ArtifactError: The file is missing, damaged, or of another version.
    """
    folder = path.parent
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder: make one with `sam3-tvm compile --out {folder}`")
    try:
        data = decode(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(_absent(path)) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}): compile the model again") from error
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise ArtifactError(
            f"{folder} was written in version {version} of the format, this program reads version {FORMAT}: "
            "compile the model again, or use the program that compiled it"
        )
    try:
        return kind.from_data(data)
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged ({error}): compile the model again") from error


def _absent(path: Path) -> str:
    """Returns the sentence that says what to do about a missing description."""
    folder = path.parent
    if (folder / VARIANTS).is_file():
        return f"{folder} is for several CPUs: give the folder of one of them, which is in it"
    if (folder / VARIANT).is_file():
        return f"{folder} has no packed weights yet: load it once on its CPU, within the folder that was compiled"
    return f"{folder} is no compiled model, it has no {path.name}: give the folder that `sam3-tvm compile` wrote"


def _encode(data: Any) -> str:
    return json.dumps(data, default=asdict, indent=1, sort_keys=True) + "\n"


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
